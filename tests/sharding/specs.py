"""Model specs and element ids for the tests of layouts and plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from megaverl.sharding.layout import Layout
from megaverl.sharding.model_config import (
    ATTENTION_BESIDE_MAMBA,
    EXPERT_KEYS,
    MAMBA_LAYERS,
    WITH_DELTA_NET,
)
from megaverl.sharding.model_spec import (
    ARCHITECTURES,
    DeltaNetSpec,
    MambaSpec,
    MLASpec,
    ModelSpec,
    MoESpec,
    QueryScaling,
)
from megaverl.sharding.weight import Split, Weight

ROUTED = (
    "Llama4ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "Qwen2MoeForCausalLM",
    "OlmoeForCausalLM",
    "MiniMaxM2ForCausalLM",
    "DeepseekV2ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GraniteMoeForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "BailingMoeV2ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
# vLLM's models of these architectures are always tied, or never.
ALWAYS_TIED = (
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Cohere2ForCausalLM",
)
NEVER_TIED = (
    "DeepseekV3ForCausalLM",
    "DeepseekV2ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
    "OlmoeForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Qwen3NextForCausalLM",
    "NemotronHForCausalLM",
)
# Whose classes ignore `tie_word_embeddings`.
UNTIED = ("NemotronHForCausalLM",)
# Whose layers carry a state, so that no context-parallel rank has a part of a sample.
RECURRENT = ("NemotronHForCausalLM", "FalconH1ForCausalLM", *WITH_DELTA_NET)
LATENT = ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM")
# Attention of transformers that computes the model, where its default, sdpa, leaves a
# soft cap on scores out.
TRANSFORMERS_ATTENTION = {"Gemma2ForCausalLM": "eager"}
# Whose experts have biases, and so no tensor parallelism of their own.
UNCUT = "GptOssForCausalLM"
# Whose weights lie in engines as in files, so that they can be quantised there.
PLAIN = tuple(architecture for architecture in ARCHITECTURES if architecture != UNCUT)
# All of whose layers have attention and a plain MLP.
DENSE = tuple(
    architecture
    for architecture in ARCHITECTURES
    if architecture not in (*ROUTED, *RECURRENT)
)
# What a tiny folder of an architecture needs beside the sizes that all share, in
# Hugging Face's words.
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama4ForCausalLM": {"num_local_experts": 6, "intermediate_size": 16},
    "MixtralForCausalLM": {"num_local_experts": 6, "intermediate_size": 16},
    "Qwen3MoeForCausalLM": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
    },
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "Glm4MoeLiteForCausalLM": DEEPSEEK,
    "DeepseekV2ForCausalLM": DEEPSEEK
    | {"n_group": 1, "topk_group": 1}
    | {"topk_method": "greedy", "scoring_func": "softmax"},
    "OlmoeForCausalLM": {"num_experts": 6, "intermediate_size": 16},
    "GraniteMoeForCausalLM": {"num_local_experts": 6, "intermediate_size": 16},
    "MiniMaxM2ForCausalLM": {"num_local_experts": 6, "intermediate_size": 16},
    "BailingMoeV2ForCausalLM": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "num_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
    },
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 12,
        "moe_num_shared_experts": 2,
    },
    "Glm4MoeForCausalLM": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "GptOssForCausalLM": {
        "num_local_experts": 6,
        "intermediate_size": 128,
        "num_key_value_heads": 4,
    },
    # Four ranks each have a group.
    "NemotronHForCausalLM": {"mamba_head_dim": 3, "ssm_state_size": 5},
    "FalconH1ForCausalLM": {
        "mamba_d_ssm": 24,
        "mamba_d_head": 3,
        "mamba_d_state": 5,
        "mamba_n_groups": 4,
    },
    "Qwen2MoeForCausalLM": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
    }
    | {"shared_expert_intermediate_size": 24},
}
# Nemotron 3's layers of experts alone.
NEMOTRON_EXPERTS: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}
CONFIGS |= dict.fromkeys(
    ("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"), CONFIGS["Qwen2MoeForCausalLM"]
)
WITH_QKV_BIAS = (
    "Qwen2ForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "SeedOssForCausalLM",
    "Qwen2MoeForCausalLM",
    "Starcoder2ForCausalLM",
    "InternLM3ForCausalLM",
    "MiMoForCausalLM",
)
AFTER: dict[str, Any] = {"norms_before": False, "norms_after": True, "qk_norm": True}
SPANS: dict[str, Any] = {"qk_norm": True, "qk_norm_spans_heads": True}
GEMMA: dict[str, Any] = {
    "activation": "gelu_tanh",
    "norm_plus_one": True,
    "embedding_scale": 8**0.5,
}
GRANITE: dict[str, Any] = {
    "embedding_scale": 3.0,
    "softmax_scale": 0.4,
    "attention_out_scale": 0.6,
    "mlp_out_scale": 0.6,
    "logit_scale": 0.4,
}
# What an architecture has beside Llama's layers.
FIELDS: dict[str, dict[str, Any]] = {
    "Llama4ForCausalLM": {
        "rotary_pairs": True,
        "layers_without_rope": tuple(layer % 2 == 1 for layer in range(64)),
        "qk_l2_norm": True,
        "query_scaling": QueryScaling(4.0, 0.5),
        "attention_chunk": 8,
    },
    "Qwen3ForCausalLM": {"qk_norm": True},
    "Qwen3MoeForCausalLM": {"qk_norm": True},
    "Glm4MoeForCausalLM": {"qk_norm": True},
    "BailingMoeV2ForCausalLM": {"qk_norm": True},
    "Ernie4_5ForCausalLM": {"rotary_pairs": True},
    "Ernie4_5_MoeForCausalLM": {"rotary_pairs": True},
    "Glm4ForCausalLM": {"rotary_pairs": True, "norms_after": True},
    "GemmaForCausalLM": GEMMA,
    "GptOssForCausalLM": {
        "activation": "clamped_swiglu",
        "sliding_window": 8,
        "windowed_layers": tuple(layer % 2 == 0 for layer in range(64)),
        "linear_bias": True,
        "attention_sinks": True,
    },
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": GRANITE,
    "ArceeForCausalLM": {"activation": "squared_relu", "is_gated": False},
    "NemotronForCausalLM": {
        "activation": "squared_relu",
        "is_gated": False,
        "norm": "layer",
        "norm_plus_one": True,
    },
    "NemotronHForCausalLM": {
        "activation": "squared_relu",
        "is_gated": False,
        "has_rope": False,
        "layer_kinds": ("mamba", "mlp", "attention", "mamba"),
        "mamba": MambaSpec(8, 2, 4, 3, 4, True, 8),
    },
    "FalconH1ForCausalLM": {
        "embedding_scale": 3.0,
        "softmax_scale": 0.4,
        "gate_scale": 1.4,
        "attention_out_scale": 1.04,
        "mlp_out_scale": 0.5,
        "logit_scale": 0.4,
        "mamba": MambaSpec(
            8, 2, 4, 3, 4, True, 8, True, 1.2, 0.6, (0.4, 1.5, 0.6, 1.7, 0.8)
        ),
    },
    "Starcoder2ForCausalLM": {
        "activation": "gelu_tanh",
        "is_gated": False,
        "norm": "layer",
        "linear_bias": True,
    },
    "Olmo2ForCausalLM": AFTER | SPANS,
    "Exaone4ForCausalLM": AFTER,
    "Gemma2ForCausalLM": GEMMA
    | {
        "norms_after": True,
        "softmax_scale": 0.3,
        "attention_softcap": 1.0,
        "logit_softcap": 1.5,
    },
    "Gemma3ForCausalLM": GEMMA
    | {
        "qk_norm": True,
        "norms_after": True,
        "local_rope_theta": 1e3,
        "local_rope_layers": tuple(layer % 2 == 0 for layer in range(64)),
    },
    "Cohere2ForCausalLM": {
        "norm": "centred",
        "parallel_layers": True,
        "logit_scale": 0.5,
        "rotary_pairs": True,
    },
    "OlmoeForCausalLM": SPANS,
    "MiniMaxM2ForCausalLM": SPANS,
    "HunYuanDenseV1ForCausalLM": {"qk_norm": True, "qk_norm_after_rope": True},
}
FIELDS |= dict.fromkeys(
    WITH_DELTA_NET, {"qk_norm": True, "norm_plus_one": True, "output_gate": True}
)


def make_spec(architecture: str = "Qwen2ForCausalLM", **changes: object) -> ModelSpec:
    """A spec small enough to write out every element."""
    latent = architecture in LATENT
    fields = {
        "architecture": architecture,
        "num_layers": 4,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_heads": 4,
        "num_kv_heads": 4 if latent else 2,
        "head_dim": 4 if latent else 2,
        "vocab_size": 50,
        "tie_embeddings": False,
        "qkv_bias": architecture in WITH_QKV_BIAS,
        "qk_norm": False,
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_positions": 64,
        "moe": make_experts(architecture) if architecture in ROUTED else None,
        "mla": MLASpec(8, 6, 2, 2, 3) if latent else None,
    }
    if architecture in UNTIED:
        changes.pop("tie_embeddings", None)
    fields |= FIELDS.get(architecture, {}) | changes
    if without_rope := fields.get("layers_without_rope"):
        fields["layers_without_rope"] = without_rope[: fields["num_layers"]]  # type: ignore[index,misc]
    if architecture in WITH_DELTA_NET:
        fields.setdefault("delta_net", make_delta_net(int(fields["num_layers"])))  # type: ignore[call-overload]
    return ModelSpec(**fields)  # type: ignore[arg-type]


def make_delta_net(
    num_layers: int, num_key_heads: int = 4, shares: int = 2
) -> DeltaNetSpec:
    """Gated delta nets in every other layer, with `shares` value heads for each key head."""
    return DeltaNetSpec(
        num_key_heads,
        shares * num_key_heads,
        key_head_dim=2,
        value_head_dim=3,
        conv_width=4,
        layers=tuple(layer % 2 == 0 for layer in range(num_layers)),
    )


def expert_tp(architecture: str) -> dict[str, int]:
    """What a grid says where `tp` is above 1."""
    return {"etp": 1} if architecture == UNCUT else {}


def make_experts(
    architecture: str,
    num_experts: int = 4,
    ffn_hidden_size: int = 8,
    num_dense_layers: int = 1,
) -> MoESpec:
    """Experts as the architecture has them."""
    experts = MoESpec(num_experts, 2, ffn_hidden_size, normalize_weights=True)
    keys = EXPERT_KEYS[architecture]
    if keys.shared_width:
        return replace(
            experts, shared_ffn_hidden_size=2 * ffn_hidden_size, shared_gate=True
        )
    if keys.has_shared:
        experts = replace(
            experts,
            num_dense_layers=num_dense_layers,
            shared_ffn_hidden_size=2 * ffn_hidden_size,
            scaling=2.5,
        )
    if keys.shared_alone:
        experts = replace(
            experts, shared_ffn_hidden_size=2 * ffn_hidden_size, scaling=2.5
        )
    if keys.num_shared:
        experts = replace(
            experts,
            num_dense_layers=num_dense_layers,
            shared_ffn_hidden_size=2 * ffn_hidden_size,
        )
    if keys.scales_input:
        experts = replace(
            experts,
            experts_per_token=1,
            normalize_weights=False,
            interval=1 + min(num_dense_layers, 1),
            shared_ffn_hidden_size=ffn_hidden_size,
            router="sigmoid",
            scales_input=True,
        )
    if keys.by_sigmoid:
        experts = replace(experts, router="sigmoid", router_bias=True)
    elif keys.by_biased_softmax:
        experts = replace(experts, router_bias=True)
    return replace(experts, num_groups=2) if keys.has_groups else experts


@st.composite
def specs(
    draw: st.DrawFn,
    tp_sizes: Sequence[int],
    architectures: Sequence[str] = ARCHITECTURES,
) -> ModelSpec:
    """Any of the architectures, any sizes that every one of `tp_sizes` divides."""
    most = max(tp_sizes)
    architecture = draw(st.sampled_from(architectures))
    num_layers = draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(
        st.sampled_from([1, 2, 4, 8] if architecture != UNCUT else [most, 2 * most])
    )
    heads = max(kv_heads, most) * draw(st.integers(1, 3))
    sizes: dict[str, object] = {
        "num_layers": num_layers,
        "hidden_size": most * draw(st.integers(1, 3)),
        "ffn_hidden_size": most * draw(st.integers(1, 3)),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        # Megatron cuts the fused rows evenly, also where a head is shared by several
        # ranks
        "head_dim": draw(st.integers(1, 3)) * max(1, most // kv_heads),
        "vocab_size": draw(st.integers(3, 140)),
        "tie_embeddings": draw(st.booleans()),
    }
    if architecture in ROUTED:
        num_experts = draw(st.sampled_from([2, 4, 6]))
        width = most * draw(st.integers(1, 2))
        sizes["moe"] = make_experts(
            architecture, num_experts, width, draw(st.integers(0, num_layers - 1))
        )
    if architecture in WITH_DELTA_NET:
        key_heads, shares = most * draw(st.integers(1, 2)), draw(st.integers(1, 2))
        sizes["delta_net"] = make_delta_net(num_layers, key_heads, shares)
    if architecture in LATENT:
        mla = MLASpec(
            q_lora_rank=draw(st.sampled_from([None, 3, 4])),
            kv_lora_rank=draw(st.integers(1, 4)),
            qk_nope_head_dim=draw(st.integers(1, 2)),
            qk_rope_head_dim=2,
            v_head_dim=draw(st.integers(1, 3)),
        )
        sizes |= {
            "mla": mla,
            "num_kv_heads": heads,
            "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        }
    if architecture in MAMBA_LAYERS:
        kinds = st.sampled_from(("mamba", "attention", "mlp", "moe"))
        layer_kinds = tuple(draw(kinds) for _ in range(num_layers))
        sizes["layer_kinds"] = layer_kinds
        if "moe" in layer_kinds:
            width = most * draw(st.integers(1, 2))
            sizes["moe"] = make_experts(architecture, ffn_hidden_size=width)
    if architecture in (*MAMBA_LAYERS, *ATTENTION_BESIDE_MAMBA):
        # A single group has a state that all ranks divide, and a bias, without which
        # vLLM cannot copy it.
        groups = draw(st.sampled_from([1, most, 2 * most]))
        sizes["mamba"] = MambaSpec(
            num_heads=max(groups, most) * draw(st.integers(1, 2)),
            head_dim=draw(st.integers(1, 3)),
            num_groups=groups,
            state_size=draw(st.integers(1, 3)) * (most if groups == 1 else 1),
            conv_size=draw(st.integers(1, 4)),
            conv_bias=groups == 1 or draw(st.booleans()),
            chunk_size=8,
            has_norm=draw(st.booleans())
            if architecture in ATTENTION_BESIDE_MAMBA
            else True,
        )
    return make_spec(architecture, **sizes)


def element_ids(weights: Sequence[Weight]) -> dict[str, np.ndarray]:
    """Every global array filled with numbers that occur nowhere else; zero is left for padding."""
    ids, first = {}, 1
    for weight in weights:
        count = int(np.prod(weight.shape))
        ids[weight.name] = np.arange(first, first + count).reshape(weight.shape)
        first += count
    return ids


def separated(arrays: dict[str, np.ndarray], spec: ModelSpec) -> dict[str, np.ndarray]:
    """The arrays, with those that files hold fused (Phi-3) cut into q, k and v, and into gate and up."""
    parts = {}
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for name, array in arrays.items():
        if "qkv_proj" in name:
            for part, rows in zip("qkv", np.split(array, [q, q + kv]), strict=True):
                parts[name.replace("qkv_proj", f"{part}_proj")] = rows
        elif "gate_up_proj" in name and spec.moe is None:
            for part, rows in zip(("gate", "up"), np.split(array, 2), strict=True):
                parts[name.replace("gate_up_proj", f"{part}_proj")] = rows
        else:
            parts[name] = array
    return parts


def fill(layout: Layout, ids: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The local tensors of a layout, holding element ids; padding is zero."""
    tensors = {
        name: np.zeros(shape, dtype=np.int64)
        for name, shape in layout.local_shapes.items()
    }
    held = seen(layout, tensors)
    for piece in layout.pieces:
        target = held[piece.local][piece.local_box.slices]
        assert (target == 0).all(), f"{piece} overlaps another piece"
        target[...] = ids[piece.tensor][piece.box.slices].reshape(target.shape)
    return tensors


def seen(layout: Layout, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Local tensors and a layout's views of them."""
    views = {}
    for name, (local, view) in layout.views.items():
        every = tuple(
            slice(first, None, step)
            for first, step in zip(view.first, view.step, strict=True)
        )
        views[name] = tensors[local].transpose(view.axes)[every]
    return tensors | views


def make_weights(shapes: dict[str, tuple[int, ...]]) -> list[Weight]:
    return [
        Weight(name, shape, Split.REPLICATED, 0, name, name)
        for name, shape in shapes.items()
    ]
