"""Table of BailingMoE-V2's weights (Ling 2.0): q, k and v in one array, plain MLPs in the first layers, then experts.

vLLM's names come from `models/bailing_moe.py`. They are those of the files, but for the
gate and up rows of an MLP, and the experts.
"""

from dataclasses import replace

from megaverl.models.architectures import llama
from megaverl.models.architectures.deepseek import SHARED_EXPERTS, router_bias
from megaverl.models.architectures.table import EMBEDDING, Layers
from megaverl.sharding.weight import Split

NAME = "model.word_embeddings.weight"
ATTENTION = (
    llama.INPUT_NORM,
    llama.linear(
        "attention.query_key_value",
        ("qkv", "hidden"),
        Split.FUSED_QKV,
        ("self_attention.linear_qkv", "attention.query_key_value"),
    ),
    llama.linear(
        "attention.dense",
        ("hidden", "q"),
        Split.ROW,
        ("self_attention.linear_proj", "attention.dense"),
    ),
    *llama.head_norms("query_layernorm", "key_layernorm", block="attention"),
)
BAILING_MOE_V2 = Layers(
    dense=ATTENTION + llama.MLP,
    routed=ATTENTION
    + llama.experts()
    + router_bias("mlp.gate.expert_bias")
    + SHARED_EXPERTS,
    embedding=replace(EMBEDDING, name=NAME, vllm=NAME),
)
