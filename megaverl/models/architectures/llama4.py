"""Table of Llama 4's weights: a shared expert beside all routed experts of a layer, which lie in two arrays.

Each routed expert is transposed: `gate_up_proj` is `[experts, hidden, gate columns then
up columns]`, `down_proj` `[experts, expert ffn, hidden]`. Megatron and vLLM store
`[out, in]`. Norms over queries and keys have no weights.
"""

from megaverl.models.architectures import llama
from megaverl.models.architectures.table import Layers, Rule
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


def stacked_experts(
    name: str, axes: tuple[str, ...], split: Split, number: int, vllm: str
) -> Rule:
    """Return the rule of an array that holds all experts of a layer.

    Args:
        number: 1 or 2, for Megatron's `linear_fc1` or `linear_fc2`.
    """
    return Rule(
        f"{BLOCK}.experts.{name}",
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
        f"{BLOCK}.router",
        ("experts", "hidden"),
        Split.REPLICATED,
        ("mlp.router", f"{BLOCK}.router"),
    ),
    stacked_experts(
        "gate_up_proj", ("hidden", "gate_up"), Split.STACKED_OUT_GATE_UP, 1, "w13"
    ),
    stacked_experts("down_proj", ("expert_ffn", "hidden"), Split.STACKED_IN, 2, "w2"),
    *llama.shared_expert(f"{BLOCK}.shared_expert"),
)
LLAMA4 = Layers(dense=llama.ATTENTION + MLP, routed=llama.ATTENTION + EXPERTS)
