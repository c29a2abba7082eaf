"""Decide which holder serves which rank: with the fewest bytes, from nearby, and evenly balanced.

A model with a hundred layers of a hundred experts each has only a few ways in which its
tensors are distributed. Tensors that the same ranks hold and want in the same boxes
form one `TensorGroup` and are planned together.

The rule, equal on every rank: a rank is served by a holder on its own node, else by any
holder. Ranks that need boxes of one size form a line, sorted by class and rank, with
one request for every tensor. The line is cut into equal runs, one per holder. So loads
differ by at most one request, and a rank talks to few holders. Large boxes are assigned
first, and each assignment starts where the previous one ended. Over all sizes, loads
differ by at most one largest box.

    requests:  r0 r0 r0 | r1 r1 r1 | r2 r2
    holder:       h0    |    h1    |  h2      (the next size starts at h2)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from megaverl.sharding.boxes import (
    Box,
    BoxIndex,
    first_overlap,
    intersect,
    subtract,
    subtract_all,
)
from megaverl.sharding.layout import Layout

# Stands for the pool of all holders, beside the pools of single nodes.
ANYWHERE = -1

Boxes = tuple[Box, ...]


class RankLayouts:
    """Layouts of all ranks on one side. Ranks that share a layout object form a class, identified by a number.

    Attributes:
        class_of: class of each rank.
        ranks: ranks of each class.
        layouts: layout of each class.
        shapes: global shape of every tensor.
        held: tensor -> flat tuple of (class, index in `boxes`) for every class that holds some of it.
        boxes: distinct sets of boxes in which a class holds a tensor.
        disagreements: contradictions between ranks about a tensor's shape, as messages.
    """

    def __init__(self, layouts: Callable[[int], Layout], world: int) -> None:
        self.class_of: list[int] = []
        self.ranks: list[list[int]] = []
        self.layouts: list[Layout] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.disagreements: list[str] = []
        numbers: dict[int, int] = {}
        for rank in range(world):
            layout = layouts(rank)
            # Layouts are compared by identity. Comparing their contents would be slow
            # in a large job, where few are different.
            number = numbers.setdefault(id(layout), len(self.ranks))
            if number == len(self.ranks):
                self.ranks.append([])
                self.layouts.append(layout)
            self.class_of.append(number)
            self.ranks[number].append(rank)
        boxes_by_tensor: dict[str, list[int]] = {}
        number_of: dict[Boxes, int] = {}
        for number, layout in enumerate(self.layouts):
            for tensor, shape in layout.global_shapes.items():
                known = self.shapes.setdefault(tensor, shape)
                # The identity test comes first because most layouts share the tuples,
                # and there are many of them.
                if known is not shape and known != shape:
                    self.disagreements.append(
                        f"{tensor}: ranks of one side say {known} and {shape} of its shape"
                    )
            # `by_tensor` would be cached by every layout, though it is needed for few.
            boxes_of: dict[str, Boxes] = {}
            for tensor, box, _, _ in layout.pieces:
                boxes_of[tensor] = (
                    (*boxes_of[tensor], box) if tensor in boxes_of else (box,)
                )
            for tensor, boxes in boxes_of.items():
                # A flat list saves one tuple per class and tensor, of which a large job
                # has millions.
                boxes_by_tensor.setdefault(tensor, []).extend(
                    (number, number_of.setdefault(boxes, len(number_of)))
                )
        self.boxes = list(number_of)
        self.held = {
            tensor: tuple(classes) for tensor, classes in boxes_by_tensor.items()
        }

    def holding(self, classes: tuple[int, ...]) -> Iterator[tuple[int, Boxes]]:
        """Yield the classes of an entry of `held` with their boxes."""
        for number, boxes in zip(classes[::2], classes[1::2], strict=True):
            yield number, self.boxes[boxes]


@dataclass(frozen=True)
class ShardSet:
    """Boxes of a tensor that exactly these classes of the source hold. The boxes are disjoint."""

    classes: tuple[int, ...]
    cells: Boxes


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that the same classes hold in the same boxes and the same classes want in the same boxes.

    Attributes:
        tensors: names, in the order of the source's layouts.
        shards: all held elements, grouped by their holders.
        wanted: class of the destination -> shard set -> number of elements that it wants of it.
        missing: class of the destination -> a box that it wants and no rank holds.
    """

    tensors: list[str]
    shards: tuple[ShardSet, ...]
    wanted: Mapping[int, Mapping[int, int]]
    missing: Mapping[int, Box]


