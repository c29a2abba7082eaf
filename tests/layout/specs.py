"""Model specs and element ids for the tests of layouts and plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from megaverl.layout.layout import Layout
from megaverl.layout.weights import Weight
from megaverl.models.spec import ARCHITECTURES, ModelSpec


def make_spec(architecture: str = "Qwen2ForCausalLM", **changes: object) -> ModelSpec:
    """A spec small enough to write out every element."""
    fields = {
        "architecture": architecture,
        "num_layers": 4,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 2,
        "vocab_size": 50,
        "tie_embeddings": False,
        "qkv_bias": architecture == "Qwen2ForCausalLM",
        "qk_norm": architecture == "Qwen3ForCausalLM",
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_positions": 64,
    }
    return ModelSpec(**(fields | changes))  # type: ignore[arg-type]


@st.composite
def specs(draw: st.DrawFn, tp_sizes: Sequence[int]) -> ModelSpec:
    """Any architecture, any sizes that every one of `tp_sizes` divides."""
    most = max(tp_sizes)
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = max(kv_heads, most) * draw(st.integers(1, 3))
    return make_spec(
        draw(st.sampled_from(ARCHITECTURES)),
        num_layers=draw(st.sampled_from([1, 2, 4])),
        hidden_size=most * draw(st.integers(1, 3)),
        ffn_hidden_size=most * draw(st.integers(1, 3)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        # Megatron cuts the fused rows evenly, also where a head is shared by several ranks
        head_dim=draw(st.integers(1, 3)) * max(1, most // kv_heads),
        vocab_size=draw(st.integers(3, 140)),
        tie_embeddings=draw(st.booleans()),
    )


def element_ids(weights: Sequence[Weight]) -> dict[str, np.ndarray]:
    """Every global array filled with numbers that occur nowhere else; zero is left for padding."""
    ids, first = {}, 1
    for weight in weights:
        count = int(np.prod(weight.shape))
        ids[weight.name] = np.arange(first, first + count).reshape(weight.shape)
        first += count
    return ids


def fill(layout: Layout, ids: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The local tensors of a layout, holding element ids; padding is zero."""
    tensors = {name: np.zeros(shape, dtype=np.int64) for name, shape in layout.local_shapes.items()}
    for piece in layout.pieces:
        target = tensors[piece.local][piece.local_box.slices]
        assert (target == 0).all(), f"{piece} overlaps another piece"
        target[...] = ids[piece.tensor][piece.box.slices].reshape(target.shape)
    return tensors
