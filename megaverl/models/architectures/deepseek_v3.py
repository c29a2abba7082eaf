"""DeepSeek-V3: latent attention, a plain MLP in the first layers, then routed and shared experts with a router bias.

Megatron's names: `transformer/multi_latent_attention.py`, `transformer/moe/router.py` (where the bias is a buffer; in
our `models/layers.py` a parameter) and `shared_experts.py`. vLLM's: `models/deepseek_v2.py`, which makes the bias only
where config.json says `"topk_method": "noaux_tc"` (folders that transformers 5 wrote do not say so).
"""

from megaverl.models.architectures import llama
from megaverl.models.architectures.table import Layers, Rule
from megaverl.sharding.weight import Split

WHOLE, ROWS, COLUMNS = Split.REPLICATED, Split.COLUMN, Split.ROW
FUSED, Q_UP, KV_UP = "fused_qkv_a_proj", "linear_q_up_proj", "linear_kv_up_proj"
BIAS = "mlp.gate.e_score_correction_bias"
SHARED_FC1 = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.gate_up_proj")


def attention(
    name: str, axes: tuple[str, ...], split: Split, megatron: str, *, vllm: str = "", norm_of: str | None = None
) -> Rule:
    """A rule within `self_attn`; `norm_of` is the linear layer in which Transformer Engine keeps a norm."""
    return Rule(
        f"self_attn.{name}.weight",
        axes,
        split,
        f"self_attention.{megatron}.weight",
        f"self_attn.{vllm or name}.weight",
        transformer_engine=norm_of and f"self_attention.{norm_of}.layer_norm_weight",
    )


ATTENTION = (
    llama.norm("input_layernorm", "input_layernorm"),
    # without q_lora_rank queries come straight from the hidden state, and vLLM fuses nothing
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
LAYERS = Layers(dense=ATTENTION + llama.MLP, routed=ATTENTION + llama.experts() + ROUTER_BIAS + SHARED_EXPERTS)
