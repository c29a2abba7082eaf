"""Who serves whom: the ranks that hold the same boxes share out those that need them, as evenly as can be.

The rule, the same on every rank: a holder on the needing rank's own node, else any holder. Those who need
boxes of one size stand in a line, each with as many requests as there are tensors alike; the line is cut into
equal runs, one a holder. So holders differ by one request at most, and a rank meets few holders. Large boxes
are dealt first, and what does not come out even goes on where the last deal ended: over all sizes, the holders
differ by one largest box at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megaverl.sharding.boxes import Box, BoxIndex, first_overlap, intersect, subtract
from megaverl.sharding.layout import Layout

ANYWHERE = -1  # the pool of all holders, beside those of single nodes


class ShardRange(NamedTuple):
    """Bundle `bundle` of tensors `low` to `high` (not included) of a geometry, both by their number."""

    geometry: int
    low: int
    high: int
    bundle: int


@dataclass(frozen=True)
class Deal:
    """Requests of one size to one pool: request `place * num_tensors + i` is for tensor i, from the rank at
    that place of `needing`. The first `extra` holders from `start` on get one more than the others."""

    pool: Sequence[int]
    start: int
    needing: dict[int, int]
    num_tensors: int

    @property
    def share(self) -> tuple[int, int]:
        return divmod(len(self.needing) * self.num_tensors, len(self.pool))

    def holders(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """`(holder, low, high)`: who gives `rank` tensors low to high."""
        each, extra = self.share
        first = self.needing[rank] * self.num_tensors
        request = first
        while request < first + self.num_tensors:
            longer = extra * (each + 1)
            turn = request // (each + 1) if request < longer else extra + (request - longer) // each
            end = min(self._first_request(turn + 1), first + self.num_tensors)
            yield self.pool[(self.start + turn) % len(self.pool)], request - first, end - first
            request = end

    def served(self, place: int, ranks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """`(rank, low, high)`: to whom the holder at a place of the pool gives tensors low to high."""
        turn = (place - self.start) % len(self.pool)
        request, end = self._first_request(turn), self._first_request(turn + 1)
        while request < end:
            number, low = divmod(request, self.num_tensors)
            high = min(self.num_tensors, low + end - request)
            yield ranks[number], low, high
            request += high - low

    def _first_request(self, turn: int) -> int:
        each, extra = self.share
        return turn * each + min(turn, extra)


class Dealer:
    """All deals of one set of holders: the ranks of some classes of the source.

    Args:
        classes: the classes.
        wanted: `(size, geometry, bundle, class of the destination)` for all that the holders have and
            somebody wants, by numbers.
    """

    def __init__(
        self,
        classes: Iterable[int],
        wanted: Iterable[tuple[int, int, int, int]],
        geometries: Sequence[TensorGroup],
        source: RankLayouts,
        dest: RankLayouts,
        node_of: Sequence[int],
    ) -> None:
        self._holders = frozenset(classes)
        self._node_of = node_of
        self._pools = self._make_pools(source)
        self._place = {key: {rank: i for i, rank in enumerate(pool)} for key, pool in self._pools.items()}
        self._deals: dict[tuple[int, int, int], dict[int, Deal]] = {}
        starts = dict.fromkeys(self._pools, 0)
        lines: dict[tuple[int, int, int], list[int]] = {}
        for size, geometry, bundle, number in wanted:
            lines.setdefault((-size, geometry, bundle), []).append(number)
        for (size, geometry, bundle), numbers in sorted(lines.items()):
            deals = self._deals[geometry, bundle, -size] = {}
            for key, needing in self._lines(numbers, source, dest).items():
                deal = Deal(self._pools[key], starts[key], needing, len(geometries[geometry].tensors))
                starts[key] = (deal.start + deal.share[1]) % len(deal.pool)
                deals[key] = deal

    def _make_pools(self, source: RankLayouts) -> dict[int, list[int]]:
        """The holders of each node, and all; of each class first one on every node, then the next."""
        on_node: dict[tuple[int, int], int] = {}
        order = []
        for number in sorted(self._holders):
            for rank in source.ranks[number]:
                node = self._node_of[rank]
                nth = on_node[number, node] = on_node.get((number, node), -1) + 1
                order.append((number, nth, node, rank))
        pools: dict[int, list[int]] = {ANYWHERE: []}
        for _, _, node, rank in sorted(order):
            pools[ANYWHERE].append(rank)
            pools.setdefault(node, []).append(rank)
        return pools

    def _lines(self, numbers: Sequence[int], source: RankLayouts, dest: RankLayouts) -> dict[int, dict[int, int]]:
        lines: dict[int, dict[int, int]] = {}
        for number in numbers:
            for rank in dest.ranks[number]:
                if source.class_of[rank] not in self._holders:
                    line = lines.setdefault(self._pool_of(rank), {})
                    line[rank] = len(line)
        return lines

    def _pool_of(self, rank: int) -> int:
        node = self._node_of[rank]
        return node if node in self._pools else ANYWHERE

    def fetched(self, rank: int, geometry: int, bundle: int, size: int) -> Iterator[tuple[int, ShardRange]]:
        """From whom `rank`, which is none of the holders, gets what."""
        deal = self._deals[geometry, bundle, size][self._pool_of(rank)]
        for holder, low, high in deal.holders(rank):
            yield holder, ShardRange(geometry, low, high, bundle)

    def served(self, rank: int) -> Iterator[tuple[int, ShardRange]]:
        """To whom `rank`, one of the holders, gives what."""
        for (geometry, bundle, _), deals in self._deals.items():
            for key in (ANYWHERE, self._node_of[rank]):
                if key in deals:
                    deal = deals[key]
                    for other, low, high in deal.served(self._place[key][rank], list(deal.needing)):
                        yield other, ShardRange(geometry, low, high, bundle)


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
