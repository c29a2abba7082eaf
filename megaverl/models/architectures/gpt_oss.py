"""Table of gpt-oss's weights: biases on every linear layer, attention sinks, and stacked experts.

All experts of a layer lie in one transposed array `[experts, in, out]`, whose columns
alternate between gate and up. Megatron and vLLM store these columns as rows in the same
order. A hook after Megatron's `linear_fc1` moves the gates to the front
(`models/build.py`); vLLM's activation reads alternating rows (0.32,
`models/gpt_oss.py`).
"""

from dataclasses import replace

from megaverl.models.architectures import llama
from megaverl.models.architectures.table import EMBEDDING, Layers, Rule
from megaverl.sharding.weight import Split

SINK_QKV = ("self_attention.linear_qkv", "attn.qkv_proj")
OUT = ("self_attention.linear_proj", "attn.o_proj")
ROUTER = ("mlp.router", "mlp.router")


def stacked_experts(
    name: str, axes: tuple[str, ...], split: Split, number: int, vllm: str
) -> Rule:
    """Return the rule of an array that holds all experts of a layer.

    Args:
        number: 1 or 2, for Megatron's `linear_fc1` or `linear_fc2`.
    """
    return llama.expert_linear(
        f"mlp.experts.{name}",
        ("experts", *axes),
        split,
        number,
        f"mlp.experts.routed_experts.{vllm}",
    )


SINK_ATTENTION = (
    llama.norm("input_layernorm", "input_layernorm", "self_attention.linear_qkv"),
    *(
        llama.linear(f"self_attn.{part}_proj", (axis, "hidden"), split, SINK_QKV)
        for part, axis, split in llama.PARTS
    ),
    *(
        llama.linear(
            f"self_attn.{part}_proj", (f"{axis}_bias",), split, SINK_QKV, "bias"
        )
        for part, axis, split in llama.PARTS
    ),
    llama.linear("self_attn.o_proj", ("hidden", "q"), Split.ROW, OUT),
    llama.linear("self_attn.o_proj", ("hidden",), Split.REPLICATED, OUT, "bias"),
    Rule(
        "self_attn.sinks",
        ("heads",),
        Split.COLUMN,
        "self_attention.core_attention.softmax_offset",
        "attn.sinks",
    ),
)
EXPERTS = (
    llama.norm("post_attention_layernorm", "pre_mlp_layernorm"),
    llama.linear("mlp.router", ("experts", "hidden"), Split.REPLICATED, ROUTER),
    llama.linear("mlp.router", ("experts",), Split.REPLICATED, ROUTER, "bias"),
    stacked_experts(
        "gate_up_proj", ("hidden", "gate_up"), Split.STACKED_OUT, 1, "w13_weight"
    ),
    stacked_experts(
        "gate_up_proj_bias", ("gate_up",), Split.STACKED_OUT, 1, "w13_bias"
    ),
    stacked_experts(
        "down_proj", ("expert_ffn", "hidden"), Split.STACKED_IN, 2, "w2_weight"
    ),
    stacked_experts("down_proj_bias", ("hidden",), Split.STACKED_WHOLE, 2, "w2_bias"),
)
GPT_OSS = Layers(
    routed=SINK_ATTENTION + EXPERTS,
    embedding=replace(EMBEDDING, vllm="model.embedding.weight"),
)
