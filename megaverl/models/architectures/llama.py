"""Llama: the base decoder; the other architectures add their lines to this table."""

from megaverl.models.architectures.table import Layers, Rule
from megaverl.sharding.weight import Split

ATTENTION = (
    Rule(
        "input_layernorm.weight",
        ("hidden",),
        Split.REPLICATED,
        "input_layernorm.weight",
        "input_layernorm.weight",
        transformer_engine="self_attention.linear_qkv.layer_norm_weight",
    ),
    Rule(
        "self_attn.q_proj.weight",
        ("q", "hidden"),
        Split.Q,
        "self_attention.linear_qkv.weight",
        "self_attn.qkv_proj.weight",
    ),
    Rule(
        "self_attn.k_proj.weight",
        ("kv", "hidden"),
        Split.K,
        "self_attention.linear_qkv.weight",
        "self_attn.qkv_proj.weight",
    ),
    Rule(
        "self_attn.v_proj.weight",
        ("kv", "hidden"),
        Split.V,
        "self_attention.linear_qkv.weight",
        "self_attn.qkv_proj.weight",
    ),
    Rule(
        "self_attn.o_proj.weight",
        ("hidden", "q"),
        Split.ROW,
        "self_attention.linear_proj.weight",
        "self_attn.o_proj.weight",
    ),
)
MLP = (
    Rule(
        "post_attention_layernorm.weight",
        ("hidden",),
        Split.REPLICATED,
        "pre_mlp_layernorm.weight",
        "post_attention_layernorm.weight",
        transformer_engine="mlp.linear_fc1.layer_norm_weight",
    ),
    Rule(
        "mlp.gate_proj.weight",
        ("ffn", "hidden"),
        Split.GATE,
        "mlp.linear_fc1.weight",
        "mlp.gate_up_proj.weight",
    ),
    Rule(
        "mlp.up_proj.weight",
        ("ffn", "hidden"),
        Split.UP,
        "mlp.linear_fc1.weight",
        "mlp.gate_up_proj.weight",
    ),
    Rule(
        "mlp.down_proj.weight",
        ("hidden", "ffn"),
        Split.ROW,
        "mlp.linear_fc2.weight",
        "mlp.down_proj.weight",
    ),
)
LAYERS = Layers(dense=ATTENTION + MLP)
