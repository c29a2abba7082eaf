"""The rows of a batch as layouts: a row is a one-dimensional box, held at some place of a rank's batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from megaverl.errors import DataError
from megaverl.sharding.boxes import Box, whole
from megaverl.sharding.layout import EMPTY, Layout, Piece
from megaverl.sharding.plan import Plan, Transfer, make_plans

# rank of the job -> the rows of the step's batch that it holds, or wants, in this order. Who is left out has none.
Rows = Mapping[int, Sequence[int]]

BATCH = "batch"  # the local tensor of every row
ONE = whole((1,))


class Move(NamedTuple):
    """One message: these rows, from one rank to another."""

    source: int
    dest: int
    rows: tuple[int, ...]


def join_rows(parts: Iterable[Rows]) -> dict[int, Sequence[int]]:
    """Whatever a rank has in any of the parts, ascending; joined once for ranks that have the very same ones."""
    found: dict[int, list[Sequence[int]]] = {}
    for part in parts:
        for rank, rows in part.items():
            found.setdefault(rank, []).append(rows)
    joined: dict[tuple[int, ...], Sequence[int]] = {}
    for each in found.values():
        if (same := tuple(map(id, each))) not in joined:
            joined[same] = sorted(set().union(*each) if len(each) > 1 else each[0])
    return {rank: joined[tuple(map(id, each))] for rank, each in found.items()}


def plan_moves(rank: int, source: Rows, dest: Rows, node_of: Callable[[int], int] | None = None) -> list[Move]:
    """What one rank sends and receives, as `plan_rows` says. Where every row has one holder nothing is to be shared
    out among several, and a rank looks at its own rows alone. Arguments and errors: see there."""
    holder = {row: other for other, rows in source.items() for row in rows}
    if len(holder) != sum(map(len, source.values())):
        plans = plan_rows(source, dest, node_of)
        return moves_of(plans[rank]) if rank < len(plans) else []
    for other, rows in dest.items():
        _check_wanted(other, rows, holder)
    mine, wanted = frozenset(source.get(rank, ())), dest.get(rank, ())
    asking = sorted(peer for peer, rows in dest.items() if not mine.isdisjoint(rows))
    out = [Move(rank, peer, tuple(row for row in dest[peer] if row in mine)) for peer in asking]
    parts: dict[int, list[int]] = {}
    for row in wanted:
        parts.setdefault(holder[row], []).append(row)
    into = [Move(peer, rank, tuple(parts[peer])) for peer in sorted(parts)]
    return [move for move in out + into if move.rows and move.source != move.dest]


def _check_wanted(rank: int, rows: Sequence[int], held: Mapping[int, object]) -> None:
    wanted = set(rows)
    if len(wanted) == len(rows) and wanted <= held.keys():
        return
    if twice := len(rows) - len(set(rows)) and sorted({row for row in rows if list(rows).count(row) > 1}):
        raise DataError(f"rank {rank} wants the rows {twice[:8]} more than once")
    if nowhere := [row for row in rows if row not in held]:
        raise DataError(f"rank {rank} wants the rows {nowhere[:8]}, which no rank holds")


def plan_rows(source: Rows, dest: Rows, node_of: Callable[[int], int] | None = None) -> Sequence[Plan]:
    """The plans of all ranks that bring each the rows that it wants: every row is a tensor of one element.

    Args:
        source: rows that every rank holds now; dest: rows that it wants.
        node_of: the node of a rank; None: all on one.

    Raises:
        DataError: rows that are wanted and that nobody holds, or that one rank wants twice.
    """
    held = dict.fromkeys(set().union(*source.values()))
    for rank, rows in dest.items():
        _check_wanted(rank, rows, held)
    world = max([*source, *dest], default=-1) + 1
    return make_plans(_layouts(source), _layouts(dest), world, node_of, allow_unused=True)


def moves_of(plan: Plan) -> list[Move]:
    """What one rank sends and receives, rows in the order in which they are wanted; one message for a pair."""
    out = [Move(plan.rank, peer, _rows(transfers)) for peer, transfers in plan.sends.items()]
    return out + [Move(peer, plan.rank, _rows(transfers)) for peer, transfers in plan.receives.items()]


def _rows(transfers: Sequence[Transfer]) -> tuple[int, ...]:
    return tuple(int(transfer.tensor) for transfer in sorted(transfers, key=lambda transfer: transfer.dest_box))


def _layouts(rows_of: Rows) -> Callable[[int], Layout]:
    """Ranks with the same rows share a layout, as plans like it."""
    made: dict[tuple[int, ...], Layout] = {(): EMPTY}
    by_rank: dict[int, Layout] = {}
    for rank, rows in rows_of.items():
        key = tuple(rows)
        if key not in made:
            pieces = [Piece(str(row), ONE, BATCH, Box((place,), (place + 1,))) for place, row in enumerate(key)]
            made[key] = Layout(tuple(pieces), {BATCH: (len(key),)}, {piece.tensor: ONE.stop for piece in pieces})
        by_rank[rank] = made[key]
    return lambda rank: by_rank.get(rank, EMPTY)
