"""Table of Granite MoE's weights: Llama's attention, and all experts of a layer in two arrays.

`input_linear` is `[experts, gate rows then up rows, hidden]`, `output_linear`
`[experts, hidden, expert ffn]`. Megatron and vLLM store each expert in this order.
"""

from megaverl.models.architectures import llama
from megaverl.models.architectures.table import Layers, Rule
from megaverl.sharding.weight import Split

BLOCK = "block_sparse_moe"


def stacked_experts(
    name: str, axes: tuple[str, ...], split: Split, number: int, vllm: str
) -> Rule:
    """Return the rule of an array that holds all experts of a layer.

    Args:
        number: 1 or 2, for Megatron's `linear_fc1` or `linear_fc2`.
    """
    return Rule(
        f"{BLOCK}.{name}.weight",
        ("experts", *axes),
        split,
        f"mlp.experts.local_experts.{{}}.linear_fc{number}.weight",
        f"{BLOCK}.experts.routed_experts.{vllm}_weight",
        transformer_engine=f"mlp.experts.linear_fc{number}.weight{{}}",
    )


EXPERTS = (
    # Transformer Engine fuses this norm only into a linear layer that follows it.
    llama.norm("post_attention_layernorm", "pre_mlp_layernorm"),
    llama.linear(
        f"{BLOCK}.router.layer",
        ("experts", "hidden"),
        Split.REPLICATED,
        ("mlp.router", f"{BLOCK}.gate"),
    ),
    stacked_experts(
        "input_linear", ("gate_up", "hidden"), Split.STACKED_GATE_UP, 1, "w13"
    ),
    stacked_experts(
        "output_linear", ("hidden", "expert_ffn"), Split.STACKED_ROW, 2, "w2"
    ),
)
GRANITE_MOE = Layers(routed=llama.ATTENTION + EXPERTS)
