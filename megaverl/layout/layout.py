"""A layout: for one rank, which box of which global array sits in which box of which local tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megaverl.layout.boxes import Box, cut, whole


class Piece(NamedTuple):
    """A box of a global tensor and the box of the local tensor that holds it.

    The two boxes have the same shape up to axes of size one, and the same element order.
    """

    tensor: str
    box: Box
    local: str
    local_box: Box


@dataclass(frozen=True, eq=False)
class Layout:
    """What one rank holds. Elements of local tensors that no piece covers are padding.

    Attributes:
        pieces: in the order of the weights' table.
        local_shapes: shape of every local tensor, by its name in the engine.
        global_shapes: shape of every global tensor of which the rank holds a piece.
    """

    pieces: tuple[Piece, ...]
    local_shapes: dict[str, tuple[int, ...]]
    global_shapes: dict[str, tuple[int, ...]]
    by_tensor: dict[str, list[Piece]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        index: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            index.setdefault(piece.tensor, []).append(piece)
        object.__setattr__(self, "by_tensor", index)

    @property
    def numel(self) -> int:
        """Elements held, padding not counted."""
        return sum(piece.box.numel for piece in self.pieces)


EMPTY = Layout((), {}, {})


class LayoutBuilder:
    """Collects the pieces of one rank, local tensor by local tensor."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.local_shapes: dict[str, tuple[int, ...]] = {}
        self.global_shapes: dict[str, tuple[int, ...]] = {}

    def add_stacked(
        self,
        local: str,
        parts: Sequence[tuple[str, tuple[int, ...], Box]],
        rows: int | None = None,
    ) -> None:
        """A local tensor made of boxes stacked along axis 0, in this order.

        Args:
            local: its name.
            parts: `(global name, global shape, box)`; at least one, equal in every axis but the first.
            rows: rows of the local tensor when it is longer than its parts (padding at the end).
        """
        offset = 0
        tail = parts[0][2].shape[1:]
        for tensor, shape, box in parts:
            self.global_shapes[tensor] = tuple(shape)
            height = box.shape[0]
            if height > 0:
                local_box = cut((offset + height, *tail), 0, offset, offset + height)
                self.pieces.append(Piece(tensor, box, local, local_box))
            offset += height
        self.local_shapes[local] = (rows if rows is not None else offset, *tail)

    def add_whole(self, tensor: str, shape: Sequence[int], local: str | None = None) -> None:
        """A global tensor held whole, under its own name unless `local` says otherwise."""
        self.add_stacked(local or tensor, [(tensor, tuple(shape), whole(shape))])

    def build(self) -> Layout:
        return Layout(tuple(self.pieces), self.local_shapes, self.global_shapes)


def whole_layout(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
    """Every tensor whole, local names equal to global ones: what a folder or a single process holds."""
    builder = LayoutBuilder()
    for name, shape in shapes:
        builder.add_whole(name, shape)
    return builder.build()


def padded_tensors(layout: Layout) -> list[str]:
    """Names of the local tensors that have elements which no piece covers."""
    covered = dict.fromkeys(layout.local_shapes, 0)
    for piece in layout.pieces:
        covered[piece.local] += piece.local_box.numel
    return [name for name, shape in layout.local_shapes.items() if covered[name] < whole(shape).numel]
