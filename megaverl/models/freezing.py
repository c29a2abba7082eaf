"""Weights that a role's `freeze` leaves untrained, found by patterns of their names in the model's folder."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from megaverl.errors import ConfigError
from megaverl.sharding.layout import Layout


def frozen_names(
    names: Collection[str], patterns: Sequence[str], role: str
) -> set[str]:
    """Return the names that match a pattern, with or without a leading `model.`.

    Raises:
        ConfigError: a pattern matches nothing, or no weight is left to train.
    """
    frozen: set[str] = set()
    for pattern in patterns:
        matching = [
            name
            for name in names
            if any(
                fnmatchcase(candidate, pattern)
                for candidate in (name, name.removeprefix("model."))
            )
        ]
        if not matching:
            raise ConfigError(
                f"{role}.freeze: {pattern!r} fits none of the model's weights, such as {', '.join(list(names)[:3])}. "
                "Correct the pattern, or leave it out."
            )
        frozen.update(matching)
    if names and frozen.issuperset(names):
        raise ConfigError(
            f"{role}.freeze: {', '.join(patterns)} fit all of the weights, and no weight is left to train."
        )
    return frozen


def frozen_parameters(
    stage: int, layouts: Iterable[Layout], frozen: set[str], role: str
) -> set[str]:
    """Return the local tensors of a pipeline stage that hold frozen weights. They are the same on all of its ranks.

    The parts of a weight on the ranks are taken together. Ranks may hold parts of
    different weights under one name (a share of q, k and v), or padding alone. If they
    did not agree, the backward pass would enter collectives on some of them only.

    Args:
        layouts: of all ranks of the stage.

    Raises:
        ConfigError: a local tensor holds frozen and other weights, or the stage has no weight to train.
    """
    tensors_of: dict[str, set[str]] = {}
    for layout in layouts:
        for piece in layout.pieces:
            local = layout.stored_in(piece.local)
            tensors_of.setdefault(local, set()).add(piece.tensor)
    parameters = set()
    for local, tensors in tensors_of.items():
        trained = tensors - frozen
        if trained and len(trained) < len(tensors):
            raise ConfigError(
                f"{role}.freeze: megatron-core keeps {', '.join(sorted(tensors))} in one parameter. Freeze all of "
                "them or none."
            )
        if not trained:
            parameters.add(local)
    if len(parameters) == len(tensors_of):
        raise ConfigError(
            f"{role}.freeze: all weights of pipeline stage {stage} are frozen. Use fewer stages ({role}.pp), or "
            "freeze less."
        )
    return parameters


def keep_graph(chunks: Sequence[nn.Module]) -> None:
    """Make the embeddings' output require a gradient.

    If embeddings are frozen, a checkpointed layer whose input requires no gradient
    would compute none for its weights.
    """

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    for chunk in chunks:
        if getattr(chunk, "pre_process", False):
            chunk.get_submodule("embedding").register_forward_hook(hook)
