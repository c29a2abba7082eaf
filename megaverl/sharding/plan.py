"""Plans: the intersection of a source and a destination layout, from the point of view of one rank.

Every rank computes its own plan by arithmetic alone. The rules are the same everywhere,
so the sends of one rank are the receives of another without communication. A rank
copies what it holds itself. The rest comes from a holder on its node, else from any
holder, balanced as `load_balance` describes. With fan-out, ranks also forward what they
received (`fan_out`).

    rank 0: plan.sends[1]    = (A, B)
    rank 1: plan.receives[0] = (A, B)    same transfers, same order
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple, overload

from megaverl.errors import ReshardError
from megaverl.sharding.boxes import (
    Box,
    carry,
    contains,
    intersect,
    join,
    same_up_to_ones,
)
from megaverl.sharding.fan_out import (
    NODE_SPEED,
    NUMBER,
    ORDER,
    PAYS,
    FanOut,
    Loads,
    direct_loads,
)
from megaverl.sharding.layout import Layout, Piece
from megaverl.sharding.load_balance import (
    Dealer,
    RankLayouts,
    ShardRange,
    TensorGroup,
    group_tensors,
)
from megaverl.sharding.weight import listed

MAX_NAMED = 8

Layouts = Callable[[int], Layout]
NodeOf = Callable[[int], int]


class Transfer(NamedTuple):
    """One box of a global tensor, from a local tensor of `source` to a local tensor of `dest`."""

    tensor: str
    box: Box
    source: int
    source_local: str
    source_box: Box
    dest: int
    dest_local: str
    dest_box: Box


class Hop(NamedTuple):
    """Boxes that a rank sends to and receives from each peer in one hop of a fan-out.

    Attributes:
        after: number of the hop among `Plan.relays` that brings what this one forwards. The rank that forwards a box
            reads it from the destination's tensors: `Transfer.source_local` and `source_box` are places in the
            destination layout. None: boxes are read from the source's tensors.
    """

    sends: dict[int, tuple[Transfer, ...]]
    receives: dict[int, tuple[Transfer, ...]]
    after: int | None = None


@dataclass(frozen=True)
class Plan:
    """Work of one rank: copies within itself, and what it sends to and receives from each peer.

    The lists for a pair of ranks have the same order on both sides.

    Attributes:
        sends, receives: what goes directly from holders to ranks that do not forward it.
        relays: hops of a fan-out, in the order in which all ranks go through them; empty without fan-out.
    """

    rank: int
    world: int
    source_layout: Layout
    dest_layout: Layout
    copies: tuple[Transfer, ...]
    sends: dict[int, tuple[Transfer, ...]]
    receives: dict[int, tuple[Transfer, ...]]
    relays: tuple[Hop, ...] = ()

    def only(self, wanted: Callable[[str], bool]) -> Plan:
        """Return the part of the plan for weights whose global names satisfy `wanted`."""

        def kept(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
            return tuple(transfer for transfer in transfers if wanted(transfer.tensor))

        def by_peer(
            lists: Mapping[int, tuple[Transfer, ...]],
        ) -> dict[int, tuple[Transfer, ...]]:
            return {
                peer: left
                for peer, transfers in lists.items()
                if (left := kept(transfers))
            }

        return replace(
            self,
            copies=kept(self.copies),
            sends=by_peer(self.sends),
            receives=by_peer(self.receives),
            relays=tuple(
                Hop(by_peer(hop.sends), by_peer(hop.receives), hop.after)
                for hop in self.relays
            ),
        )

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Everything between ranks, in order."""
        return Hop(self.sends, self.receives), *self.relays

    @property
    def travels(self) -> bool:
        """Return whether this rank sends or receives anything."""
        return any(hop.sends or hop.receives for hop in self.hops)

    @property
    def num_received(self) -> int:
        """Number of elements that come from other ranks."""
        return sum(_count(hop.receives.values()) for hop in self.hops)

    @property
    def num_sent(self) -> int:
        """Number of elements that go to other ranks."""
        return sum(_count(hop.sends.values()) for hop in self.hops)


