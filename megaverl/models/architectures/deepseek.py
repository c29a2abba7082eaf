"""Table of DeepSeek-V3's weights: latent attention, plain MLPs in the first layers, then routed and shared experts.

Megatron's names come from `transformer/multi_latent_attention.py`,
`transformer/moe/router.py` and `shared_experts.py`. Megatron keeps the router's bias as
a buffer; `models/layers.py` makes it a parameter. vLLM's names come from
`models/deepseek_v2.py`, which creates the bias only if config.json has `"topk_method":
"noaux_tc"`. Folders written by transformers 5 lack that entry.
"""

from megaverl.models.architectures import llama
from megaverl.models.architectures.table import Layers, Rule
from megaverl.sharding.weight import Split

WHOLE = Split.REPLICATED
ROWS = Split.COLUMN
COLUMNS = Split.ROW
FUSED = "fused_qkv_a_proj"
Q_UP = "linear_q_up_proj"
KV_UP = "linear_kv_up_proj"
BIAS = "mlp.gate.e_score_correction_bias"


def attention(
    name: str,
    axes: tuple[str, ...],
    split: Split,
    megatron: str,
    *,
    vllm: str = "",
    norm_of: str | None = None,
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
    # Without q_lora_rank queries are projected from the hidden state directly, and vLLM
    # fuses nothing.
    attention("q_proj", ("q_direct", "hidden"), ROWS, "linear_q_proj"),
    attention(
        "q_a_proj", ("q_latent", "hidden"), WHOLE, "linear_q_down_proj", vllm=FUSED
    ),
    attention("q_a_layernorm", ("q_latent",), WHOLE, "q_layernorm", norm_of=Q_UP),
    attention("q_b_proj", ("q", "q_latent"), ROWS, Q_UP),
    attention(
        "kv_a_proj_with_mqa",
        ("kv_a_fused", "hidden"),
        WHOLE,
        "linear_kv_down_proj",
        vllm=FUSED,
    ),
    attention(
        "kv_a_proj_with_mqa", ("kv_a_alone", "hidden"), WHOLE, "linear_kv_down_proj"
    ),
    attention("kv_a_layernorm", ("kv_latent",), WHOLE, "kv_layernorm", norm_of=KV_UP),
    attention("kv_b_proj", ("kv_up", "kv_latent"), ROWS, KV_UP),
    attention("o_proj", ("hidden", "values"), COLUMNS, "linear_proj"),
)
SHARED_EXPERTS = llama.shared_expert("mlp.shared_experts")


def router_bias(name: str) -> tuple[Rule, ...]:
    """Return the rule of the bias that a router adds to scores before it chooses experts."""
    return (Rule(name, ("expert_bias",), WHOLE, "mlp.router.expert_bias", name),)


# Ernie 4.5's files hold this bias in a module of its own, with an axis of size one.
ERNIE_ROUTER_BIAS = (
    Rule(
        "mlp.moe_statics.e_score_correction_bias",
        ("one", "expert_bias"),
        Split.FLATTENED,
        "mlp.router.expert_bias",
        BIAS,
    ),
)


ROUTER_BIAS = router_bias(BIAS)
DEEPSEEK_V2 = Layers(
    dense=LATENT_ATTENTION + llama.MLP,
    routed=LATENT_ATTENTION + llama.experts() + SHARED_EXPERTS,
)
DEEPSEEK_V3 = Layers(
    dense=LATENT_ATTENTION + llama.MLP,
    routed=LATENT_ATTENTION + llama.experts() + ROUTER_BIAS + SHARED_EXPERTS,
)
