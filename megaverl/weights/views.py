"""Boxes of real tensors, and whether the tensors are those of a layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megaverl.errors import MegaverlError
from megaverl.sharding.boxes import Box
from megaverl.sharding.layout import Layout
from megaverl.sharding.naming import listed


def view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The box of a tensor or parameter, sharing its storage, outside autograd."""
    return tensor.detach()[box.slices]


def check_tensors(
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    holder: str,
    error: type[MegaverlError],
    *,
    exact: bool = False,
) -> None:
    """Every local tensor of the layout is in `tensors`, with the layout's shape.

    Args:
        exact: `tensors` must hold nothing else either.

    Raises:
        error: names every tensor that is missing, of another shape or, if `exact`, that no weight belongs to.
    """
    missing = [name for name in layout.local_shapes if name not in tensors]
    problems = [f"{holder} has no such parameter: {', '.join(listed(missing))}"] if missing else []
    shapes: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name, shape in layout.local_shapes.items():
        if name in tensors and tuple(tensors[name].shape) != tuple(shape):
            shapes.setdefault((tuple(tensors[name].shape), tuple(shape)), []).append(name)
    for (found, wanted), names in shapes.items():
        problems.append(f"shape {list(found)}, the layout says {list(wanted)}: {', '.join(listed(names))}")
    extra = [name for name in tensors if name not in layout.local_shapes] if exact else []
    if extra:
        problems.append(
            f"no weight of the model belongs to {', '.join(listed(extra))} (quantised or adapted models have such)"
        )
    if problems:
        raise error(f"{holder} does not fit its layout: " + "; ".join(problems) + ".")