def make_plan(
    source_layouts: Layouts,
    dest_layouts: Layouts,
    world: int,
    rank: int,
    node_of: NodeOf | None = None,
    *,
    allow_unused: bool = False,
    fan_out: bool = False,
) -> Plan:
    """Return the plan of `rank`, where rank r holds `source_layouts(r)` and needs `dest_layouts(r)`.

    Each element comes once, from the nearest holder: the rank itself, else one on its
    node, else any. Equally near holders share the work evenly.

    Args:
        source_layouts, dest_layouts: must give equal layouts for equal arguments on every rank. Ranks that hold the
            same should share one object, since the work grows with the number of distinct objects.
        world: number of ranks.
        node_of: node of a rank. None: all on one node.
        allow_unused: the source may have tensors that the destination lacks.
        fan_out: bring each element into a node once and let ranks forward it, if that relieves the busiest link between
            nodes.

    Raises:
        ReshardError: a tensor is on one side only, global shapes differ, or no rank holds some elements. Names every
            such tensor.
    """
    plans = make_plans(
        source_layouts,
        dest_layouts,
        world,
        node_of,
        allow_unused=allow_unused,
        fan_out=fan_out,
    )
    return plans[rank]


def make_plans(
    source_layouts: Layouts,
    dest_layouts: Layouts,
    world: int,
    node_of: NodeOf | None = None,
    *,
    allow_unused: bool = False,
    fan_out: bool = False,
) -> Plans:
    """Return the plans of all ranks, each computed when it is accessed and not kept.

    For arguments and errors, see `make_plan`.
    """
    # Plans consist of millions of small tuples without cycles, which the collector
    # would scan again and again.
    with _collector_at_rest():
        return Plans(
            source_layouts,
            dest_layouts,
            world,
            node_of or (lambda _: 0),
            allow_unused,
            fan_out,
        )


def intersect_layouts(source: Layout, dest: Layout) -> list[Transfer]:
    """Return merged copies that fill `dest` from `source` in one place (a folder, one process).

    Raises:
        ReshardError: `source` lacks elements of `dest`.
    """
    return list(
        make_plans(lambda _: source, lambda _: dest, 1, allow_unused=True)[0].copies
    )


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Disable garbage collection inside.

    Layouts and plans are hundreds of thousands of tuples without cycles. Scanning them
    repeatedly while they grow would take a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Row(NamedTuple):
    """Transfer of one tensor between any rank of a source class and any rank of a destination class."""

    tensor: str
    box: Box
    source_local: str
    source_box: Box
    dest_local: str
    dest_box: Box


class Volume(NamedTuple):
    """Numbers of elements in one rank's plan.

    Attributes:
        copied: elements that the rank copies within itself.
        received: peer -> elements received from it.
        sent: peer -> elements sent to it.
    """

    copied: int
    received: dict[int, int]
    sent: dict[int, int]


