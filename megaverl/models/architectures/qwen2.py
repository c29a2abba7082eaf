"""Qwen2: Llama with a bias on the query, key and value projections."""

from megaverl.models.architectures import llama
from megaverl.models.architectures.table import Layers, Rule
from megaverl.sharding.weight import Split

QKV_BIAS = tuple(
    Rule(
        f"self_attn.{part}_proj.bias",
        (axis,),
        split,
        "self_attention.linear_qkv.bias",
        "self_attn.qkv_proj.bias",
    )
    for part, axis, split in (("q", "q", Split.Q), ("k", "kv", Split.K), ("v", "kv", Split.V))
)
LAYERS = Layers(dense=llama.ATTENTION + QKV_BIAS + llama.MLP)