def group_tensors(source: RankLayouts, dest: RankLayouts) -> list[TensorGroup]:
    """Return the groups of all tensors that both sides have and the destination wants."""
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for tensor in source.shapes:
        if tensor in dest.held:
            # Layers of a model are laid out alike, so a model of thousands of tensors
            # has a few dozen groups, and the geometry is computed once for each.
            alike.setdefault(
                (source.held.get(tensor, ()), dest.held[tensor]), []
            ).append(tensor)
    return [
        _group(source, dest, *holders, tensors) for holders, tensors in alike.items()
    ]


def _group(
    source: RankLayouts,
    dest: RankLayouts,
    held: tuple[int, ...],
    wanted_by: tuple[int, ...],
    tensors: list[str],
) -> TensorGroup:
    """Return the group of tensors that are held and wanted alike."""
    shards = _shard_sets(source, held)
    # All held cells in one list, so that a single index finds those that a wanted box
    # meets.
    cells = [
        (number, cell)
        for number, shard_set in enumerate(shards)
        for cell in shard_set.cells
    ]
    index = BoxIndex([cell for _, cell in cells])
    wanted: dict[int, dict[int, int]] = {}
    missing: dict[int, Box] = {}
    # Many classes want the same boxes, and the intersections are computed once.
    seen: dict[Boxes, tuple[dict[int, int], Box | None]] = {}
    for number, boxes in dest.holding(wanted_by):
        if boxes not in seen:
            amounts: dict[int, int] = {}
            unheld = None
            for box in boxes:
                # Cells are disjoint, so that the intersections can be counted one by
                # one.
                rest = box.numel
                met = list(index.meeting(box))
                for cell, common in met:
                    shard_set = cells[cell][0]
                    amounts[shard_set] = amounts.get(shard_set, 0) + common.numel
                    rest -= common.numel
                if rest:
                    # One missing box per class is enough for the error message.
                    unheld = subtract_all(box, [common for _, common in met])[0]
            seen[boxes] = amounts, unheld
        wanted[number], unheld = seen[boxes]
        if unheld is not None:
            missing[number] = unheld
    return TensorGroup(tensors, shards, wanted, missing)


def _shard_sets(source: RankLayouts, held: tuple[int, ...]) -> tuple[ShardSet, ...]:
    """Return all held elements of a tensor, grouped by their holders."""
    return group_by_classes(source.holding(held))


def group_by_classes(boxes_of: Iterable[tuple[int, Boxes]]) -> tuple[ShardSet, ...]:
    """Return all elements of these boxes, grouped by the classes that have them.

    Args:
        boxes_of: (class, its boxes of one tensor).
    """
    holders: dict[Box, set[int]] = {}
    for number, boxes in boxes_of:
        for box in boxes:
            holders.setdefault(box, set()).add(number)
    cells = list(holders.items())
    # Equal boxes of replicas are already grouped, under one key of `holders`. Boxes that
    # overlap only in part are rare.
    if first_overlap(list(holders)) is not None:
        cells = _disjoint(cells)
    by_classes: dict[tuple[int, ...], list[Box]] = {}
    for cell, classes in cells:
        by_classes.setdefault(tuple(sorted(classes)), []).append(cell)
    return tuple(
        ShardSet(classes, tuple(sorted(boxes)))
        for classes, boxes in sorted(by_classes.items())
    )


