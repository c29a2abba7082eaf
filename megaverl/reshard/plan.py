"""A plan: the intersection of a source and a destination layout, seen from one rank.

Every rank computes its own plan by arithmetic alone, and the rules are the same everywhere, so that the
sends of one rank are the receives of another without a word between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megaverl.errors import ReshardError
from megaverl.layout.boxes import Box, carry, intersect, join, same_up_to_ones, subtract
from megaverl.layout.layout import Layout, Piece

MAX_NAMED = 8


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


@dataclass(frozen=True)
class Plan:
    """What one rank has to do: copies within itself, and by peer what it sends and receives.

    The lists to and from a peer are in the same order on both sides.
    """

    rank: int
    world: int
    source_layout: Layout
    dest_layout: Layout
    copies: tuple[Transfer, ...]
    sends: dict[int, tuple[Transfer, ...]]
    receives: dict[int, tuple[Transfer, ...]]

    @property
    def num_received(self) -> int:
        """Elements that come from other ranks."""
        return _count(transfer for transfers in self.receives.values() for transfer in transfers)

    @property
    def num_sent(self) -> int:
        """Elements that go to other ranks."""
        return _count(transfer for transfers in self.sends.values() for transfer in transfers)


def make_plan(
    source_layouts: Callable[[int], Layout],
    dest_layouts: Callable[[int], Layout],
    world: int,
    rank: int,
    node_of: Callable[[int], int] | None = None,
) -> Plan:
    """The plan of `rank` in a world where rank r holds `source_layouts(r)` and needs `dest_layouts(r)`.

    Each element comes from the nearest holder: the rank itself, else one on its node, else any; where several
    are as near, those who need it are dealt out to them in turn.

    Args:
        source_layouts, dest_layouts: same arguments give same layouts on every rank. Ranks that hold the
            same should share one object: the work grows with the number of distinct objects.
        node_of: the node of a rank; None: all on one.

    Raises:
        ReshardError: tensors that one side has and the other lacks, unequal global shapes, or elements that
            nobody holds; names every offending tensor.
    """
    planner = _Planner(source_layouts, dest_layouts, world, node_of or (lambda _: 0))
    incoming = list(planner.fetches_of(rank))
    outgoing = list(planner.fetches_from(rank))
    return Plan(
        rank=rank,
        world=world,
        source_layout=source_layouts(rank),
        dest_layout=dest_layouts(rank),
        copies=tuple(_merge(t for t in incoming if t.source == rank)),
        sends=_by_peer(outgoing, lambda transfer: transfer.dest),
        receives=_by_peer((t for t in incoming if t.source != rank), lambda transfer: transfer.source),
    )


def intersect_layouts(source: Layout, dest: Layout) -> list[Transfer]:
    """The copies that fill `dest` from `source` in one place (a folder, one process), merged.

    Raises:
        ReshardError: elements of `dest` that `source` lacks.
    """
    planner = _Planner(lambda _: source, lambda _: dest, 1, lambda _: 0, allow_unused=True)
    return _merge(planner.fetches_of(0))


class _Group(NamedTuple):
    """A distinct box of a tensor, and the layouts (by class number) that hold it, each with its piece."""

    box: Box
    pieces: dict[int, Piece]


class _Side:
    """All ranks' layouts of one side, indexed by tensor. Ranks that share a layout object are one class."""

    def __init__(self, layouts: Callable[[int], Layout], world: int) -> None:
        self.class_of: list[int] = []
        self.ranks: list[list[int]] = []
        self.layouts: list[Layout] = []
        self.groups: dict[str, list[_Group]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
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
        self._index()

    def _index(self) -> None:
        by_box: dict[tuple[str, Box], _Group] = {}
        for number, layout in enumerate(self.layouts):
            for tensor, shape in layout.global_shapes.items():
                if self.shapes.setdefault(tensor, shape) != shape:
                    raise ReshardError(
                        f"{tensor}: ranks of one side disagree on its shape: {self.shapes[tensor]} and {shape}."
                    )
            for piece in layout.pieces:
                group = by_box.get((piece.tensor, piece.box))
                if group is None:
                    group = by_box[piece.tensor, piece.box] = _Group(piece.box, {})
                    self.groups.setdefault(piece.tensor, []).append(group)
                group.pieces.setdefault(number, piece)
        for groups in self.groups.values():
            groups.sort(key=lambda group: group.box)


class _Planner:
    def __init__(
        self,
        source_layouts: Callable[[int], Layout],
        dest_layouts: Callable[[int], Layout],
        world: int,
        node_of: Callable[[int], int],
        allow_unused: bool = False,
    ) -> None:
        self.source = _Side(source_layouts, world)
        self.dest = _Side(dest_layouts, world)
        self.node_of = node_of
        self._refuse_mismatch(allow_unused)
        self._ordinal = {tensor: i for i, tensor in enumerate(sorted(self.source.groups))}
        self._assigned: dict[tuple[str, Box], dict[int, int]] = {}

    def fetches_of(self, rank: int) -> Iterator[Transfer]:
        """Where each element that `rank` needs comes from, in the order of its layout."""
        for piece in self.dest.layouts[self.dest.class_of[rank]].pieces:
            yield from self._fetch(rank, piece)

    def fetches_from(self, rank: int) -> Iterator[Transfer]:
        """What the other ranks fetch from `rank`."""
        for tensor, held in self.source.layouts[self.source.class_of[rank]].by_tensor.items():
            for group in self.dest.groups.get(tensor, ()):
                if not any(intersect(piece.box, group.box) for piece in held):
                    continue
                for number, piece in group.pieces.items():
                    # a class may hold the same box in two local tensors: ask for all of them
                    same = self.dest.layouts[number].by_tensor[tensor]
                    wanted = [p for p in same if p.box == piece.box]
                    for dest in self.dest.ranks[number]:
                        if dest != rank:
                            for p in wanted:
                                yield from (t for t in self._fetch(dest, p) if t.source == rank)

    def _fetch(self, rank: int, piece: Piece) -> Iterator[Transfer]:
        own = self.source.class_of[rank]
        remaining = [piece.box]
        groups = self.source.groups[piece.tensor]
        # what the rank holds itself comes first, then the rest
        for group in sorted(groups, key=lambda group: own not in group.pieces):
            if not remaining:
                return
            taken = [common for box in remaining if (common := intersect(box, group.box))]
            if not taken:
                continue
            source = rank if own in group.pieces else self._assign(piece.tensor, group)[rank]
            held = group.pieces[self.source.class_of[source]]
            for box in taken:
                yield Transfer(
                    piece.tensor,
                    box,
                    source,
                    held.local,
                    carry(box, held.box, held.local_box),
                    rank,
                    piece.local,
                    carry(box, piece.box, piece.local_box),
                )
            remaining = [rest for box in remaining for rest in subtract(box, group.box)]
        if remaining:
            raise ReshardError(
                f"{piece.tensor}: rank {rank} needs {remaining[0]} for {piece.local}, but no rank holds it."
            )

    def _assign(self, tensor: str, group: _Group) -> dict[int, int]:
        """Which holder of a box serves each rank that needs part of it and does not hold it."""
        key = (tensor, group.box)
        if key not in self._assigned:
            holders = sorted(rank for number in group.pieces for rank in self.source.ranks[number])
            by_node: dict[int, list[int]] = {}
            for holder in holders:
                by_node.setdefault(self.node_of(holder), []).append(holder)
            needing = sorted(
                {
                    rank
                    for other in self.dest.groups[tensor]
                    if intersect(other.box, group.box)
                    for number in other.pieces
                    for rank in self.dest.ranks[number]
                }.difference(holders)
            )
            turns: dict[int, int] = {}
            chosen = {}
            for rank in needing:
                node = self.node_of(rank)
                pool = by_node.get(node)
                if pool is None:
                    node, pool = -1, holders
                turn = turns.get(node, self._ordinal[tensor])
                turns[node] = turn + 1
                chosen[rank] = pool[turn % len(pool)]
            self._assigned[key] = chosen
        return self._assigned[key]

    def _refuse_mismatch(self, allow_unused: bool) -> None:
        problems = [
            f"{tensor}: the source has no such tensor"
            for tensor in self.dest.shapes
            if tensor not in self.source.shapes
        ]
        for tensor, shape in self.source.shapes.items():
            wanted = self.dest.shapes.get(tensor)
            if wanted is None:
                if not allow_unused:
                    problems.append(f"{tensor}: the destination has no place for it")
            elif wanted != shape:
                problems.append(f"{tensor}: shape {shape} at the source, {wanted} at the destination")
        if problems:
            more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
            raise ReshardError(
                f"source and destination are not the same model: {'; '.join(problems[:MAX_NAMED])}{more}."
            )


def _count(transfers: Iterable[Transfer]) -> int:
    return sum(transfer.box.numel for transfer in transfers)


def _by_peer(transfers: Iterable[Transfer], peer_of: Callable[[Transfer], int]) -> dict[int, tuple[Transfer, ...]]:
    by_peer: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        by_peer.setdefault(peer_of(transfer), []).append(transfer)
    return {peer: tuple(_merge(by_peer[peer])) for peer in sorted(by_peer)}


def _merge(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Sort transfers between the same two ranks, and join those adjacent in all three boxes."""
    merged: list[Transfer] = []
    for transfer in sorted(transfers):
        joined = _join(merged[-1], transfer) if merged else None
        if joined is None:
            merged.append(transfer)
        else:
            merged[-1] = joined
    return merged


def _join(a: Transfer, b: Transfer) -> Transfer | None:
    if (a.tensor, a.source, a.source_local, a.dest, a.dest_local) != (
        b.tensor,
        b.source,
        b.source_local,
        b.dest,
        b.dest_local,
    ):
        return None
    box, source_box, dest_box = (
        join(a.box, b.box),
        join(a.source_box, b.source_box),
        join(a.dest_box, b.dest_box),
    )
    if box is None or source_box is None or dest_box is None:
        return None
    # side by side in one tensor and one below the other in the next: adjacent everywhere, yet not one box
    if not (same_up_to_ones(box.shape, source_box.shape) and same_up_to_ones(box.shape, dest_box.shape)):
        return None
    return a._replace(box=box, source_box=source_box, dest_box=dest_box)