class Plans(Sequence[Plan]):
    """Sequence of all ranks' plans, computed on access from tables that all ranks share.

    Attributes:
        fan_out: how elements are forwarded; None if every rank fetches all that it needs from ranks that hold it.
        direct: loads of the links between nodes without fan-out; None if no fan-out was asked for.
    """

    def __init__(
        self,
        source_layouts: Layouts,
        dest_layouts: Layouts,
        world: int,
        node_of: NodeOf,
        allow_unused: bool,
        fan_out: bool,
    ) -> None:
        self._world = world
        self._source = RankLayouts(source_layouts, world)
        self._dest = RankLayouts(dest_layouts, world)
        nodes: dict[int, int] = {}
        # Nodes are renumbered from 0, so that they can index lists.
        self._node_of = [
            nodes.setdefault(node_of(rank), len(nodes)) for rank in range(world)
        ]
        self._refuse_mismatch(allow_unused)
        self._groups = group_tensors(self._source, self._dest)
        self._refuse_missing()
        # Set of holder classes -> class of the destination -> what it wants of them.
        self._asked: dict[tuple[int, ...], dict[int, list[tuple[int, ShardRange]]]] = {}
        for number, group in enumerate(self._groups):
            for dest_class, amounts in group.wanted.items():
                for shards, size in amounts.items():
                    part = ShardRange(number, 0, len(group.tensors), shards)
                    amounts_by_dest = self._asked.setdefault(
                        group.shards[shards].classes, {}
                    )
                    amounts_by_dest.setdefault(dest_class, []).append((size, part))
        self.direct: Loads | None = None
        # On a single node there are no links that fan-out could relieve.
        self.fan_out = self._make_fan_out() if fan_out and len(nodes) > 1 else None
        # Indexes by class, so that the plan of one rank touches only the sets of
        # holders that concern it.
        self._gives: list[list[tuple[int, ...]]] = [[] for _ in self._source.layouts]
        self._takes: list[list[tuple[int, ...]]] = [[] for _ in self._dest.layouts]
        for classes, amounts_by_dest in self._asked.items():
            for source_class in classes:
                self._gives[source_class].append(classes)
            for dest_class in amounts_by_dest:
                self._takes[dest_class].append(classes)
        # The following tables are filled on access. A rank that asks only for its own
        # plan computes only its part of them.
        self._dealers: dict[tuple[int, ...], Dealer] = {}
        self._rows: dict[
            tuple[bool, bool, int, tuple[int, ...], int, int], list[list[_Row]]
        ] = {}
        self._listed_rows: dict[object, list[_Row]] = {}
        self._merged: dict[object, list[tuple[Box, int, Box, int, Box]]] = {}

    def __len__(self) -> int:
        return self._world

    @overload
    def __getitem__(self, rank: int) -> Plan: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Plan]: ...
    def __getitem__(self, rank: int | slice) -> Plan | list[Plan]:
        ranks = range(self._world)[rank]
        with _collector_at_rest():
            return (
                self._plan(ranks)
                if isinstance(ranks, int)
                else [self._plan(r) for r in ranks]
            )

    def _make_fan_out(self) -> FanOut | None:
        """Return the fan-out, or None if the busiest link has about as much to carry without it."""
        sides = self._source, self._dest, self._node_of
        self.direct = direct = direct_loads(self._asked, *sides)
        # A rank receives its shards over links between nodes or over faster links inside
        # its node.
        least = max(direct.received) / NODE_SPEED
        if direct.busiest <= PAYS * least:
            return None
        fan_out = FanOut(self._groups, *sides)
        return (
            fan_out
            if direct.busiest > PAYS * max(fan_out.loads.busiest, least)
            else None
        )

    def volume(self, rank: int) -> Volume:
        """Count the elements of one rank's plan without making its transfers, of which there may be 100,000."""
        copies, incoming, outgoing = self._parts(rank)
        dest_class_of = self._dest.class_of

        def count(parts: Iterable[ShardRange], dest_class: int) -> int:
            return sum(
                (part.high - part.low)
                * self._groups[part.group].wanted[dest_class][part.shards]
                for part in parts
            )

        own_class = dest_class_of[rank]
        received = {peer: count(parts, own_class) for peer, parts in incoming.items()}
        sent = {
            peer: count(parts, dest_class_of[peer]) for peer, parts in outgoing.items()
        }
        if self.fan_out is not None:
            for totals, more in zip(
                (received, sent), self.fan_out.volume(rank), strict=True
            ):
                for peer, numel in more.items():
                    totals[peer] = totals.get(peer, 0) + numel
        return Volume(
            count(copies, own_class),
            {peer: received[peer] for peer in sorted(received)},
            {peer: sent[peer] for peer in sorted(sent)},
        )

    def _parts(
        self, rank: int
    ) -> tuple[
        list[ShardRange], dict[int, list[ShardRange]], dict[int, list[ShardRange]]
    ]:
        """Return what a rank copies, receives from each peer, and sends to each peer, without fan-out."""
        source_class = self._source.class_of[rank]
        dest_class = self._dest.class_of[rank]
        copies: list[ShardRange] = []
        incoming: dict[int, list[ShardRange]] = {}
        outgoing: dict[int, list[ShardRange]] = {}
        for classes in self._takes[dest_class]:
            # A rank that holds the elements itself copies them; it never fetches them
            # from another rank.
            if source_class in classes:
                copies += [part for _, part in self._asked[classes][dest_class]]
            else:
                for holder, part in self._dealer(classes).fetched(rank):
                    incoming.setdefault(holder, []).append(part)
        for classes in self._gives[source_class]:
            for peer, part in self._dealer(classes).served(rank):
                outgoing.setdefault(peer, []).append(part)
        return copies, incoming, outgoing

    def _plan(self, rank: int) -> Plan:
        """Return the plan of one rank."""
        copies, incoming, outgoing = self._parts(rank)
        relays: list[Hop] = []
        if self.fan_out is not None:
            for number, (fetched, served) in enumerate(
                zip(*self.fan_out.parts(rank), strict=True)
            ):
                chunk, hop = ORDER[number]
                # Hops without traffic on this rank are listed as well, because `after`
                # is a number of a hop.
                relays.append(
                    Hop(
                        {
                            peer: self._forwards(rank, peer, served[peer], hop)
                            for peer in sorted(served)
                        },
                        {
                            peer: self._forwards(peer, rank, fetched[peer], hop)
                            for peer in sorted(fetched)
                        },
                        NUMBER[chunk, hop - 1] if hop else None,
                    )
                )
        return Plan(
            rank=rank,
            world=self._world,
            source_layout=self._source.layouts[self._source.class_of[rank]],
            dest_layout=self._dest.layouts[self._dest.class_of[rank]],
            copies=self._transfers(rank, rank, copies),
            sends={
                peer: self._transfers(rank, peer, outgoing[peer])
                for peer in sorted(outgoing)
            },
            receives={
                peer: self._transfers(peer, rank, incoming[peer])
                for peer in sorted(incoming)
            },
            relays=tuple(relays),
        )

    def _dealer(self, classes: tuple[int, ...]) -> Dealer:
        """Return the assignments of one set of holders, created once."""
        if classes not in self._dealers:
            self._dealers[classes] = Dealer(
                classes,
                self._asked[classes],
                self._source,
                self._dest,
                self._node_of,
                only_near=self.fan_out is not None,
            )
        return self._dealers[classes]

    def _transfers(
        self, source: int, dest: int, parts: list[ShardRange]
    ) -> tuple[Transfer, ...]:
        """Return what goes from one rank to another, in an order that both know: by group, tensor and box."""
        return self._listed(source, dest, parts, in_units=False, relayed=False)

    def _forwards(
        self, source: int, dest: int, parts: list[ShardRange], hop: int
    ) -> tuple[Transfer, ...]:
        """Return what goes from one rank to another in one hop of the fan-out."""
        return self._listed(source, dest, parts, in_units=True, relayed=hop > 0)

    def _listed(
        self,
        source: int,
        dest: int,
        parts: list[ShardRange],
        *,
        in_units: bool,
        relayed: bool,
    ) -> tuple[Transfer, ...]:
        """Return the transfers of some parts.

        Args:
            in_units: the parts number the shard sets of the fan-out's groups, not of the planner's.
            relayed: the sender reads them from its destination's tensors.
        """
        side = self._dest if relayed else self._source
        source_class, dest_class = side.class_of[source], self._dest.class_of[dest]
        # Replicas with equal layouts forward equal parts, so all plans of a job need far
        # fewer lists of rows than there are pairs of ranks.
        parts = sorted(parts)
        key = (in_units, relayed, source_class, dest_class, tuple(parts))
        rows = self._listed_rows.get(key)
        if rows is None:
            rows = self._listed_rows[key] = [
                row
                for number, same in groupby(parts, key=lambda part: part.group)
                for low, high, shards in _segments(list(same))
                for of_tensor in self._rows_of(
                    in_units, relayed, number, shards, source_class, dest_class
                )[low:high]
                for row in of_tensor
            ]
        # The plans of a large job hold tens of millions of transfers. Creating the
        # tuples directly skips the named tuple's constructor.
        new = tuple.__new__
        return tuple(
            [
                new(
                    Transfer,
                    (
                        tensor,
                        box,
                        source,
                        source_local,
                        source_box,
                        dest,
                        dest_local,
                        dest_box,
                    ),
                )
                for tensor, box, source_local, source_box, dest_local, dest_box in rows
            ]
        )

    def _rows_of(
        self,
        in_units: bool,
        relayed: bool,
        number: int,
        shards: tuple[int, ...],
        source_class: int,
        dest_class: int,
    ) -> list[list[_Row]]:
        """Return for each tensor of a group what these shard sets transfer from one class to another.

        For arguments, see `_listed`.
        """
        key = (in_units, relayed, number, shards, source_class, dest_class)
        if key not in self._rows:
            group = self._groups[number]
            if in_units:
                assert self.fan_out is not None
                group = self.fan_out.groups[number]
            held_by = (
                (self._dest if relayed else self._source)
                .layouts[source_class]
                .by_tensor
            )
            wanted_by = self._dest.layouts[dest_class].by_tensor
            self._rows[key] = rows = []
            for tensor in group.tensors:
                held = held_by[tensor]
                wanted = wanted_by[tensor]
                # Tensors of a group differ at most in the places of their boxes inside
                # fused local tensors.
                shape = (in_units, number, shards, _places(held), _places(wanted))
                if shape not in self._merged:
                    self._merged[shape] = _merge(_overlaps(group, shards, held, wanted))
                rows.append(
                    [
                        _Row(
                            tensor,
                            box,
                            held[i].local,
                            source_box,
                            wanted[j].local,
                            dest_box,
                        )
                        for box, i, source_box, j, dest_box in self._merged[shape]
                    ]
                )
        return self._rows[key]

    def _refuse_mismatch(self, allow_unused: bool) -> None:
        """Raise ReshardError if the two sides differ in tensors or shapes."""
        problems = [*self._source.disagreements, *self._dest.disagreements]
        problems += [
            f"{tensor}: the source has no such tensor"
            for tensor in self._dest.shapes
            if tensor not in self._source.shapes
        ]
        for tensor, shape in self._source.shapes.items():
            # Tensors are compared by name and shape only: dtypes are the business of
            # the transport.
            wanted = self._dest.shapes.get(tensor)
            if wanted is None:
                if not allow_unused:
                    problems.append(f"{tensor}: the destination has no place for it")
            elif wanted != shape:
                problems.append(
                    f"{tensor}: shape {shape} at the source, {wanted} at the destination"
                )
        if problems:
            raise ReshardError(
                f"source and destination are not the same model: {'; '.join(listed(problems))}."
            )

    def _refuse_missing(self) -> None:
        """Raise ReshardError if no rank holds an element that the destination needs."""
        problems = []
        for group in self._groups:
            for number, box in group.missing.items():
                by_tensor = self._dest.layouts[number].by_tensor
                rank = self._dest.ranks[number][0]
                problems += [
                    f"{tensor}: rank {rank} needs {box} for {by_tensor[tensor][0].local}, but no rank holds it"
                    for tensor in group.tensors
                ]
        if problems:
            raise ReshardError(
                f"the source does not hold what the destination needs: {'; '.join(listed(problems))}."
            )


