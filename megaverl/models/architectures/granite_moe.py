"""Table of Granite MoE's weights: Llama's attention, and all experts of a layer in two arrays.

`input_linear` is `[experts, gate rows then up rows, hidden]`, `output_linear`
`[experts, hidden, expert ffn]`. Megatron and vLLM store each expert in this order.
"""

from megaverl.models.architectures import llama
from megaverl.models.architectures.table import Layers
from megaverl.sharding.weight import Split

BLOCK = "block_sparse_moe"


EXPERTS = (
    # Transformer Engine fuses this norm only into a linear layer that follows it.
    llama.norm("post_attention_layernorm", "pre_mlp_layernorm"),
    llama.linear(
        f"{BLOCK}.router.layer",
        ("experts", "hidden"),
        Split.REPLICATED,
        ("mlp.router", f"{BLOCK}.gate"),
    ),
    llama.expert_linear(
        f"{BLOCK}.input_linear.weight",
        ("experts", "gate_up", "hidden"),
        Split.STACKED_GATE_UP,
        1,
        f"{BLOCK}.experts.routed_experts.w13_weight",
    ),
    llama.expert_linear(
        f"{BLOCK}.output_linear.weight",
        ("experts", "hidden", "expert_ffn"),
        Split.STACKED_ROW,
        2,
        f"{BLOCK}.experts.routed_experts.w2_weight",
    ),
)
GRANITE_MOE = Layers(routed=llama.ATTENTION + EXPERTS)
