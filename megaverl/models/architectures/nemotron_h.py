"""Table of Nemotron-H's weights: layers that are Mamba-2, attention, an MLP or experts each, behind one norm.

Megatron's names of a Mamba-2 layer are those of `models/mamba.py`, which holds the norm
as well. vLLM's names come from `models/nemotron_h.py` and `mamba_mixer2.py`. It computes
`A` from `A_log`.
"""

from dataclasses import replace

from megaverl.models.architectures import llama
from megaverl.models.architectures.deepseek import router_bias
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


def mamba_parts(block: str, megatron: str, vllm: str) -> tuple[Rule, ...]:
    """Return the rules of a Mamba-2 layer without the norm over its input.

    Args:
        block, megatron, vllm: its module in Hugging Face's, Megatron's and vLLM's layer.
    """
    parts: tuple[tuple[str, tuple[str, ...], Split], ...] = (
        ("in_proj.weight", ("mamba_in", "hidden"), Split.MAMBA_IN),
        ("conv1d.weight", ("mamba_conv", "one", "mamba_kernel"), Split.MAMBA_CONV),
        ("conv1d.bias", ("mamba_conv_bias",), Split.MAMBA_CONV),
        ("dt_bias", ("mamba_heads",), Split.COLUMN),
        ("A_log", ("mamba_heads",), Split.COLUMN),
        ("D", ("mamba_heads",), Split.COLUMN),
        ("norm.weight", ("mamba_norm",), Split.COLUMN),
        ("out_proj.weight", ("hidden", "mamba_inner"), Split.ROW),
    )
    return tuple(
        Rule(
            f"{block}.{name}",
            axes,
            split,
            f"{megatron}.{name}",
            f"{vllm}.{'A' if name == 'A_log' else name}",
        )
        for name, axes, split in parts
    )


MAMBA = (
    Rule(NORM, ("hidden",), Split.REPLICATED, "self_attention.in_norm.weight", NORM),
    *mamba_parts("mixer", "self_attention", "mixer"),
)
# Experts and the shared expert have no gates. Transformer Engine cannot fuse the norm in
# front of experts.
EXPERTS = (
    Rule(NORM, ("hidden",), Split.REPLICATED, "pre_mlp_layernorm.weight", NORM),
    llama.linear(
        "mixer.gate",
        ("experts", "hidden"),
        Split.REPLICATED,
        ("mlp.router", "mixer.gate"),
    ),
    *router_bias("mixer.gate.e_score_correction_bias"),
    *(
        llama.expert_linear(
            f"mixer.experts.{{}}.{name}.weight",
            axes,
            split,
            number,
            f"mixer.experts.routed_experts.{fused}_weight",
        )
        for name, axes, split, number, fused in (
            ("up_proj", ("expert_ffn", "hidden"), Split.COLUMN, 1, "w13"),
            ("down_proj", ("hidden", "expert_ffn"), Split.ROW, 2, "w2"),
        )
    ),
    llama.linear(
        "mixer.shared_experts.up_proj",
        ("shared_ffn", "hidden"),
        Split.COLUMN,
        ("mlp.shared_experts.linear_fc1", "mixer.shared_experts.up_proj"),
    ),
    llama.linear(
        "mixer.shared_experts.down_proj",
        ("hidden", "shared_ffn"),
        Split.ROW,
        ("mlp.shared_experts.linear_fc2", "mixer.shared_experts.down_proj"),
    ),
)
NEMOTRON_H = Layers(
    by_kind={"mamba": MAMBA, "attention": ATTENTION, "mlp": MLP, "moe": EXPERTS},
    embedding=replace(EMBEDDING, name="model.embeddings.weight"),
    final_norm=(
        replace(FINAL_NORM, name="model.norm_f.weight", vllm="model.norm_f.weight"),
    ),
    prefix="backbone.",
)