def _disjoint(holders: list[tuple[Box, set[int]]]) -> list[tuple[Box, set[int]]]:
    """Split overlapping boxes into disjoint cells, each with all its holders."""
    cells: list[tuple[Box, set[int]]] = []
    for box, classes in holders:
        cut: list[tuple[Box, set[int]]] = []
        for cell, others in cells:
            common = intersect(cell, box)
            if common is None:
                cut.append((cell, others))
                continue
            cut.append((common, others | classes))
            # The part outside the box keeps its holders.
            cut += [(part, others) for part in subtract(cell, box)]
        # Elements that no earlier cell covers are held by the classes of this box
        # alone.
        cells = cut + [
            (part, classes) for part in subtract_all(box, [cell for cell, _ in cells])
        ]
    return cells


class ShardRange(NamedTuple):
    """Shard set number `shards` of the tensors `low` to `high` (exclusive) of a group."""

    group: int
    low: int
    high: int
    shards: int


# Class of the destination -> (elements of a box, shard set of a group) for everything
# it wants.
WantedShards = Mapping[int, Sequence[tuple[int, ShardRange]]]


class Deal:
    """Assignment of requests of one size to a pool of holders.

    The requests form a line, rank after rank, which is cut into equal runs, one per
    holder.

    Args:
        pool: the holders.
        start: place of the holder with the first run. If runs are not equal, holders from there on have one request
            more.
        wanted: rank -> what it requests, one request per tensor, in the order of the line.

    Attributes:
        end: place of the first holder with the fewest requests.
    """

    def __init__(
        self,
        pool: Sequence[int],
        start: int,
        wanted: Mapping[int, Sequence[ShardRange]],
    ) -> None:
        self.pool = pool
        self.start = start
        self.wanted = wanted
        self._ranks = list(wanted)
        numbers = [
            sum(part.high - part.low for part in wanted[rank]) for rank in self._ranks
        ]
        # Position in the line of each rank's first request, and the end of the line.
        self._firsts = [0, *accumulate(numbers)]
        self._place = {rank: place for place, rank in enumerate(self._ranks)}
        self._each, self._extra = divmod(self._firsts[-1], len(pool))
        self.end = (start + self._extra) % len(pool)

    def fetched(self, rank: int) -> Iterator[tuple[int, ShardRange]]:
        """Yield (holder, part) for everything that a rank receives."""
        place = self._place[rank]
        low = self._firsts[place]
        high = self._firsts[place + 1]
        while low < high:
            # The requests of a rank may span several runs: one iteration per holder.
            turn = self._turn_of(low)
            end = min(self._first_of(turn + 1), high)
            yield from self._parts(
                self.pool[(self.start + turn) % len(self.pool)], rank, low, end
            )
            low = end

    def served(self, place: int) -> Iterator[tuple[int, ShardRange]]:
        """Yield (rank, part) for everything that the holder at a place of the pool sends."""
        turn = (place - self.start) % len(self.pool)
        low = self._first_of(turn)
        high = self._first_of(turn + 1)
        while low < high:
            # The run of a holder may span several ranks: one iteration per rank.
            number = bisect_right(self._firsts, low) - 1
            end = min(self._firsts[number + 1], high)
            yield from self._parts(self._ranks[number], self._ranks[number], low, end)
            low = end

    def _parts(
        self, other: int, rank: int, low: int, high: int
    ) -> Iterator[tuple[int, ShardRange]]:
        """Yield (other, part) for the requests `low` to `high`, all of one rank."""
        first = self._firsts[self._place[rank]]
        for part in self.wanted[rank]:
            if first >= high:
                return
            start = max(low - first, 0)
            stop = min(high - first, part.high - part.low)
            if start < stop:
                yield other, part._replace(low=part.low + start, high=part.low + stop)
            first += part.high - part.low

    def _first_of(self, turn: int) -> int:
        """Return the first request of a run."""
        return turn * self._each + min(turn, self._extra)

    def _turn_of(self, request: int) -> int:
        """Return the run that contains a request."""
        # The first `_extra` runs have one request more than the others.
        longer = self._extra * (self._each + 1)
        return (
            request // (self._each + 1)
            if request < longer
            else self._extra + (request - longer) // self._each
        )


