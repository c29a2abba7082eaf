"""What no piece covers is zero after a load, wherever it lies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megaverl.distributed.grid import GridShape
from megaverl.models.architectures import weights_of
from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_spec import ModelSpec
from megaverl.weights.load import load_folder


@pytest.mark.parametrize("value_head", [0, 1])
def test_a_shard_of_nothing_but_padding_is_zero(
    tmp_path: Path, value_head: int
) -> None:
    """31 words over two ranks: 64 rows, and the second rank has none of the words."""
    folder = make_tiny_folder(
        tmp_path, "Qwen3ForCausalLM", tie_embeddings=True, vocab_size=31
    )
    spec = ModelSpec.from_folder(folder)
    weights = weights_of(spec, value_head=value_head, beside_logits=bool(value_head))
    layout = megatron_layouts(
        weights, spec, GridShape.fit(2, tp=2), padded_vocab_size=64
    )(1)
    tensors = {
        name: torch.full(shape, torch.nan)
        for name, shape in layout.local_shapes.items()
    }
    absent = load_folder(
        folder, layout, tensors, weights=weights, optional=("score.weight",)
    )
    assert absent == ["score.weight"] * value_head
    assert (
        tensors["embedding.word_embeddings.weight"].tolist()
        == [[0.0] * spec.hidden_size] * 32
    )
    left = {name for name, found in tensors.items() if found.isnan().any()}
    assert left == ({"value_head.weight"} if value_head else set()), (
        "but for the head, which is drawn"
    )
