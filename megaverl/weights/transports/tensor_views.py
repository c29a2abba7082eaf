"""Local tensors of a layout, as views that have the layout's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import torch

from megaverl.errors import MegaverlError
from megaverl.sharding.boxes import Box
from megaverl.sharding.layout import Layout
from megaverl.sharding.weight import listed

Tensors = Mapping[str, torch.Tensor]  # local name -> tensor


class Viewed(Mapping[str, torch.Tensor]):
    """Local tensors and a layout's views of them.

    Views are made again in every access, since a tensor's storage may have changed.
    """

    def __init__(self, layout: Layout, tensors: Tensors) -> None:
        self._views, self._tensors = layout.views, tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._views:
            return self._tensors[name]
        local, view = self._views[name]
        return view.apply(self._tensors[local].detach())

    def __iter__(self) -> Iterator[str]:
        return chain(self._tensors, self._views)

    def __len__(self) -> int:
        return len(self._tensors) + len(self._views)


def viewed(layout: Layout, tensors: Tensors) -> Tensors:
    """Return the tensors that the pieces of a layout name, views included."""
    return Viewed(layout, tensors) if layout.views else tensors


def view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a box of a tensor or parameter that shares its storage, outside autograd."""
    return tensor.detach()[box.slices]


def check_tensors(
    layout: Layout,
    tensors: Tensors,
    holder: str,
    error: type[MegaverlError],
    *,
    exact: bool = False,
) -> None:
    """Check that `tensors` has every local tensor of the layout, with the layout's shape.

    Args:
        exact: whether `tensors` must contain nothing else.

    Raises:
        error: lists every tensor that is missing, has another shape or, if `exact`, belongs to no weight.
    """
    missing = [name for name in layout.local_shapes if name not in tensors]
    problems = (
        [f"{holder} has no such parameter: {', '.join(listed(missing))}"]
        if missing
        else []
    )
    shapes: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name, shape in layout.local_shapes.items():
        if name in tensors and tuple(tensors[name].shape) != tuple(shape):
            shapes.setdefault((tuple(tensors[name].shape), tuple(shape)), []).append(
                name
            )
    for (actual, wanted), names in shapes.items():
        problems.append(
            f"shape {list(actual)}, the layout says {list(wanted)}: {', '.join(listed(names))}"
        )
    extra = (
        [name for name in tensors if name not in layout.local_shapes] if exact else []
    )
    if extra:
        problems.append(
            f"no weight of the model belongs to {', '.join(listed(extra))} (quantised or adapted models have such)"
        )
    if problems:
        raise error(f"{holder} does not fit its layout: " + "; ".join(problems) + ".")
