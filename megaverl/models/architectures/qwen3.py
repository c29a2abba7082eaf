"""Qwen3: Llama with a norm over each query and key head."""

from megaverl.models.architectures import llama
from megaverl.models.architectures.table import Layers, Rule
from megaverl.sharding.weight import Split

QK_NORMS = tuple(
    Rule(
        f"self_attn.{part}_norm.weight",
        ("head",),
        Split.REPLICATED,
        f"self_attention.{part}_layernorm.weight",
        f"self_attn.{part}_norm.weight",
    )
    for part in ("q", "k")
)
LAYERS = Layers(dense=llama.ATTENTION + QK_NORMS + llama.MLP)
