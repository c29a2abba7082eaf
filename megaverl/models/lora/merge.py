"""Adapters merged into weights where these have arrived, in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from megaverl.models.lora.low_rank import LowRank, factor_layout, names_of_factors, written_to
from megaverl.sharding.boxes import Box, split, whole
from megaverl.sharding.layout import Layout

CHUNK = 1 << 22  # elements that are merged in float32 at a time, into weights of 16 bits


class Merge:
    """Adds adapters to weights that arrive in another layout, in place, as often as they have arrived anew.

    The base weights and the factors travel by one plan; a rank that holds a box of a weight gets the rows of B and the
    columns of A that belong to it. The product is added after all has landed, some rows at a time: no second copy of
    anything, and the source's weights stay as they are to the last bit.

    Args:
        layout: of the weights there.
        scaling: alpha / rank.
        dtype: of the factors.

    Attributes:
        factors: the tensors in which the factors arrive, by their global names.
        brought: weights and factors, by their global names, that must come anew before each `apply`.
        written: local tensors that are written to: no other tensor may share their storage.
    """

    def __init__(
        self,
        layout: Layout,
        adapters: Mapping[str, LowRank],
        scaling: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._adapters, self.scaling = adapters, scaling
        self.written = written_to(layout, adapters)
        self.brought = frozenset(name for key, adapter in adapters.items() for name in (key, adapter.a, adapter.b))
        held = factor_layout(layout, adapters, names_of_factors)
        self.factors = {
            name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in held.local_shapes.items()
        }
        self._boxes = {piece.tensor: piece.box for piece in held.pieces}
        self._pieces = [piece for piece in layout.pieces if piece.tensor in adapters]

    @torch.no_grad()
    def apply(self, view_of: Callable[[str, Box], torch.Tensor], only: Collection[str] | None = None) -> None:
        """Add alpha / rank * B A to every weight that has an adapter; each must hold its base value.

        Args:
            view_of: the box of a local tensor -> its elements, to be written to.
            only: to these, by their global names.
        """
        for piece in self._pieces:
            if only is None or piece.tensor in only:
                target = view_of(piece.local, piece.local_box)
                add_product(target, *self._factors_of(self._adapters[piece.tensor], piece.box), self.scaling)

    def _factors_of(self, adapter: LowRank, box: Box) -> tuple[torch.Tensor, torch.Tensor]:
        """(A, B) of a box of the weight."""
        left = box.start[1] - self._boxes[adapter.a].start[1]
        top = box.start[0] - self._boxes[adapter.b].start[0]
        rows, columns = box.shape
        return self.factors[adapter.a][:, left : left + columns], self.factors[adapter.b][top : top + rows]


def add_product(target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
    """target += scaling * b a, computed in float32 at least and rounded once.

    Args:
        target: [rows, columns], up to axes of size one.
        a: [rank, columns].
        b: [rows, rank].
    """
    matrix = target.view(b.shape[0], a.shape[1])
    if target.dtype in (torch.float32, torch.float64):
        matrix.addmm_(b.to(target.dtype), a.to(target.dtype), alpha=scaling)
        return
    a, b = a.float(), b.float()
    for part in split(whole(tuple(matrix.shape)), CHUNK):
        rows, columns = part.slices
        place = matrix[rows, columns]
        place.copy_(torch.addmm(place.float(), b[rows], a[:, columns], alpha=scaling))
