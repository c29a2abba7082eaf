"""Tables of Qwen3-Next's and Qwen3.5's weights: gated delta nets, and attention with output gates in other layers.

Qwen3-Next's order of rows is kept. `in_proj_qkvz` and `in_proj_ba` are grouped by key
heads, so that equal parts of their rows are whole heads. `q_proj` has the query and the
gate of one head after the other. `conv1d` has all query, all key, then all value rows,
which Megatron's module groups by key heads as well (`models/gated_delta_net.py`).
Qwen3.5's files hold the rows of `in_proj_qkvz` and `in_proj_ba` in two arrays each,
which Megatron fuses in that order, and vLLM in the files'. vLLM's names come from
`models/qwen3_next.py` and `qwen3_5.py` (0.32). Weights of multi-token prediction
(`mtp.`) are left out, as in other models.
"""

from megaverl.models.architectures import llama
from megaverl.models.architectures.table import Layers, Rule
from megaverl.sharding.weight import Split


def of_net(
    name: str, axes: tuple[str, ...], split: Split, fused: str | None = None
) -> Rule:
    """Return the rule of a weight of a gated delta net.

    Args:
        name: name within `linear_attn` in files.
        fused: name within `linear_attn` in vLLM and within `self_attention` in Megatron, if it differs.
    """
    within = fused or name
    return Rule(
        f"linear_attn.{name}",
        axes,
        split,
        f"self_attention.{within}",
        f"linear_attn.{within}",
    )


QKVZ, BA = "in_proj_qkvz.weight", "in_proj_ba.weight"


def delta_net(*projections: Rule) -> tuple[Rule, ...]:
    """Return the rules of a gated delta net and the norm before it, with these projections of the hidden state."""
    return (
        # Transformer Engine fuses this norm into attention's first linear layer only.
        llama.norm("input_layernorm", "input_layernorm"),
        # A module's own parameters come before those of its parts.
        of_net("dt_bias", ("net_heads",), Split.COLUMN),
        of_net("A_log", ("net_heads",), Split.COLUMN),
        *projections,
        of_net("conv1d.weight", ("net_qkv", "one", "net_taps"), Split.NET_QKV),
        of_net("norm.weight", ("net_head",), Split.REPLICATED),
        of_net("out_proj.weight", ("hidden", "net_values"), Split.ROW),
    )


FUSED_NET = delta_net(
    of_net(QKVZ, ("net_qkvz", "hidden"), Split.COLUMN),
    of_net(BA, ("net_ba", "hidden"), Split.COLUMN),
)
SEPARATE_NET = delta_net(
    of_net("in_proj_qkv.weight", ("net_qkv", "hidden"), Split.NET_QKV, QKVZ),
    of_net("in_proj_z.weight", ("net_values", "hidden"), Split.BY_KEY_HEAD, QKVZ),
    of_net("in_proj_b.weight", ("net_heads", "hidden"), Split.BY_KEY_HEAD, BA),
    of_net("in_proj_a.weight", ("net_heads", "hidden"), Split.BY_KEY_HEAD, BA),
)
GATED_ATTENTION = (
    llama.INPUT_NORM,
    llama.linear("self_attn.q_proj", ("gated_q", "hidden"), Split.GATED_Q, llama.QKV),
    *(
        llama.linear(f"self_attn.{part}_proj", (axis, "hidden"), split, llama.QKV)
        for part, axis, split in llama.PARTS[1:]
    ),
    llama.OUT,
    *llama.QK_NORMS,
)
EXPERTS = (
    *llama.experts(),
    *llama.shared_expert("mlp.shared_expert"),
    *llama.SHARED_GATE,
)
QWEN3_NEXT = Layers(routed=GATED_ATTENTION + EXPERTS, recurrent=FUSED_NET + EXPERTS)
QWEN3_5 = Layers(dense=GATED_ATTENTION + llama.MLP, recurrent=SEPARATE_NET + llama.MLP)
QWEN3_5_MOE = Layers(routed=GATED_ATTENTION + EXPERTS, recurrent=SEPARATE_NET + EXPERTS)
