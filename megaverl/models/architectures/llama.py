"""Weights of Llama, and the parts that related architectures add: biases, norms per head, and routed experts.

Gemma stores its norms' weights minus 1, as do Megatron's zero-centered norms and vLLM.
Mistral has the same weights as Llama. Mixtral replaces every MLP with routed experts.
"""

from dataclasses import replace

from megaverl.models.architectures.table import FINAL_NORM, Layers, Rule
from megaverl.sharding.weight import Split

HIDDEN = ("hidden",)
QKV = ("self_attention.linear_qkv", "self_attn.qkv_proj")
FC1 = ("mlp.linear_fc1", "mlp.gate_up_proj")
FC2 = ("mlp.linear_fc2", "mlp.down_proj")


def norm(
    name: str,
    megatron: str,
    transformer_engine: str | None = None,
    kind: str = "weight",
) -> Rule:
    """Return the rule of a norm over the hidden state, or of its bias if `kind` is "bias".

    Args:
        transformer_engine: linear layer that holds the norm under Transformer Engine, which fuses the two.
    """
    inside = transformer_engine and f"{transformer_engine}.layer_norm_{kind}"
    return Rule(
        f"{name}.{kind}",
        HIDDEN,
        Split.REPLICATED,
        f"{megatron}.{kind}",
        f"{name}.{kind}",
        "layer",
        inside,
    )


def linear(
    name: str,
    axes: tuple[str, ...],
    split: Split,
    engines: tuple[str, str],
    kind: str = "weight",
) -> Rule:
    """Return the rule of a linear layer's weight, or of its bias if `kind` is "bias".

    Args:
        engines: module names in Megatron and in vLLM.
    """
    return Rule(
        f"{name}.{kind}", axes, split, f"{engines[0]}.{kind}", f"{engines[1]}.{kind}"
    )


INPUT_NORM = norm("input_layernorm", "input_layernorm", "self_attention.linear_qkv")
OUT = linear(
    "self_attn.o_proj",
    ("hidden", "q"),
    Split.ROW,
    ("self_attention.linear_proj", "self_attn.o_proj"),
)
MLP_NORM = norm("post_attention_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1")
DOWN = linear("mlp.down_proj", ("hidden", "ffn"), Split.ROW, FC2)
PARTS = (("q", "q", Split.Q), ("k", "kv", Split.K), ("v", "kv", Split.V))
PROJECTIONS = (
    *(
        linear(f"self_attn.{part}_proj", (axis, "hidden"), split, QKV)
        for part, axis, split in PARTS
    ),
    OUT,
)
ATTENTION = (INPUT_NORM, *PROJECTIONS)
MLP_PROJECTIONS = (
    linear("mlp.gate_proj", ("ffn", "hidden"), Split.GATE, FC1),
    linear("mlp.up_proj", ("ffn", "hidden"), Split.UP, FC1),
    DOWN,
)
MLP = (MLP_NORM, *MLP_PROJECTIONS)
# Phi-3's files hold q, k and v in one array, and gate and up in another, GLM-4's the
# latter alone.
FUSED_ATTENTION = (
    INPUT_NORM,
    linear("self_attn.qkv_proj", ("qkv", "hidden"), Split.FUSED_QKV, QKV),
    OUT,
)
FUSED_MLP = (
    MLP_NORM,
    linear("mlp.gate_up_proj", ("gate_and_up", "hidden"), Split.FUSED_GATE_UP, FC1),
    DOWN,
)


def norms_after(attention: str, mlp: str) -> tuple[Rule, ...]:
    """Return the rules of the norms over the outputs of attention and MLP, which `models/build.py` adds to layers.

    Args:
        attention, mlp: Hugging Face names of the two norms.
    """
    return (
        norm(attention, "post_self_attn_layernorm"),
        norm(mlp, "post_mlp_layernorm"),
    )


NORMS_AFTER = norms_after("post_self_attn_layernorm", "post_mlp_layernorm")
# OLMo-2, EXAONE 4, Gemma 2 and 3 name them in this way.
NORMS_AFTER_BOTH = norms_after("post_attention_layernorm", "post_feedforward_layernorm")
# Gemma 2 and 3 have another norm before the MLP as well.
MLP_BETWEEN_NORMS = (
    norm("pre_feedforward_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1"),
    *MLP_PROJECTIONS,
    *NORMS_AFTER_BOTH,
)
# Qwen2 has biases on the query, key and value projections. Qwen3 has a norm over each
# query and key head. GLM-4.5 has either, both or none.
QKV_BIAS = tuple(
    linear(f"self_attn.{part}_proj", (f"{axis}_bias",), split, QKV, "bias")
    for part, axis, split in PARTS
)


def head_norms(
    query: str = "q_norm", key: str = "k_norm", block: str = "self_attn"
) -> tuple[Rule, ...]:
    """Return the rules of norms over each query head and over each key head.

    Args:
        query, key: Hugging Face names of the two norms.
        block: Hugging Face module of attention.
    """
    return tuple(
        linear(
            f"{block}.{name}",
            ("head_norm",),
            Split.REPLICATED,
            (f"self_attention.{part}_layernorm", f"{block}.{name}"),
        )
        for part, name in (("q", query), ("k", key))
    )


