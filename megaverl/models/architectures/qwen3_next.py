"""Table of Qwen3-Next's weights: gated delta nets in most layers, attention with output gates in others, and experts.

The files' order of rows is kept. `in_proj_qkvz` and `in_proj_ba` are grouped by key
heads, so that equal parts of their rows are whole heads. `q_proj` has the query and the
gate of one head after the other. `conv1d` has all query, all key, then all value rows,
which Megatron's module groups by key heads as well (`models/gated_delta_net.py`).
vLLM's names come from `models/qwen3_next.py` (0.32). Weights of multi-token prediction
(`mtp.`) are left out, as in other models.
"""

from megaverl.models.architectures import llama
from megaverl.models.architectures.table import Layers, Rule
from megaverl.sharding.weight import Split


def of_net(name: str, axes: tuple[str, ...], split: Split) -> Rule:
    """Return the rule of a weight of a gated delta net.

    Args:
        name: name within `linear_attn` in files and in vLLM, and within `self_attention` in Megatron.
    """
    module = f"linear_attn.{name}"
    return Rule(module, axes, split, f"self_attention.{name}", module)


GATED_DELTA_NET = (
    # Transformer Engine fuses this norm into attention's first linear layer only.
    llama.norm("input_layernorm", "input_layernorm"),
    # A module's own parameters come before those of its parts.
    of_net("dt_bias", ("net_heads",), Split.COLUMN),
    of_net("A_log", ("net_heads",), Split.COLUMN),
    of_net("in_proj_qkvz.weight", ("net_qkvz", "hidden"), Split.COLUMN),
    of_net("in_proj_ba.weight", ("net_ba", "hidden"), Split.COLUMN),
    of_net("conv1d.weight", ("net_qkv", "one", "net_taps"), Split.CONVOLUTION),
    of_net("norm.weight", ("net_head",), Split.REPLICATED),
    of_net("out_proj.weight", ("hidden", "net_values"), Split.ROW),
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
QWEN3_NEXT = Layers(
    routed=GATED_ATTENTION + EXPERTS, recurrent=GATED_DELTA_NET + EXPERTS
)
