"""Layouts: for one rank, which box of which global array lies in which box of which local tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from megaverl.sharding.boxes import Box, carry, cut, intersect, whole
from megaverl.sharding.strided import Strides
from megaverl.sharding.weight import Weight


class Piece(NamedTuple):
    """Box of a global tensor, and the box of a local tensor that holds it.

    The two boxes have the same shape up to axes of size one, and the same order of
    elements. `local` names a local tensor or a view of one (`Layout.views`).
    """

    tensor: str
    box: Box
    local: str
    local_box: Box


@dataclass(frozen=True, eq=False)
class Layout:
    """Pieces of global tensors that one rank holds. Elements of local tensors that no piece covers are padding.

    Attributes:
        pieces: in the order of the weights' table, with routed experts after the others.
        local_shapes: shape of every local tensor, by its name in the engine. Tensors of which the rank has an empty
            shard are not listed.
        global_shapes: shape of every global tensor of which the rank holds a piece.
        quantised: quantised local tensors -> name of their format (`sharding/quantization.py`).
        views: name of a view -> its local tensor and strides, for pieces that lie there transposed or in steps.
    """

    pieces: tuple[Piece, ...]
    local_shapes: dict[str, tuple[int, ...]]
    global_shapes: dict[str, tuple[int, ...]]
    quantised: Mapping[str, str] = field(default_factory=dict)
    views: Mapping[str, tuple[str, Strides]] = field(default_factory=dict)

    def stored_in(self, local: str) -> str:
        """Return the local tensor that `local` names, directly or as a view."""
        return self.views[local][0] if local in self.views else local

    def shape_of(self, local: str) -> tuple[int, ...]:
        """Return the shape of a local tensor or of a view."""
        if local not in self.views:
            return self.local_shapes[local]
        name, view = self.views[local]
        return view.shape_of(self.local_shapes[name])

    @cached_property
    def by_tensor(self) -> dict[str, list[Piece]]:
        """Pieces of each global tensor. Built on first use, because it is needed for few ranks."""
        index: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            index.setdefault(piece.tensor, []).append(piece)
        return index

    def without(self, tensors: Collection[str]) -> Layout:
        """Return the layout without some global tensors, and without local tensors that held nothing else.

        Local tensors of padding alone stay.
        """
        if not tensors:
            return self
        pieces = tuple(piece for piece in self.pieces if piece.tensor not in tensors)
        # A fused local tensor stays while any of its global tensors does.
        unused = {self.stored_in(p.local) for p in self.pieces} - {
            self.stored_in(p.local) for p in pieces
        }
        return Layout(
            pieces,
            {
                name: shape
                for name, shape in self.local_shapes.items()
                if name not in unused
            },
            {
                name: shape
                for name, shape in self.global_shapes.items()
                if name not in tensors
            },
            {
                name: block
                for name, block in self.quantised.items()
                if name not in unused
            },
            {name: view for name, view in self.views.items() if view[0] not in unused},
        )

    def shard(self, shard_boxes: Mapping[str, Box]) -> Layout:
        """Return the layout of a rank that holds one box of each local tensor of this layout, like a shard of FSDP2.

        Args:
            shard_boxes: local tensor -> its box that becomes the rank's local tensor. Tensors without a box, or with
                an empty one, are left out.
        """
        shard_boxes = {name: box for name, box in shard_boxes.items() if box.numel}
        pieces = []
        views = {}
        for piece in self.pieces:
            name = self.stored_in(piece.local)
            if name not in shard_boxes:
                continue
            local = name
            part = shard_boxes[name]
            shift = shard_boxes[name].start
            # A view orders the elements differently. The shard's box is converted to
            # the view's coordinates, and the view of the shard gets a name of its own.
            if piece.local in self.views:
                part, view = self.views[piece.local][1].inside(part)
                local = f"{name}.{view}"
                shift = part.start
                views[local] = (name, view)
            if common := intersect(piece.local_box, part):
                box = carry(common, piece.local_box, piece.box)
                # Places in the shard are counted from its own start.
                moved = (
                    tuple(a - b for a, b in zip(corner, shift, strict=True))
                    for corner in common
                )
                pieces.append(Piece(piece.tensor, box, local, Box(*moved)))
        # Views may have been recorded for pieces that the shard does not reach.
        used = {piece.local for piece in pieces}
        return Layout(
            tuple(pieces),
            {
                name: shard_boxes[name].shape
                for name in self.local_shapes
                if name in shard_boxes
            },
            {piece.tensor: self.global_shapes[piece.tensor] for piece in pieces},
            views={name: view for name, view in views.items() if name in used},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values, to send it to another rank."""
        # Most boxes are equal in all layers, so each is sent once.
        numbers: dict[Box, int] = {}

        def number(box: Box) -> int:
            return numbers.setdefault(box, len(numbers))

        return {
            "pieces": [
                [tensor, number(box), local, number(local_box)]
                for tensor, box, local, local_box in self.pieces
            ],
            "boxes": list(numbers),
            "local_shapes": self.local_shapes,
            "global_shapes": self.global_shapes,
            "quantised": self.quantised,
            "views": self.views,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Layout:
        """Return the layout that `to_json` converted."""
        # JSON turns tuples into lists, and boxes must be hashable.
        boxes = [Box(*map(tuple, corners)) for corners in stored["boxes"]]
        return cls(
            tuple(
                Piece(tensor, boxes[global_box], local, boxes[local_box])
                for tensor, global_box, local, local_box in stored["pieces"]
            ),
            {name: tuple(shape) for name, shape in stored["local_shapes"].items()},
            {name: tuple(shape) for name, shape in stored["global_shapes"].items()},
            stored["quantised"],
            {
                name: (local, Strides(*map(tuple, view)))
                for name, (local, view) in stored["views"].items()
            },
        )

    @property
    def numel(self) -> int:
        """Number of elements held, without padding."""
        return sum(piece.box.numel for piece in self.pieces)


EMPTY = Layout((), {}, {})


def join_layouts(a: Layout, b: Layout) -> Layout:
    """Return the layout of a rank that holds both. Their local names must differ."""
    return Layout(
        a.pieces + b.pieces,
        a.local_shapes | b.local_shapes,
        a.global_shapes | b.global_shapes,
        {**a.quantised, **b.quantised},
        {**a.views, **b.views},
    )


class Fill(NamedTuple):
    """Contents of one local tensor. Equal in all layers of a kind, so it is computed once and used for each.

    Attributes:
        parts: (number of the weight among those it holds, box of that weight, box of the local tensor).
        shape: shape of the local tensor, including padding.
        view: view of the local tensor in the order of the weights; the boxes are then of the view. None: the order is
            the same.
    """

    parts: tuple[tuple[int, Box, Box], ...]
    shape: tuple[int, ...]
    view: Strides | None = None


def stack(boxes: Sequence[tuple[int, Box]], rows: int | None = None) -> Fill:
    """Return a local tensor made of boxes stacked along axis 0.

    Args:
        boxes: (number of the weight, box of it), at least one. All are equal except along axis 0.
        rows: rows of the local tensor, if it is padded at the end.
    """
    parts = []
    offset = 0
    tail = boxes[0][1].shape[1:]
    for number, box in boxes:
        height = box.shape[0]
        # With fewer groups than ranks, a rank may hold no row of a weight. No piece is
        # recorded for it.
        if height:
            parts.append(
                (number, box, cut((offset + height, *tail), 0, offset, offset + height))
            )
        offset += height
    return Fill(tuple(parts), (offset if rows is None else rows, *tail))


def flatten(shape: tuple[int, ...]) -> Fill:
    """Return a local tensor [n] that holds a weight of the shape [1, n]."""
    return Fill(((0, whole(shape), whole(shape[1:])),), shape[1:])


class LayoutBuilder:
    """Collects the pieces of one rank, one local tensor after the other."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._local_shapes: dict[str, tuple[int, ...]] = {}
        self._global_shapes: dict[str, tuple[int, ...]] = {}
        self._views: dict[str, tuple[str, Strides]] = {}

    def add(self, local: str, weights: Sequence[Weight], fill: Fill) -> None:
        """Add a local tensor, the weights that it holds, and how they fill it."""
        # Pieces of a strided tensor name the view. The shape is that of the tensor
        # itself.
        seen = local
        if fill.view is not None:
            seen = f"{local}.{fill.view}"
            self._views[seen] = (local, fill.view)
        for number, box, local_box in fill.parts:
            self._pieces.append(Piece(weights[number].name, box, seen, local_box))
        for weight in weights:
            # Recorded even if this rank holds nothing of the weight, so that all ranks
            # know all weights of the parameter.
            self._global_shapes[weight.name] = weight.shape
        self._local_shapes[local] = fill.shape

    def build(self, quantised: Mapping[str, str] | None = None) -> Layout:
        """Return the layout of everything added."""
        return Layout(
            tuple(self._pieces),
            self._local_shapes,
            self._global_shapes,
            quantised or {},
            self._views,
        )


def whole_layout(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
    """Return a layout of whole tensors whose local names are the global ones, as in a folder or a single process."""
    shape_of = {name: tuple(shape) for name, shape in shapes}
    boxes = {name: whole(shape) for name, shape in shape_of.items()}
    return Layout(
        tuple(Piece(name, box, name, box) for name, box in boxes.items() if box.numel),
        shape_of,
        shape_of,
    )


def padded_tensors(layout: Layout) -> list[str]:
    """Return names of the local tensors that contain padding."""
    # Pieces do not overlap, so their sizes add up to the covered part.
    covered = dict.fromkeys(layout.local_shapes, 0)
    for piece in layout.pieces:
        covered[layout.stored_in(piece.local)] += piece.local_box.numel
    return [
        name
        for name, shape in layout.local_shapes.items()
        if covered[name] < whole(shape).numel
    ]


def shard_box(box: Box, index: int, count: int) -> Box:
    """Return shard `index` of `count` of a box: even chunks of rows, of which the last ones may be shorter or empty.

    Every chunk has ceil(rows / shards) rows, as in `torch.chunk` (torch 2.13,
    `distributed/fsdp/_fully_shard/_fsdp_param.py` and `_fsdp_common.py`).
    """
    rows = box.shape[0]
    # FSDP2 divides like `torch.chunk`: chunks of equal length, the last ones shorter or
    # empty.
    chunk = -(-rows // count)
    low, high = (
        box.start[0] + min(place * chunk, rows) for place in (index, index + 1)
    )
    return Box((low, *box.start[1:]), (high, *box.stop[1:]))


def even_layout(weights: Sequence[Weight], world: int, rank: int) -> Layout:
    """Return what `rank` of `world` holds of these weights under FSDP2, under their global names."""
    shapes = [(weight.name, weight.shape) for weight in weights]
    return whole_layout(shapes).shard(
        {name: shard_box(whole(shape), rank, world) for name, shape in shapes}
    )