QK_NORMS = head_norms()


def projection_norms(split: Split = Split.REPLICATED) -> tuple[Rule, ...]:
    """Return the rules of norms over all query heads together and over all key heads together (OLMo-2).

    Every rank of Megatron has the whole weight (`models/layers.py`, `ProjectionNorm`).
    """
    return tuple(
        linear(
            f"self_attn.{part}_norm",
            (axis,),
            split,
            (f"self_attention.{part}_layernorm", f"self_attn.{part}_norm"),
        )
        for part, axis in (("q", "q"), ("k", "kv"))
    )


def plain_mlp(up: str = "mlp.up_proj", down: str = "mlp.down_proj") -> tuple[Rule, ...]:
    """Return the rules of an MLP without gates, and of its norm. `up` and `down` are the names of the projections."""
    first = ("mlp.linear_fc1", up)
    second = ("mlp.linear_fc2", down)
    return (
        MLP_NORM,
        linear(up, ("ffn", "hidden"), Split.COLUMN, first),
        linear(up, ("ffn_bias",), Split.COLUMN, first, "bias"),
        linear(down, ("hidden", "ffn"), Split.ROW, second),
        linear(down, ("bias",), Split.REPLICATED, second, "bias"),
    )


OUT_BIAS = (
    linear(
        "self_attn.o_proj",
        ("bias",),
        Split.REPLICATED,
        ("self_attention.linear_proj", "self_attn.o_proj"),
        "bias",
    ),
)
# Biases of LayerNorms over the inputs of attention and MLP.
NORM_BIASES = (
    norm(
        "input_layernorm",
        "input_layernorm",
        "self_attention.linear_qkv",
        "bias",
    ),
    norm("post_attention_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1", "bias"),
)
FINAL_NORM_WITH_BIAS = (
    FINAL_NORM,
    replace(
        FINAL_NORM,
        name="model.norm.bias",
        megatron="decoder.final_layernorm.bias",
        vllm="model.norm.bias",
    ),
)


def expert_linear(
    name: str, axes: tuple[str, ...], split: Split, number: int, vllm: str
) -> Rule:
    """Return the rule of a linear layer of routed experts: of one expert, or an array of all.

    Args:
        name: name in the files. For one expert it contains `{}` in place of the expert's number.
        number: 1 or 2, for Megatron's `linear_fc1` or `linear_fc2`.
        vllm: name of vLLM's parameter, which holds all experts.
    """
    kind = "bias" if name.endswith("bias") else "weight"
    return Rule(
        name,
        axes,
        split,
        f"mlp.experts.local_experts.{{}}.linear_fc{number}.{kind}",
        vllm,
        transformer_engine=f"mlp.experts.linear_fc{number}.{kind}{{}}",
    )


def experts(
    block: str = "mlp",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> tuple[Rule, ...]:
    """Return the rules of the norm, the router and the routed experts of a layer.

    Args:
        block: Hugging Face module of the feed-forward block.
        gate, up, down: names of an expert's projections.
    """
    router = linear(
        f"{block}.gate",
        ("experts", "hidden"),
        Split.REPLICATED,
        ("mlp.router", f"{block}.gate"),
    )
    parts = (
        (gate, Split.GATE, 1, "w13"),
        (up, Split.UP, 1, "w13"),
        (down, Split.ROW, 2, "w2"),
    )
    return (
        # Transformer Engine fuses this norm into a following linear layer; before
        # experts there is none.
        norm("post_attention_layernorm", "pre_mlp_layernorm"),
        router,
        *(
            expert_linear(
                f"{block}.experts.{{}}.{name}.weight",
                ("hidden", "expert_ffn")
                if split is Split.ROW
                else ("expert_ffn", "hidden"),
                split,
                number,
                f"{block}.experts.routed_experts.{fused}_weight",
            )
            for name, split, number, fused in parts
        ),
    )


def shared_expert(name: str) -> tuple[Rule, ...]:
    """Return the rules of experts that every token goes to.

    Args:
        name: Hugging Face module that holds them, such as `mlp.shared_experts`.
    """
    fc1 = ("mlp.shared_experts.linear_fc1", f"{name}.gate_up_proj")
    fc2 = ("mlp.shared_experts.linear_fc2", f"{name}.down_proj")
    return (
        linear(f"{name}.gate_proj", ("shared_ffn", "hidden"), Split.GATE, fc1),
        linear(f"{name}.up_proj", ("shared_ffn", "hidden"), Split.UP, fc1),
        linear(f"{name}.down_proj", ("hidden", "shared_ffn"), Split.ROW, fc2),
    )


# A sigmoid of this projection scales the output of Qwen2-MoE's shared expert.
SHARED_GATE = (
    Rule(
        "mlp.shared_expert_gate.weight",
        ("shared_gate", "hidden"),
        Split.REPLICATED,
        "mlp.shared_experts.gate_weight",
        "mlp.shared_expert_gate.weight",
    ),
)
LAYERS = Layers(dense=ATTENTION + MLP)
