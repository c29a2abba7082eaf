"""Fan-out: bring an element into each node once, and let the ranks that received it pass it on.

Without fan-out, every rank fetches what it needs from the ranks that hold it. With N
replicas on N nodes, the holders then send everything N times, and a node receives what
several of its ranks need several times. With fan-out a rank that receives an element
for itself also forwards it. No rank stores an element that it does not need.

    hop 0   holder -> root     each element goes to one rank of each region, a group of nodes
    hop 1   root -> entries    the root sends it to one rank on every other node of its region
    hop 2   entry -> ranks     a rank that brought it into its node sends it to the other ranks there that need it

Elements are dealt evenly over the roots of a region. With n nodes, a rank is the root
of 1/n of what it receives and sends that to n - 1 nodes, so it sends no more than it
receives. The depth is three hops for any number of replicas, where a chain through the
replicas would have one hop each. Holders feed as many regions as their links allow;
with one region for each node no element is forwarded between nodes.

All weights are cut into chunks, whose hops overlap, so that the time is that of the
busiest link:

    chunk 0    hop 0    hop 1    hop 2
    chunk 1             hop 0    hop 1    hop 2
    chunk 2                      hop 0    hop 1    hop 2

Nodes with a holder are served by it, and need no fan-out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

from megaverl.sharding.boxes import Box, intersect
from megaverl.sharding.load_balance import (
    RankLayouts,
    ShardRange,
    ShardSet,
    TensorGroup,
    alternating_over_nodes,
    group_by_classes,
)

HOPS = 3
# The hops of a chunk overlap with those of other chunks, so that links carry data all
# the time.
CHUNKS = 64
# (chunk, hop) in the order in which all ranks go through them: the hops of one chunk
# after each other.
ORDER = [
    (step - hop, hop)
    for step in range(CHUNKS + HOPS - 1)
    for hop in range(HOPS)
    if 0 <= step - hop < CHUNKS
]
# Links inside a node are about this many times as fast as those between nodes (NVLink
# 4: 450 GB/s, adapters: 50 GB/s).
NODE_SPEED = 9
# The busiest link must have this many times less to carry with fan-out, else every rank
# fetches for itself.
PAYS = 1.1
# The busiest sender may carry this many times what the busiest receiver receives.
MOST_SENT = 1.1
# Each root's share is cut into about this many units, so that shares differ by less
# than a tenth.
UNITS_PER_SHARE = 64
# Units are no smaller, because small messages do not reach a link's bandwidth.
LEAST_UNIT = 32 * 1024

NUMBER = {place: number for number, place in enumerate(ORDER)}


class Atom(NamedTuple):
    """Boxes of a tensor that the same classes hold and the same classes want on nodes without a holder.

    Attributes:
        holders: classes of the source.
        group: number of the tensor's group.
        nodes: nodes of all wanters.
        wanters: classes of the destination.
    """

    holders: tuple[int, ...]
    group: int
    nodes: tuple[int, ...]
    wanters: tuple[int, ...]
    cells: tuple[Box, ...]


class FanOutItem(NamedTuple):
    """Boxes of the same tensors, in units that can be dealt one by one, as far as they belong to one chunk.

    Unit number q is part `q % num_parts` of tensor `q // num_parts`.

    Attributes:
        group: number of the group.
        first_part: number of the first part among the shard sets of the group in `FanOut.groups`.
        num_parts: number of parts that each tensor is cut into.
        low, high: units of the chunk.
        size: elements of all parts of one tensor.
        start: position of the item among all that is dealt over roots, in elements.
        held_start: position among all that its holders send.
        holders: classes of the holders.
        chunk: number of the chunk.
    """

    group: int
    first_part: int
    num_parts: int
    low: int
    high: int
    size: int
    start: int
    held_start: int
    holders: tuple[int, ...]
    chunk: int

    @property
    def numel(self) -> int:
        """Elements of all units, up to rounding."""
        return self.size * (self.high - self.low) // self.num_parts

    def first_unit(self, place: int, offset: int, places: int, total: int) -> int:
        """Return the first unit whose middle lies at or behind `total * place / places`.

        Args:
            offset: position of the item.
        """
        numerator = (
            total * place - offset * places
        ) * 2 * self.num_parts - self.size * places
        unit = -(-numerator // (2 * self.size * places))
        return min(max(self.low + unit, self.low), self.high)

    def ranges(self, low: int, high: int) -> Iterator[ShardRange]:
        """Yield the units `low` to `high` (exclusive) as ranges of tensors."""
        first, part = divmod(low, self.num_parts)
        last, end = divmod(high, self.num_parts)
        if first == last:
            yield from self._parts(first, first + 1, part, end)
            return
        if part:
            yield from self._parts(first, first + 1, part, self.num_parts)
            first += 1
        if first < last:
            yield from self._parts(first, last, 0, self.num_parts)
        if end:
            yield from self._parts(last, last + 1, 0, end)

    def _parts(
        self, low: int, high: int, first: int, last: int
    ) -> Iterator[ShardRange]:
        for part in range(first, last):
            yield ShardRange(self.group, low, high, self.first_part + part)


class Slot(NamedTuple):
    """Root in a region: the wanter number `wanter` on node number `node`."""

    node: int
    wanter: int


class FanOutRun(NamedTuple):
    """Units of an item that have the same root."""

    item: FanOutItem
    low: int
    high: int
    root: Slot


@dataclass
class Line:
    """Everything that the same ranks want and nobody on their nodes holds.

    Attributes:
        nodes: nodes of these ranks.
        wanters: node -> these ranks on it.
        regions: groups of `nodes`, each fed once by the holders.
        chunks: items of each chunk.
        totals: number of elements of each chunk.
    """

    nodes: tuple[int, ...]
    wanters: Mapping[int, tuple[int, ...]]
    regions: list[tuple[int, ...]] = field(default_factory=list)
    chunks: list[list[FanOutItem]] = field(
        default_factory=lambda: [[] for _ in range(CHUNKS)]
    )
    totals: list[int] = field(default_factory=lambda: [0] * CHUNKS)

    @property
    def items(self) -> Iterator[FanOutItem]:
        """All items."""
        return (item for items in self.chunks for item in items)

    def region_of(self, node: int) -> int:
        """Return the number of the region that contains a node."""
        return next(
            number for number, nodes in enumerate(self.regions) if node in nodes
        )

    def root(self, region: int, slot: Slot) -> int:
        """Return the rank of a root in the region of this number."""
        return self.wanters[self.regions[region][slot.node]][slot.wanter]

    def runs(self, region: Sequence[int]) -> Iterator[FanOutRun]:
        """Yield all units with their roots. Every wanter of the region is the root of an equal share."""
        slots = [
            Slot(number, wanter)
            for number, node in enumerate(region)
            for wanter in range(len(self.wanters[node]))
        ]
        for number, (items, total) in enumerate(
            zip(self.chunks, self.totals, strict=True)
        ):
            # Chunks begin with different roots, so that rounding does not favour the
            # same ones each time.
            shift = number * len(slots) // CHUNKS
            turned = slots[shift:] + slots[:shift]
            slot = 0
            for item in items:
                low = item.low
                while low < item.high:
                    last = slot == len(slots) - 1
                    high = (
                        item.high
                        if last
                        else item.first_unit(slot + 1, item.start, len(slots), total)
                    )
                    if low < high:
                        yield FanOutRun(item, low, high, turned[slot])
                        low = high
                    if low < item.high:
                        slot += 1

    def entry(self, node: int, root: Slot) -> int:
        """Return the rank through which a root's units enter a node of its region. On its own node it is the root."""
        ranks = self.wanters[node]
        return ranks[root.wanter % len(ranks)]


