"""Boxes of real tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megaverl.errors import MegaverlError
from megaverl.layout.boxes import Box
from megaverl.layout.layout import Layout
from megaverl.reshard.plan import MAX_NAMED


def view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The box of a tensor or parameter, sharing its storage, outside autograd."""
    return tensor.detach()[box.slices]


def check_tensors(layout: Layout, tensors: Mapping[str, torch.Tensor], holder: str, error: type[MegaverlError]) -> None:
    """Every local tensor of the layout is in `tensors`, with the layout's shape.

    Raises:
        error: names every tensor that is missing or of another shape.
    """
    problems = []
    for name, shape in layout.local_shapes.items():
        if name not in tensors:
            problems.append(f"{name}: {holder} has no such parameter")
        elif tuple(tensors[name].shape) != tuple(shape):
            problems.append(f"{name}: shape {list(tensors[name].shape)}, the layout says {list(shape)}")
    if problems:
        more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        raise error(f"{holder} does not fit its layout: " + "; ".join(problems[:MAX_NAMED]) + more + ".")
