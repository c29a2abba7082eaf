"""Tables of each architecture's weights, looked up by the Hugging Face name of the architecture.

DeepSeek-V3 has latent attention, plain MLPs in the first layers, then routed and shared experts with a router bias.
Megatron's names come from `transformer/multi_latent_attention.py`, `transformer/moe/router.py` and `shared_experts.py`.
Megatron keeps the bias as a buffer; `models/layers.py` makes it a parameter. vLLM's names come from
`models/deepseek_v2.py`, which creates the bias only if config.json has `"topk_method": "noaux_tc"`. Folders written by
transformers 5 lack that entry.

gpt-oss has biases on every linear layer, attention sinks, and all experts of a layer in one transposed array `[experts,
in, out]`, whose columns alternate between gate and up. Megatron and vLLM store these columns as rows in the same order.
A hook after Megatron's `linear_fc1` moves the gates to the front (`models/build.py`); vLLM's activation reads
alternating rows (0.32, `models/gpt_oss.py`).
"""

from dataclasses import replace

from megaverl.errors import ModelError
from megaverl.models.architectures import llama
from megaverl.models.architectures.llama import ATTENTION, MLP, QK_NORMS, QKV_BIAS, experts
from megaverl.models.architectures.table import EMBEDDING, Layers, Rule, build
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import Split, Weight

WHOLE, ROWS, COLUMNS = Split.REPLICATED, Split.COLUMN, Split.ROW
FUSED, Q_UP, KV_UP = "fused_qkv_a_proj", "linear_q_up_proj", "linear_kv_up_proj"
BIAS = "mlp.gate.e_score_correction_bias"
SHARED_FC1 = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.gate_up_proj")


def attention(
    name: str, axes: tuple[str, ...], split: Split, megatron: str, *, vllm: str = "", norm_of: str | None = None
) -> Rule:
    """Return the rule of a weight inside `self_attn`.

    Args:
        name: module name in Hugging Face's files.
        axes: sizes of the weight's axes, by the names in `table._sizes`.
        megatron: module name in Megatron's `self_attention`.
        vllm: module name in vLLM's `self_attn`, if it differs from `name`.
        norm_of: linear layer that holds this norm under Transformer Engine, which fuses the two.
    """
    return Rule(
        f"self_attn.{name}.weight",
        axes,
        split,
        f"self_attention.{megatron}.weight",
        f"self_attn.{vllm or name}.weight",
        transformer_engine=norm_of and f"self_attention.{norm_of}.layer_norm_weight",
    )


LATENT_ATTENTION = (
    llama.norm("input_layernorm", "input_layernorm"),
    # Without q_lora_rank queries are projected from the hidden state directly, and vLLM fuses nothing.
    attention("q_proj", ("q_direct", "hidden"), ROWS, "linear_q_proj"),
    attention("q_a_proj", ("q_latent", "hidden"), WHOLE, "linear_q_down_proj", vllm=FUSED),
    attention("q_a_layernorm", ("q_latent",), WHOLE, "q_layernorm", norm_of=Q_UP),
    attention("q_b_proj", ("q", "q_latent"), ROWS, Q_UP),
    attention("kv_a_proj_with_mqa", ("kv_a_fused", "hidden"), WHOLE, "linear_kv_down_proj", vllm=FUSED),
    attention("kv_a_proj_with_mqa", ("kv_a_alone", "hidden"), WHOLE, "linear_kv_down_proj"),
    attention("kv_a_layernorm", ("kv_latent",), WHOLE, "kv_layernorm", norm_of=KV_UP),
    attention("kv_b_proj", ("kv_up", "kv_latent"), ROWS, KV_UP),
    attention("o_proj", ("hidden", "values"), COLUMNS, "linear_proj"),
)
SHARED_EXPERTS = (
    llama.linear("mlp.shared_experts.gate_proj", ("shared_ffn", "hidden"), Split.GATE, SHARED_FC1),
    llama.linear("mlp.shared_experts.up_proj", ("shared_ffn", "hidden"), Split.UP, SHARED_FC1),
    llama.linear(
        "mlp.shared_experts.down_proj",
        ("hidden", "shared_ffn"),
        Split.ROW,
        ("mlp.shared_experts.linear_fc2", "mlp.shared_experts.down_proj"),
    ),
)
ROUTER_BIAS = (Rule(BIAS, ("expert_bias",), WHOLE, "mlp.router.expert_bias", BIAS),)
DEEPSEEK_V3 = Layers(
    dense=LATENT_ATTENTION + llama.MLP, routed=LATENT_ATTENTION + llama.experts() + ROUTER_BIAS + SHARED_EXPERTS
)