def alternating_over_nodes(
    classes: Iterable[int], source: RankLayouts, node_of: Sequence[int]
) -> list[int]:
    """Return the ranks of some classes of the source, class by class, alternating over nodes within each."""
    on_node: dict[tuple[int, int], int] = {}
    order = []
    for number in sorted(classes):
        for rank in source.ranks[number]:
            node = node_of[rank]
            nth = on_node[number, node] = on_node.get((number, node), -1) + 1
            # Sorted by class, then by the rank's number on its node, then by node:
            # neighbours in the list are on different nodes.
            order.append((number, nth, node, rank))
    return [rank for *_, rank in sorted(order)]


class Dealer:
    """All assignments for one set of holders: the ranks of some classes of the source.

    Args:
        classes: classes of the holders.
        wanted_by: everything wanted of what the holders have.
        node_of: node of each rank.
        only_near: leave out ranks without a holder on their node.
    """

    def __init__(
        self,
        classes: Iterable[int],
        wanted_by: WantedShards,
        source: RankLayouts,
        dest: RankLayouts,
        node_of: Sequence[int],
        *,
        only_near: bool = False,
    ) -> None:
        self._holders = frozenset(classes)
        self._node_of = node_of
        self._pools = self._make_pools(source)
        self._place = {
            key: {rank: i for i, rank in enumerate(pool)}
            for key, pool in self._pools.items()
        }
        self._deals: dict[int, list[Deal]] = {key: [] for key in self._pools}
        by_size: dict[int, dict[int, list[ShardRange]]] = {}
        # Requests are assigned size by size: an equal number of requests is an equal load
        # only if all have the same size.
        for number, requests in wanted_by.items():
            for size, part in requests:
                by_size.setdefault(size, {}).setdefault(number, []).append(part)
        # Large boxes first, so that smaller ones even out the remainder.
        for size in sorted(by_size, reverse=True):
            lines: dict[int, dict[int, list[ShardRange]]] = {}
            for number, parts in sorted(by_size[size].items()):
                for rank in dest.ranks[number]:
                    # Holders copy from their own memory.
                    pool = self._pool_of(rank)
                    if source.class_of[rank] not in self._holders and not (
                        only_near and pool == ANYWHERE
                    ):
                        lines.setdefault(pool, {})[rank] = parts
            for key, line in lines.items():
                earlier = self._deals[key]
                # Each deal starts where the one before ended, so that the holders with
                # one request less come first.
                earlier.append(
                    Deal(self._pools[key], earlier[-1].end if earlier else 0, line)
                )

    def _make_pools(self, source: RankLayouts) -> dict[int, list[int]]:
        """Return the holders of each node and of all nodes."""
        pools: dict[int, list[int]] = {
            ANYWHERE: alternating_over_nodes(self._holders, source, self._node_of)
        }
        for rank in pools[ANYWHERE]:
            pools.setdefault(self._node_of[rank], []).append(rank)
        return pools

    def _pool_of(self, rank: int) -> int:
        """Return the pool that serves a rank: that of its node, else the pool of all holders."""
        node = self._node_of[rank]
        return node if node in self._pools else ANYWHERE

    def fetched(self, rank: int) -> Iterator[tuple[int, ShardRange]]:
        """Yield (holder, part) for everything that `rank`, which is not a holder, receives."""
        for deal in self._deals[self._pool_of(rank)]:
            if rank in deal.wanted:
                yield from deal.fetched(rank)

    def served(self, rank: int) -> Iterator[tuple[int, ShardRange]]:
        """Yield (rank, part) for everything that the holder `rank` sends."""
        # A holder belongs to the pool of all nodes and to that of its own node.
        for key in (ANYWHERE, self._node_of[rank]):
            for deal in self._deals[key]:
                yield from deal.served(self._place[key][rank])
