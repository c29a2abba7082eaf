"""Table of Nemotron-H's weights: layers that are Mamba-2, attention or an MLP each, behind one norm.

Megatron's names of a Mamba-2 layer are those of `models/mamba.py`, which holds the norm
as well. vLLM's names come from `models/nemotron_h.py` and `mamba_mixer2.py`. It computes
`A` from `A_log`.
"""

from dataclasses import replace

from megaverl.models.architectures import llama
from megaverl.models.architectures.table import EMBEDDING, FINAL_NORM, Layers, Rule
from megaverl.sharding.weight import Split

NORM = "norm.weight"
QKV = ("self_attention.linear_qkv", "mixer.qkv_proj")
ATTENTION = (
    replace(llama.INPUT_NORM, name=NORM, vllm=NORM),
    *(
        llama.linear(f"mixer.{part}_proj", (axis, "hidden"), split, QKV)
        for part, axis, split in llama.PARTS
    ),
    llama.linear(
        "mixer.o_proj",
        ("hidden", "q"),
        Split.ROW,
        ("self_attention.linear_proj", "mixer.o_proj"),
    ),
)
MLP = (
    replace(llama.MLP_NORM, name=NORM, vllm=NORM),
    llama.linear(
        "mixer.up_proj",
        ("ffn", "hidden"),
        Split.COLUMN,
        ("mlp.linear_fc1", "mixer.up_proj"),
    ),
    llama.linear(
        "mixer.down_proj",
        ("hidden", "ffn"),
        Split.ROW,
        ("mlp.linear_fc2", "mixer.down_proj"),
    ),
)


def mamba(name: str, axes: tuple[str, ...], split: Split, vllm: str = "") -> Rule:
    """Return the rule of a weight inside a Mamba-2 layer.

    Args:
        vllm: name in vLLM's layer, if it differs.
    """
    return Rule(
        f"mixer.{name}", axes, split, f"self_attention.{name}", f"mixer.{vllm or name}"
    )


MAMBA = (
    Rule(NORM, ("hidden",), Split.REPLICATED, "self_attention.in_norm.weight", NORM),
    mamba("in_proj.weight", ("mamba_in", "hidden"), Split.MAMBA_IN),
    mamba("conv1d.weight", ("mamba_conv", "one", "mamba_kernel"), Split.MAMBA_CONV),
    mamba("conv1d.bias", ("mamba_conv_bias",), Split.MAMBA_CONV),
    mamba("dt_bias", ("mamba_heads",), Split.COLUMN),
    mamba("A_log", ("mamba_heads",), Split.COLUMN, vllm="A"),
    mamba("D", ("mamba_heads",), Split.COLUMN),
    mamba("norm.weight", ("mamba_inner",), Split.COLUMN),
    mamba("out_proj.weight", ("hidden", "mamba_inner"), Split.ROW),
)
NEMOTRON_H = Layers(
    by_kind={"mamba": MAMBA, "attention": ATTENTION, "mlp": MLP},
    embedding=replace(EMBEDDING, name="model.embeddings.weight"),
    final_norm=(
        replace(FINAL_NORM, name="model.norm_f.weight", vllm="model.norm_f.weight"),
    ),
    prefix="backbone.",
)