SINK_QKV = ("self_attention.linear_qkv", "attn.qkv_proj")
OUT = ("self_attention.linear_proj", "attn.o_proj")
ROUTER = ("mlp.router", "mlp.router")


def stacked_experts(name: str, axes: tuple[str, ...], split: Split, number: int, vllm: str) -> Rule:
    """Return the rule of an array that holds all experts of a layer.

    Args:
        number: 1 or 2, for Megatron's `linear_fc1` or `linear_fc2`.
    """
    kind = "bias" if name.endswith("bias") else "weight"
    return Rule(
        f"mlp.experts.{name}",
        ("experts", *axes),
        split,
        f"mlp.experts.local_experts.{{}}.linear_fc{number}.{kind}",
        f"mlp.experts.routed_experts.{vllm}",
        transformer_engine=f"mlp.experts.linear_fc{number}.{kind}{{}}",
    )


SINK_ATTENTION = (
    llama.norm("input_layernorm", "input_layernorm", "self_attention.linear_qkv"),
    *(llama.linear(f"self_attn.{part}_proj", (axis, "hidden"), split, SINK_QKV) for part, axis, split in llama.PARTS),
    *(
        llama.linear(f"self_attn.{part}_proj", (f"{axis}_bias",), split, SINK_QKV, "bias")
        for part, axis, split in llama.PARTS
    ),
    llama.linear("self_attn.o_proj", ("hidden", "q"), Split.ROW, OUT),
    llama.linear("self_attn.o_proj", ("hidden",), Split.REPLICATED, OUT, "bias"),
    Rule("self_attn.sinks", ("heads",), Split.COLUMN, "self_attention.core_attention.softmax_offset", "attn.sinks"),
)
EXPERTS = (
    llama.norm("post_attention_layernorm", "pre_mlp_layernorm"),
    llama.linear("mlp.router", ("experts", "hidden"), Split.REPLICATED, ROUTER),
    llama.linear("mlp.router", ("experts",), Split.REPLICATED, ROUTER, "bias"),
    stacked_experts("gate_up_proj", ("hidden", "gate_up"), Split.STACKED_OUT, 1, "w13_weight"),
    stacked_experts("gate_up_proj_bias", ("gate_up",), Split.STACKED_OUT, 1, "w13_bias"),
    stacked_experts("down_proj", ("expert_ffn", "hidden"), Split.STACKED_IN, 2, "w2_weight"),
    stacked_experts("down_proj_bias", ("hidden",), Split.STACKED_WHOLE, 2, "w2_bias"),
)
GPT_OSS = Layers(routed=SINK_ATTENTION + EXPERTS, embedding=replace(EMBEDDING, vllm="model.embedding.weight"))


LAYERS = {
    "LlamaForCausalLM": llama.LAYERS,
    "Qwen2ForCausalLM": Layers(dense=ATTENTION + QKV_BIAS + MLP),
    "Qwen3ForCausalLM": Layers(dense=ATTENTION + QK_NORMS + MLP),
    "MistralForCausalLM": llama.LAYERS,
    "GemmaForCausalLM": llama.LAYERS,
    "MixtralForCausalLM": Layers(routed=ATTENTION + experts("block_sparse_moe", "w1", "w3", "w2")),
    "Qwen3MoeForCausalLM": Layers(routed=ATTENTION + QK_NORMS + experts()),
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Glm4MoeForCausalLM": Layers(
        dense=ATTENTION + QKV_BIAS + QK_NORMS + MLP,
        routed=ATTENTION + QKV_BIAS + QK_NORMS + experts() + ROUTER_BIAS + SHARED_EXPERTS,
    ),
    "GptOssForCausalLM": GPT_OSS,
}
WITH_QKV_BIAS = ("Qwen2ForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM")


def weights_of(spec: ModelSpec, *, value_head: int = 0, beside_logits: bool = False) -> list[Weight]:
    """Return all global arrays of a model, under their Hugging Face names.

    Args:
        value_head: number of values per position. Above 0, the model is a critic: `score.weight` `[value_head, hidden]`
            replaces the language-model head, and embeddings are not tied.
        beside_logits: keep the language-model head beside the value head, for an actor and critic on one backbone.

    Raises:
        ModelError: the architecture has no table, or has attention biases that the table lacks.
    """
    if spec.architecture not in LAYERS:
        raise ModelError(f"architecture {spec.architecture!r} has no table of weights. Supported: {', '.join(LAYERS)}.")
    if spec.qkv_bias and spec.architecture not in WITH_QKV_BIAS:
        raise ModelError(
            f"{spec.architecture} with `attention_bias: true` is not supported: only {', '.join(WITH_QKV_BIAS)} may "
            "have biases on their attention projections."
        )
    return build(LAYERS[spec.architecture], spec, value_head=value_head, beside_logits=beside_logits)
