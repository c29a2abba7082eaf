"""Who holds what, and who wants it: the layouts of all ranks, indexed by tensor.

A model of a hundred layers with a hundred experts each has few ways in which its tensors are spread. Tensors
that the same ranks hold and want in the same boxes are one `TensorGroup`, and are planned as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megaverl.sharding.boxes import Box, intersect, subtract
from megaverl.sharding.layout import Layout
from megaverl.sharding.overlaps import BoxIndex, first_overlap

Boxes = tuple[Box, ...]


class RankLayouts:
    """All ranks' layouts of one side. Ranks that share a layout object are one class, known by its number.

    Attributes:
        class_of: the class of each rank.
        ranks: the ranks of each class.
        layouts: the layout of each class.
        shapes: global shape of every tensor.
        held: tensor -> (class, number in `boxes`) of every class that holds some of it, as one flat tuple.
        boxes: the distinct sets of boxes in which a class holds a tensor.
        disagreements: what ranks of this side say differently of a tensor's shape.
    """

    def __init__(self, layouts: Callable[[int], Layout], world: int) -> None:
        self.class_of: list[int] = []
        self.ranks: list[list[int]] = []
        self.layouts: list[Layout] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.boxes: list[Boxes] = []
        self.disagreements: list[str] = []
        numbers: dict[int, int] = {}
        for rank in range(world):
            layout = layouts(rank)
            number = numbers.get(id(layout))
            if number is None:
                number = numbers[id(layout)] = len(self.ranks)
                self.ranks.append([])
                self.layouts.append(layout)
            self.class_of.append(number)
            self.ranks[number].append(rank)
        self.held = self._index()

    def _index(self) -> dict[str, tuple[int, ...]]:
        held: dict[str, list[int]] = {}
        number_of: dict[Boxes, int] = {}
        for number, layout in enumerate(self.layouts):
            for tensor, shape in layout.global_shapes.items():
                known = self.shapes.setdefault(tensor, shape)
                if known is not shape and known != shape:
                    self.disagreements.append(f"{tensor}: ranks of one side say {known} and {shape} of its shape")
            # not `by_tensor`: a layout keeps that, and this rank needs it of few
            boxes_of: dict[str, Boxes] = {}
            for tensor, box, _, _ in layout.pieces:
                boxes_of[tensor] = (*boxes_of[tensor], box) if tensor in boxes_of else (box,)
            for tensor, boxes in boxes_of.items():
                held.setdefault(tensor, []).extend((number, number_of.setdefault(boxes, len(number_of))))
        self.boxes = list(number_of)
        return {tensor: tuple(classes) for tensor, classes in held.items()}

    def holding(self, classes: tuple[int, ...]) -> Iterator[tuple[int, Boxes]]:
        """The classes of an entry of `held`, each with its boxes."""
        for number, boxes in zip(classes[::2], classes[1::2], strict=True):
            yield number, self.boxes[boxes]


@dataclass(frozen=True)
class ShardSet:
    """The boxes of a tensor that exactly these classes of the source hold, disjoint."""

    classes: tuple[int, ...]
    cells: Boxes


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that the same classes hold in the same boxes, and the same classes want in the same boxes.

    Attributes:
        tensors: their names, in the order of the source's layouts.
        bundles: every element that is held, by who holds it.
        wanted: for each class of the destination, how many elements it wants of each bundle that it meets.
        missing: a box that each class of the destination wants and nobody holds, where there is one.
    """

    tensors: list[str]
    bundles: tuple[ShardSet, ...]
    wanted: Mapping[int, Mapping[int, int]]
    missing: Mapping[int, Box]


def find_geometries(source: RankLayouts, dest: RankLayouts) -> list[TensorGroup]:
    """The geometries of all tensors that both sides know and the destination wants some of."""
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for tensor in source.shapes:
        if tensor in dest.held:
            alike.setdefault((source.held.get(tensor, ()), dest.held[tensor]), []).append(tensor)
    return [_geometry(source, dest, *held, tensors) for held, tensors in alike.items()]


def _geometry(
    source: RankLayouts, dest: RankLayouts, held: tuple[int, ...], wanted_by: tuple[int, ...], tensors: list[str]
) -> TensorGroup:
    bundles = _bundles(source, held)
    cells = [(number, cell) for number, bundle in enumerate(bundles) for cell in bundle.cells]
    index = BoxIndex([cell for _, cell in cells])
    wanted: dict[int, dict[int, int]] = {}
    missing: dict[int, Box] = {}
    seen: dict[Boxes, tuple[dict[int, int], Box | None]] = {}
    for number, boxes in dest.holding(wanted_by):
        if boxes not in seen:
            amounts: dict[int, int] = {}
            unheld = None
            for box in boxes:
                rest = box.numel
                met = list(index.meeting(box))
                for cell, common in met:
                    bundle = cells[cell][0]
                    amounts[bundle] = amounts.get(bundle, 0) + common.numel
                    rest -= common.numel
                if rest:
                    unheld = _rest(box, [common for _, common in met])
            seen[boxes] = amounts, unheld
        wanted[number], unheld = seen[boxes]
        if unheld is not None:
            missing[number] = unheld
    return TensorGroup(tensors, bundles, wanted, missing)


def _bundles(source: RankLayouts, held: tuple[int, ...]) -> tuple[ShardSet, ...]:
    holders: dict[Box, set[int]] = {}
    for number, boxes in source.holding(held):
        for box in boxes:
            holders.setdefault(box, set()).add(number)
    cells = list(holders.items())
    if first_overlap(list(holders)) is not None:
        cells = _disjoint(cells)
    bundles: dict[tuple[int, ...], list[Box]] = {}
    for cell, classes in cells:
        bundles.setdefault(tuple(sorted(classes)), []).append(cell)
    return tuple(ShardSet(classes, tuple(sorted(boxes))) for classes, boxes in sorted(bundles.items()))


def _disjoint(holders: list[tuple[Box, set[int]]]) -> list[tuple[Box, set[int]]]:
    """Overlapping boxes cut into cells, each with all who hold it."""
    cells: list[tuple[Box, set[int]]] = []
    for box, classes in holders:
        cut: list[tuple[Box, set[int]]] = []
        rest = [box]
        for cell, others in cells:
            common = intersect(cell, box)
            if common is None:
                cut.append((cell, others))
                continue
            cut.append((common, others | classes))
            cut += [(part, others) for part in subtract(cell, box)]
            rest = [part for whole in rest for part in subtract(whole, cell)]
        cells = cut + [(part, classes) for part in rest]
    return cells


def _rest(box: Box, covered: list[Box]) -> Box:
    rest = [box]
    for hole in covered:
        rest = [part for whole in rest for part in subtract(whole, hole)]
    return rest[0]
