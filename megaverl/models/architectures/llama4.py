"""Table of Llama 4's weights: a shared expert beside all routed experts of a layer, which lie in two arrays.

Each routed expert is transposed: `gate_up_proj` is `[experts, hidden, gate columns then
up columns]`, `down_proj` `[experts, expert ffn, hidden]`. Megatron and vLLM store
`[out, in]`. Norms over queries and keys have no weights.
"""

from megaverl.models.architectures import llama
from megaverl.models.architectures.table import Layers
from megaverl.sharding.weight import Split

BLOCK = "feed_forward"
FC1 = ("mlp.linear_fc1", f"{BLOCK}.gate_up_proj")
MLP = (
    llama.MLP_NORM,
    llama.linear(f"{BLOCK}.gate_proj", ("ffn", "hidden"), Split.GATE, FC1),
    llama.linear(f"{BLOCK}.up_proj", ("ffn", "hidden"), Split.UP, FC1),
    llama.linear(
        f"{BLOCK}.down_proj",
        ("hidden", "ffn"),
        Split.ROW,
        ("mlp.linear_fc2", f"{BLOCK}.down_proj"),
    ),
)


EXPERTS = (
    # Transformer Engine fuses this norm only into a linear layer that follows it.
    llama.norm("post_attention_layernorm", "pre_mlp_layernorm"),
    llama.linear(
        f"{BLOCK}.router",
        ("experts", "hidden"),
        Split.REPLICATED,
        ("mlp.router", f"{BLOCK}.router"),
    ),
    llama.expert_linear(
        f"{BLOCK}.experts.gate_up_proj",
        ("experts", "hidden", "gate_up"),
        Split.STACKED_OUT_GATE_UP,
        1,
        f"{BLOCK}.experts.routed_experts.w13_weight",
    ),
    llama.expert_linear(
        f"{BLOCK}.experts.down_proj",
        ("experts", "expert_ffn", "hidden"),
        Split.STACKED_IN,
        2,
        f"{BLOCK}.experts.routed_experts.w2_weight",
    ),
    *llama.shared_expert(f"{BLOCK}.shared_expert"),
)
LLAMA4 = Layers(dense=llama.ATTENTION + MLP, routed=llama.ATTENTION + EXPERTS)
