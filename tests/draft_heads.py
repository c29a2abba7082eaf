"""Untrained draft heads with random weights in every place, for tests of engines and of updates."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megaverl.models.new_heads import make_draft_head
from megaverl.sharding.draft_head import HEAD_METHODS


def make_heads(root: Path, model: str | Path, *, spread: float) -> dict[str, Path]:
    """Write a head of each kind for a model; return their folders by vLLM's method.

    Args:
        spread: standard deviation of what is added to each weight of the MTP head. Its norms are ones and its biases
            zeros at first; this way each of them has a part in the result.
    """
    heads = {
        method: make_draft_head(root / method, model, method=method)
        for method in HEAD_METHODS
    }
    file = heads["mtp"] / "model.safetensors"
    weights = load_file(file)
    generator = torch.Generator().manual_seed(0)
    for weight in weights.values():
        weight += spread * torch.randn(weight.shape, generator=generator)
    save_file(weights, file, metadata={"format": "pt"})
    return {str(method): head for method, head in heads.items()}