@dataclass
class HolderSet:
    """Ranks that hold the same elements, and how many elements of each chunk they send to one region."""

    ranks: list[int]
    totals: list[int] = field(default_factory=lambda: [0] * CHUNKS)

    def serving(
        self, run: FanOutRun, region: int, num_regions: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (holder, low, high) for the units of a run in one region."""
        item = run.item
        low = run.low
        number = len(self.ranks)
        total = self.totals[item.chunk]
        # Regions start at different holders, so that one holder's units go to few
        # roots, and so do chunks.
        shift = region * number // num_regions + item.chunk * number // CHUNKS
        for place in range(item.held_start * number // total, number):
            last = place == number - 1
            high = (
                run.high
                if last
                else min(
                    run.high, item.first_unit(place + 1, item.held_start, number, total)
                )
            )
            if low < high:
                yield self.ranks[(place + shift) % number], low, high
                low = high
            if low == run.high:
                return


WantedShards = Mapping[tuple[int, ...], Mapping[int, Sequence[tuple[int, ShardRange]]]]
# Parts of what a rank sends or receives: peer -> ranges, for each entry of ORDER.
ByHop = tuple[dict[int, list[ShardRange]], ...]
# Id of a line, and how many ranks of each node of a region want it.
RegionShape = tuple[int, tuple[int, ...]]


class Loads(NamedTuple):
    """Elements that cross the links between nodes, by rank."""

    sent: list[float]
    received: list[float]

    @property
    def busiest(self) -> float:
        """Elements of the busiest link in either direction."""
        return max(*self.sent, *self.received)


def direct_loads(
    wanted_by: WantedShards,
    source: RankLayouts,
    dest: RankLayouts,
    node_of: Sequence[int],
) -> Loads:
    """Return the loads if every rank fetches what its node lacks, evenly from all that hold it."""
    sent = [0.0] * len(node_of)
    # Holder sets on the same nodes serve the same ranks, so their sums are enough.
    by_nodes: dict[frozenset[int], dict[int, int]] = {}
    num_remote: dict[tuple[frozenset[int], int], int] = {}
    for classes, requests in wanted_by.items():
        holders = [rank for number in classes for rank in source.ranks[number]]
        near = frozenset(node_of[rank] for rank in holders)
        amounts = by_nodes.setdefault(near, {})
        total = 0
        for number, parts in requests.items():
            amount = sum(size * (part.high - part.low) for size, part in parts)
            amounts[number] = amounts.get(number, 0) + amount
            if (near, number) not in num_remote:
                num_remote[near, number] = sum(
                    node_of[rank] not in near for rank in dest.ranks[number]
                )
            total += amount * num_remote[near, number]
        if total:
            for rank in holders:
                sent[rank] += total / len(holders)
    received = [0.0] * len(node_of)
    for near, amounts in by_nodes.items():
        for number, amount in amounts.items():
            for rank in dest.ranks[number]:
                if node_of[rank] not in near:
                    received[rank] += amount
    return Loads(sent, received)


class FanOut:
    """Fan-out of everything that crosses links between nodes, computed alike on every rank.

    Attributes:
        groups: the planner's groups, with the dealt parts of their boxes as shard sets.
        loads: elements on each rank's links between nodes.
    """

    def __init__(
        self,
        groups: Sequence[TensorGroup],
        source: RankLayouts,
        dest: RankLayouts,
        node_of: Sequence[int],
    ) -> None:
        self._source, self._dest, self._node_of = source, dest, node_of
        self._lines: dict[tuple[tuple[int, ...], tuple[int, ...]], Line] = {}
        self._holders: dict[tuple[int, ...], HolderSet] = {}
        self._nodes_of_class = [
            {node: tuple(ranks) for node, ranks in _by_node(ranks, node_of).items()}
            for ranks in dest.ranks
        ]
        atoms = self._atoms(groups)
        parts: list[list[ShardSet]] = [[] for _ in groups]
        self._deal(groups, atoms, parts)
        self.groups = [
            replace(group, shards=tuple(sets))
            for group, sets in zip(groups, parts, strict=True)
        ]
        self.loads = self._divide_into_regions()
        self._lines_of_class: dict[int, list[Line]] = {}
        for (classes, _), line in self._lines.items():
            for number in classes:
                self._lines_of_class.setdefault(number, []).append(line)
        # (id of an item, first unit, end) -> ranges of tensors. Lines keep their items
        # alive, so the ids stay unique.
        self._ranges: dict[tuple[int, int, int], tuple[ShardRange, ...]] = {}
        # Elements of the shard sets of a group before each of them, and of all at the
        # end.
        self._before = [
            [0, *accumulate(sum(cell.numel for cell in part.cells) for part in sets)]
            for sets in parts
        ]
        self._runs: dict[RegionShape, dict[tuple[int, ...], list[FanOutRun]]] = {}
        self._numels: dict[RegionShape, dict[Slot, int]] = {}

    def _atoms(self, groups: Sequence[TensorGroup]) -> list[Atom]:
        """Return what no node of the wanters holds, in boxes that the same classes want."""
        atoms = []
        for number, group in enumerate(groups):
            boxes_of = dict(self._dest.holding(self._dest.held[group.tensors[0]]))
            for place, shard_set in enumerate(group.shards):
                near = frozenset(
                    self._node_of[r]
                    for c in shard_set.classes
                    for r in self._source.ranks[c]
                )
                wanted = []
                far: set[int] = set()
                for c, amounts in group.wanted.items():
                    if place not in amounts:
                        continue
                    far_nodes = [
                        node for node in self._nodes_of_class[c] if node not in near
                    ]
                    if not far_nodes:
                        continue
                    far.update(far_nodes)
                    common = (
                        intersect(cell, box)
                        for cell in shard_set.cells
                        for box in boxes_of[c]
                    )
                    wanted.append((c, tuple(box for box in common if box is not None)))
                nodes = tuple(sorted(far))
                atoms += [
                    Atom(shard_set.classes, number, nodes, atom.classes, atom.cells)
                    for atom in group_by_classes(wanted)
                ]
        return atoms

    def _deal(
        self,
        groups: Sequence[TensorGroup],
        atoms: Sequence[Atom],
        parts: list[list[ShardSet]],
    ) -> None:
        """Cut the boxes into units, and append them to lines and to what their holders send."""
        sizes = [sum(cell.numel for cell in atom.cells) for atom in atoms]
        totals: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for atom, size in zip(atoms, sizes, strict=True):
            key = (atom.wanters, atom.nodes)
            totals[key] = totals.get(key, 0) + size * len(groups[atom.group].tensors)
        for number, (atom, size) in enumerate(zip(atoms, sizes, strict=True)):
            key = (atom.wanters, atom.nodes)
            if key not in self._lines:
                wanters = self._wanters(*key)
                self._lines[key] = Line(tuple(wanters), wanters)
            line = self._lines[key]
            num_wanters = sum(map(len, line.wanters.values()))
            unit = max(LEAST_UNIT, totals[key] // (num_wanters * UNITS_PER_SHARE))
            cut = _cut(atom.cells, -(-size // unit))
            if atom.holders not in self._holders:
                ranks = alternating_over_nodes(
                    atom.holders, self._source, self._node_of
                )
                self._holders[atom.holders] = HolderSet(ranks)
            held = self._holders[atom.holders]
            units, first = (
                len(groups[atom.group].tensors) * len(cut),
                len(parts[atom.group]),
            )
            for place in range(CHUNKS):
                low, high = (units * bound // CHUNKS for bound in (place, place + 1))
                if low == high:
                    continue
                # Small items would all end in the last chunk if each began with the
                # first.
                chunk = (place + number) % CHUNKS
                start, held_start = line.totals[chunk], held.totals[chunk]
                item = FanOutItem(
                    atom.group,
                    first,
                    len(cut),
                    low,
                    high,
                    size,
                    start,
                    held_start,
                    atom.holders,
                    chunk,
                )
                line.chunks[chunk].append(item)
                line.totals[chunk] += item.numel
                held.totals[chunk] += item.numel
            parts[atom.group] += [ShardSet(atom.holders, cells) for cells in cut]

    def _wanters(
        self, classes: tuple[int, ...], nodes: tuple[int, ...]
    ) -> dict[int, tuple[int, ...]]:
        """Return node -> ranks of these classes, for those of the nodes that have any."""
        ranks = {
            node: tuple(
                sorted(
                    r for c in classes for r in self._nodes_of_class[c].get(node, ())
                )
            )
            for node in nodes
        }
        return {node: on_node for node, on_node in ranks.items() if on_node}

    def _divide_into_regions(self) -> Loads:
        """Choose the largest number of regions that the holders' links can feed, and return the loads."""
        world = len(self._node_of)
        once, received = [0.0] * world, [0.0] * world
        for held in self._holders.values():
            for rank in held.ranks:
                once[rank] += sum(held.totals) / len(held.ranks)
        most = max((len(line.nodes) for line in self._lines.values()), default=1)
        for line in self._lines.values():
            for ranks in line.wanters.values():
                for rank in ranks:
                    received[rank] += sum(line.totals) / len(ranks)
        allowed = MOST_SENT * max(received)
        number = most
        for rank in range(world):
            # With d of n nodes fed by holders, a rank sends d times what it holds and
            # forwards 1 - d / n of what it receives.
            more = once[rank] - received[rank] / most
            if more > 0:
                number = min(number, max(1, int((allowed - received[rank]) / more)))
        sent = [0.0] * world
        for line in self._lines.values():
            count = min(number, len(line.nodes))
            bounds = [len(line.nodes) * place // count for place in range(count + 1)]
            line.regions = [
                line.nodes[a:b] for a, b in zip(bounds, bounds[1:], strict=False)
            ]
            of_holders: dict[tuple[int, ...], int] = {}
            for item in line.items:
                of_holders[item.holders] = of_holders.get(item.holders, 0) + item.numel
            for classes, numel in of_holders.items():
                held = self._holders[classes]
                for rank in held.ranks:
                    sent[rank] += count * numel / len(held.ranks)
            for region in line.regions:
                slots = sum(len(line.wanters[node]) for node in region)
                for node in region:
                    for rank in line.wanters[node]:
                        sent[rank] += (len(region) - 1) * sum(line.totals) / slots
        return Loads(sent, received)

    def _runs_in(
        self, line: Line, number: int
    ) -> dict[tuple[int, ...], list[FanOutRun]]:
        """Return holders -> runs of a region, computed once for regions with as many wanters on each node."""
        key = self._shape_of(line, number)
        if key not in self._runs:
            by_holders: dict[tuple[int, ...], list[FanOutRun]] = {}
            for run in line.runs(line.regions[number]):
                by_holders.setdefault(run.item.holders, []).append(run)
            self._runs[key] = by_holders
        return self._runs[key]

    def _shape_of(self, line: Line, number: int) -> RegionShape:
        """Return what regions have in common whose units have the same roots."""
        region = line.regions[number]
        return id(line), tuple(len(line.wanters[node]) for node in region)

    def parts(self, rank: int) -> tuple[ByHop, ByHop]:
        """Return what a rank receives and what it sends, by hop and peer."""
        incoming: ByHop = tuple({} for _ in ORDER)
        outgoing: ByHop = tuple({} for _ in ORDER)
        for sends, hop, peer, item, low, high in self._moves(rank):
            by_peer = (outgoing if sends else incoming)[NUMBER[item.chunk, hop]]
            # All ranks of a node, and all hops, ask for the same units of an item.
            key = id(item), low, high
            ranges = self._ranges.get(key)
            if ranges is None:
                ranges = self._ranges[key] = tuple(item.ranges(low, high))
            by_peer.setdefault(peer, []).extend(ranges)
        return incoming, outgoing

    def volume(self, rank: int) -> tuple[dict[int, int], dict[int, int]]:
        """Return the elements that a rank receives and sends, by peer. Counts units without listing their parts."""
        from_holders, to_roots = self._first_hops
        received = dict(from_holders.get(rank, {}))
        sent = dict(to_roots.get(rank, {}))
        for line, number in self._regions_of(rank):
            for root, numel in self._numel_by_root(line, number).items():
                for sends, _, peer in self._later_hops(rank, line, number, root):
                    totals = sent if sends else received
                    totals[peer] = totals.get(peer, 0) + numel
        return received, sent

    def peers(self, rank: int) -> set[int]:
        """Return the ranks that a rank exchanges something with."""
        received, sent = self.volume(rank)
        return {*received, *sent}

    @cached_property
    def _first_hops(
        self,
    ) -> tuple[dict[int, dict[int, int]], dict[int, dict[int, int]]]:
        """Elements of hop 0: root -> holder -> number, and holder -> root -> number.

        They are counted for all ranks together. Rank by rank, every unit would be looked
        at once for each of its holders.
        """
        received: dict[int, dict[int, int]] = {}
        sent: dict[int, dict[int, int]] = {}
        for line in self._lines.values():
            for number in range(len(line.regions)):
                for classes, runs in self._runs_in(line, number).items():
                    for run in runs:
                        root = line.root(number, run.root)
                        for holder, low, high in self._holders[classes].serving(
                            run, number, len(line.regions)
                        ):
                            numel = self._numel(run.item, low, high)
                            of_root = received.setdefault(root, {})
                            of_root[holder] = of_root.get(holder, 0) + numel
                            of_holder = sent.setdefault(holder, {})
                            of_holder[root] = of_holder.get(root, 0) + numel
        return received, sent

    def _numel_by_root(self, line: Line, number: int) -> dict[Slot, int]:
        """Return the elements that each root of a region forwards, computed once for regions that share their runs."""
        key = self._shape_of(line, number)
        if key not in self._numels:
            totals: dict[Slot, int] = {}
            for run in chain.from_iterable(self._runs_in(line, number).values()):
                numel = self._numel(run.item, run.low, run.high)
                totals[run.root] = totals.get(run.root, 0) + numel
            self._numels[key] = totals
        return self._numels[key]

    def _numel(self, item: FanOutItem, low: int, high: int) -> int:
        """Return the elements of an item's units from `low` to `high` (exclusive)."""
        return self._before_unit(item, high) - self._before_unit(item, low)

    def _before_unit(self, item: FanOutItem, unit: int) -> int:
        """Return the elements of an item's units before one of them."""
        tensors, part = divmod(unit, item.num_parts)
        before = self._before[item.group]
        return (
            tensors * item.size
            + before[item.first_part + part]
            - before[item.first_part]
        )

    def _moves(
        self, rank: int
    ) -> Iterator[tuple[bool, int, int, FanOutItem, int, int]]:
        """Yield (whether the rank sends it, hop, peer, item, first unit, end) for all that a rank exchanges."""
        source_class = self._source.class_of[rank]
        for line in self._lines.values():
            for number in range(len(line.regions)):
                for classes, runs in self._runs_in(line, number).items():
                    if source_class not in classes:
                        continue
                    held = self._holders[classes]
                    for run in runs:
                        root = line.root(number, run.root)
                        for holder, low, high in held.serving(
                            run, number, len(line.regions)
                        ):
                            if holder == rank:
                                yield True, 0, root, run.item, low, high
        for line, number in self._regions_of(rank):
            for run in chain.from_iterable(self._runs_in(line, number).values()):
                item = run.item
                if rank == line.root(number, run.root):
                    held = self._holders[item.holders]
                    for holder, a, b in held.serving(run, number, len(line.regions)):
                        yield False, 0, holder, item, a, b
                for sends, hop, peer in self._later_hops(rank, line, number, run.root):
                    yield sends, hop, peer, item, run.low, run.high

    def _regions_of(self, rank: int) -> Iterator[tuple[Line, int]]:
        """Yield every line that a rank receives, with the number of the rank's region."""
        node = self._node_of[rank]
        for line in self._lines_of_class.get(self._dest.class_of[rank], ()):
            if node in line.wanters:
                yield line, line.region_of(node)

    def _later_hops(
        self, rank: int, line: Line, number: int, slot: Slot
    ) -> Iterator[tuple[bool, int, int]]:
        """Yield (whether the rank sends it, hop, peer) of hops 1 and 2, for everything with the same root."""
        region, node = line.regions[number], self._node_of[rank]
        root, root_node = line.root(number, slot), region[slot.node]
        entry = line.entry(node, slot)
        if rank == root:
            for other in region:
                if other != root_node:
                    yield True, 1, line.entry(other, slot)
        elif rank == entry:
            yield False, 1, root
        if rank == entry:
            for neighbour in line.wanters[node]:
                if neighbour != rank:
                    yield True, 2, neighbour
        else:
            yield False, 2, entry

    @property
    def copies(self) -> float:
        """Copies of an element that holders send to other nodes, as a mean over the elements."""
        return self._mean(lambda line: len(line.regions))

    @property
    def copies_without(self) -> float:
        """Copies that holders would send if every rank fetched its own."""
        return self._mean(lambda line: sum(map(len, line.wanters.values())))

    def _mean(self, number_of: Callable[[Line], int]) -> float:
        lines = self._lines.values()
        total = sum(sum(line.totals) for line in lines)
        return (
            sum(sum(line.totals) * number_of(line) for line in lines) / total
            if total
            else 0.0
        )


def _by_node(ranks: Sequence[int], node_of: Sequence[int]) -> dict[int, list[int]]:
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(node_of[rank], []).append(rank)
    return by_node


def _cut(cells: Sequence[Box], number: int) -> list[tuple[Box, ...]]:
    """Cut boxes into at most `number` parts of nearly equal size.

    Every box is cut along its slowest axis that is long enough, so that parts are as
    contiguous as they can be.
    """
    number = max(1, min(number, *(max(cell.shape, default=1) for cell in cells)))
    if number == 1:
        return [tuple(cells)]
    parts: list[list[Box]] = [[] for _ in range(number)]
    for cell in cells:
        enough = [axis for axis, size in enumerate(cell.shape) if size >= number]
        axis = enough[0]
        low, size = cell.start[axis], cell.shape[axis]
        # Rounded like this, any run of parts has its share of the rows, up to one row.
        bounds = [low + size * part // number for part in range(number + 1)]
        for part, start, stop in zip(parts, bounds, bounds[1:], strict=False):
            part.append(
                Box(
                    (*cell.start[:axis], start, *cell.start[axis + 1 :]),
                    (*cell.stop[:axis], stop, *cell.stop[axis + 1 :]),
                )
            )
    return [tuple(part) for part in parts]