def _segments(parts: list[ShardRange]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield runs of tensors with the shard sets that apply to the whole run, from the parts of one group."""
    if len(parts) == 1:
        # Most groups have one part, and a large job has hundreds of thousands of them.
        [part] = parts
        yield part.low, part.high, (part.shards,)
        return
    # Every bound of a part is a cut, so the same shard sets apply everywhere between
    # two cuts.
    cuts = sorted({part.low for part in parts} | {part.high for part in parts})
    for low, high in pairwise(cuts):
        shards = tuple(
            sorted(
                part.shards for part in parts if part.low <= low and high <= part.high
            )
        )
        if shards:
            yield low, high, shards


def _places(pieces: list[Piece]) -> tuple[object, ...]:
    """Return what decides how the boxes of a tensor merge: everything about its pieces except names."""
    if len(pieces) == 1:
        return pieces[0].box, pieces[0].local_box
    locals_ = list(dict.fromkeys(piece.local for piece in pieces))
    return tuple(
        (piece.box, piece.local_box, locals_.index(piece.local)) for piece in pieces
    )


class _Overlap(NamedTuple):
    """Box of the source that the destination wants, with its piece and place on either side."""

    source_local: str
    dest_local: str
    box: Box
    source_piece: int
    source_box: Box
    dest_piece: int
    dest_box: Box


def _overlaps(
    group: TensorGroup,
    shards: tuple[int, ...],
    held: list[Piece],
    wanted: list[Piece],
) -> Iterator[_Overlap]:
    """Yield the intersections of held and wanted pieces in some shard sets."""
    cells = [cell for number in shards for cell in group.shards[number].cells]
    # Cells are intersections of what the holders have, so each lies inside a single
    # piece.
    places = [
        next((i, p) for i, p in enumerate(held) if contains(p.box, cell))
        for cell in cells
    ]
    for j, piece in enumerate(wanted):
        for cell, (i, origin) in zip(cells, places, strict=True):
            box = intersect(cell, piece.box)
            if box is not None:
                source_box = carry(box, origin.box, origin.local_box)
                dest_box = carry(box, piece.box, piece.local_box)
                yield _Overlap(
                    origin.local, piece.local, box, i, source_box, j, dest_box
                )


def _merge(overlaps: Iterable[_Overlap]) -> list[tuple[Box, int, Box, int, Box]]:
    """Merge intersections that are adjacent in all three boxes, until none is left. Sorted by box."""
    # Sorted by local tensors first, because only boxes of the same local tensors can be
    # joined.
    merged = sorted(overlaps)
    count = 0
    while count != len(merged):
        # Every pass joins neighbours in sorted order. A join may create new neighbours,
        # so passes repeat until one joins nothing.
        count = len(merged)
        pending = merged
        merged = []
        for overlap in pending:
            joined = _join(merged[-1], overlap) if merged else None
            if joined is None:
                merged.append(overlap)
            else:
                merged[-1] = joined
    return sorted(
        (o.box, o.source_piece, o.source_box, o.dest_piece, o.dest_box) for o in merged
    )


def _join(a: _Overlap, b: _Overlap) -> _Overlap | None:
    """Return the union of two adjacent intersections, or None."""
    if (a.source_local, a.dest_local) != (b.source_local, b.dest_local):
        return None
    box = join(a.box, b.box)
    source_box = join(a.source_box, b.source_box)
    dest_box = join(a.dest_box, b.dest_box)
    if box is None or source_box is None or dest_box is None:
        return None
    # Boxes may lie side by side in one tensor and below each other in another. They are
    # adjacent everywhere, but no single box.
    if not (
        same_up_to_ones(box.shape, source_box.shape)
        and same_up_to_ones(box.shape, dest_box.shape)
    ):
        return None
    return a._replace(box=box, source_box=source_box, dest_box=dest_box)


def _count(by_peer: Iterable[Sequence[Transfer]]) -> int:
    """Return the number of elements of all transfers."""
    return sum(transfer.box.numel for transfers in by_peer for transfer in transfers)
