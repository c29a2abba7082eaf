"""Tables of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: the decoder of a language model, and transformers' tower.

The tower is `embedding.visual` of the first stage's GPTModel (`models/vision_tower.py`)
and whole on every tensor-parallel rank. Its parameters have transformers' names. vLLM's
names come from `models/qwen2_vl.py`, `qwen2_5_vl.py`, `qwen3_vl.py` and `qwen3_5.py`
(0.32).
"""

from megaverl.models.architectures import llama
from megaverl.models.architectures.qwen3_next import QWEN3_5, QWEN3_5_MOE
from megaverl.models.architectures.table import Layers, Rule, Tower
from megaverl.sharding.weight import Split

WHOLE = Split.REPLICATED
ROWS = Split.ROWS_IN_VLLM
COLUMNS = Split.COLUMNS_IN_VLLM


def tower_linear(
    name: str, axes: tuple[str, str], split: Split, vllm: str | None = None
) -> tuple[Rule, Rule]:
    """Return the rules of the weight and the bias of a tower's linear layer.

    Args:
        name: module name in the files and in transformers.
        axes: sizes of outputs and inputs.
        vllm: module name in vLLM, if it differs.
    """
    # The bias of a layer whose inputs are split is added once, after the sum.
    of_bias = WHOLE if split is COLUMNS else split
    engine = vllm or name
    return (
        Rule(f"{name}.weight", axes, split, f"{name}.weight", f"{engine}.weight"),
        Rule(f"{name}.bias", axes[:1], of_bias, f"{name}.bias", f"{engine}.bias"),
    )


def tower_norm(name: str, axis: str, *, bias: bool = True) -> tuple[Rule, ...]:
    """Return the rules of a norm in a tower."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(
        Rule(f"{name}.{kind}", (axis,), WHOLE, f"{name}.{kind}", f"{name}.{kind}")
        for kind in kinds
    )


PATCHES = Rule(
    "patch_embed.proj.weight",
    ("vision", "channels", "pictures", "patch_height", "patch_width"),
    WHOLE,
    "patch_embed.proj.weight",
    "patch_embed.proj.weight",
)
PATCH_BIAS = Rule(
    "patch_embed.proj.bias",
    ("vision",),
    WHOLE,
    "patch_embed.proj.bias",
    "patch_embed.proj.bias",
)
POSITIONS = Rule(
    "pos_embed.weight",
    ("vision_positions", "vision"),
    WHOLE,
    "pos_embed.weight",
    "pos_embed.weight",
)
OUT = tower_linear("attn.proj", ("vision", "vision"), COLUMNS)


def tower_qkv(split: Split) -> tuple[Rule, Rule]:
    """Return the rules of a block's fused projection to queries, keys and values."""
    return tower_linear("attn.qkv", ("vision_qkv", "vision"), split)


def merger(first: str, second: str, prefix: str = "merger.") -> tuple[Rule, ...]:
    """Return the rules of the MLP that merges neighbouring patches into one token.

    Args:
        first, second: names of its linear layers.
    """
    return (
        *tower_linear(prefix + first, ("vision_merged", "vision_merged"), ROWS),
        *tower_linear(prefix + second, ("hidden", "vision_merged"), COLUMNS),
    )


QWEN2_VL = Layers(
    dense=llama.ATTENTION + llama.QKV_BIAS + llama.MLP,
    tower=Tower(
        before=(PATCHES,),
        block=tower_norm("norm1", "vision")
        + tower_norm("norm2", "vision")
        # vLLM's Qwen2-VL gathers q, k and v before it separates them, and so splits
        # all of their rows together.
        + tower_qkv(ROWS)
        + OUT
        + tower_linear("mlp.fc1", ("vision_ffn", "vision"), ROWS)
        + tower_linear("mlp.fc2", ("vision", "vision_ffn"), COLUMNS),
        after=tower_norm("merger.ln_q", "vision") + merger("mlp.0", "mlp.2"),
    ),
)
GATE_UP = "mlp.gate_up_proj"
QWEN2_5_VL = Layers(
    dense=llama.ATTENTION + llama.QKV_BIAS + llama.MLP,
    tower=Tower(
        before=(PATCHES,),
        block=tower_norm("norm1", "vision", bias=False)
        + tower_norm("norm2", "vision", bias=False)
        + tower_qkv(Split.FUSED_QKV_IN_VLLM)
        + OUT
        + tower_linear("mlp.gate_proj", ("vision_ffn", "vision"), ROWS, GATE_UP)
        + tower_linear("mlp.up_proj", ("vision_ffn", "vision"), ROWS, GATE_UP)
        + tower_linear("mlp.down_proj", ("vision", "vision_ffn"), COLUMNS),
        after=tower_norm("merger.ln_q", "vision", bias=False)
        + merger("mlp.0", "mlp.2"),
    ),
)
# Qwen3.5's tower has no further outputs (`VisionSpec.deepstack`).
QWEN3_TOWER = Tower(
    prefix="model.visual.",
    before=(PATCHES, PATCH_BIAS, POSITIONS),
    block=tower_norm("norm1", "vision")
    + tower_norm("norm2", "vision")
    + tower_qkv(Split.FUSED_QKV_IN_VLLM)
    + OUT
    + tower_linear("mlp.linear_fc1", ("vision_ffn", "vision"), ROWS)
    + tower_linear("mlp.linear_fc2", ("vision", "vision_ffn"), COLUMNS),
    after=tower_norm("merger.norm", "vision") + merger("linear_fc1", "linear_fc2"),
    deepstack=tower_norm("norm", "vision_merged")
    + merger("linear_fc1", "linear_fc2", prefix=""),
)
LANGUAGE_MODEL = "model.language_model."
QWEN3_VL = Layers(
    dense=llama.ATTENTION + llama.QK_NORMS + llama.MLP,
    tower=QWEN3_TOWER,
    prefix=LANGUAGE_MODEL,
)
QWEN3_5_VL = QWEN3_5._replace(tower=QWEN3_TOWER, prefix=LANGUAGE_MODEL)
QWEN3_5_MOE_VL = QWEN3_5_MOE._replace(tower=QWEN3_TOWER, prefix=LANGUAGE_MODEL)
