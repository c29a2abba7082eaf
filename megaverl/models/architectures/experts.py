"""What layers with routed experts hold in the place of an MLP; the architectures differ in names only."""

from megaverl.models.architectures.table import Rule
from megaverl.sharding.weight import Split

# Transformer Engine's layer spec keeps this norm apart where experts follow it.
NORM = Rule(
    "post_attention_layernorm.weight",
    ("hidden",),
    Split.REPLICATED,
    "pre_mlp_layernorm.weight",
    "post_attention_layernorm.weight",
)


def routed(
    block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Rule, ...]:
    """The norm, the router and the routed experts of a layer whose Hugging Face module is called `block`."""
    return (
        NORM,
        Rule(
            f"{block}.gate.weight", ("experts", "hidden"), Split.REPLICATED, "mlp.router.weight", f"{block}.gate.weight"
        ),
        *(
            Rule(
                f"{block}.experts.{{}}.{name}.weight",
                ("hidden", "expert_ffn") if split is Split.ROW else ("expert_ffn", "hidden"),
                split,
                f"mlp.experts.local_experts.{{}}.{linear}.weight",
                f"{block}.experts.routed_experts.{fused}",
                transformer_engine=f"mlp.experts.{linear}.weight{{}}",
            )
            for name, split, linear, fused in (
                (gate, Split.GATE, "linear_fc1", "w13_weight"),
                (up, Split.UP, "linear_fc1", "w13_weight"),
                (down, Split.ROW, "linear_fc2", "w2_weight"),
            )
        ),
    )


def shared(block: str) -> tuple[Rule, ...]:
    """The shared experts, one MLP, of a layer whose Hugging Face module for them is called `block`."""
    return tuple(
        Rule(
            f"{block}.{name}.weight",
            ("hidden", "shared_ffn") if split is Split.ROW else ("shared_ffn", "hidden"),
            split,
            f"mlp.shared_experts.{linear}.weight",
            f"{block}.{fused}.weight",
        )
        for name, split, linear, fused in (
            ("gate_proj", Split.GATE, "linear_fc1", "gate_up_proj"),
            ("up_proj", Split.UP, "linear_fc1", "gate_up_proj"),
            ("down_proj", Split.ROW, "linear_fc2", "down_proj"),
        )
    )
