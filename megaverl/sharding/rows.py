"""Rows of a batch as layouts, so that batches are redistributed by the same plans as weights.

A row is a global tensor of one element. Its place in a rank's batch is a place in the
local tensor `BATCH`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from megaverl.errors import DataError
from megaverl.sharding.boxes import Box, whole
from megaverl.sharding.layout import EMPTY, Layout, Piece
from megaverl.sharding.plan import Plan, Transfer, make_plans

# Rank of the job -> rows of the step's batch that it holds or wants, in this order.
# Missing ranks have none.
Rows = Mapping[int, Sequence[int]]

# Name of the one local tensor that holds all rows.
BATCH = "batch"
ONE = whole((1,))


class Move(NamedTuple):
    """One message: rows that go from one rank to another."""

    source: int
    dest: int
    rows: tuple[int, ...]


def join_rows(parts: Iterable[Rows]) -> dict[int, Sequence[int]]:
    """Return the union of each rank's rows over all parts, ascending. Ranks with identical parts share one object."""
    parts_by_rank: dict[int, list[Sequence[int]]] = {}
    for part in parts:
        for rank, rows in part.items():
            parts_by_rank.setdefault(rank, []).append(rows)
    joined: dict[tuple[int, ...], Sequence[int]] = {}
    for rank_parts in parts_by_rank.values():
        # Ranks of a group share the lists, so their identities are compared, and each
        # combination is sorted once.
        if (part_ids := tuple(map(id, rank_parts))) not in joined:
            joined[part_ids] = sorted(
                set().union(*rank_parts) if len(rank_parts) > 1 else rank_parts[0]
            )
    return {
        rank: joined[tuple(map(id, rank_parts))]
        for rank, rank_parts in parts_by_rank.items()
    }


def plan_moves(
    rank: int, source: Rows, dest: Rows, node_of: Callable[[int], int] | None = None
) -> list[Move]:
    """Return the messages that one rank sends and receives, equal to those of `plan_rows`.

    If every row has one holder, there is nothing to balance, and the rank looks at its
    own rows only. That is the common case and much faster. Arguments and errors are
    those of `plan_rows`.
    """
    holder = {row: holder_rank for holder_rank, rows in source.items() for row in rows}
    # With one holder per row, the index has as many entries as all ranks together have
    # rows.
    if len(holder) != sum(map(len, source.values())):
        plans = plan_rows(source, dest, node_of)
        return moves_of(plans[rank]) if rank < len(plans) else []
    # All ranks' wishes are checked, so that every rank raises the same error.
    for wanting_rank, rows in dest.items():
        _check_wanted(wanting_rank, rows, holder)
    local_rows = frozenset(source.get(rank, ()))
    wanted = dest.get(rank, ())
    asking = sorted(
        peer for peer, rows in dest.items() if not local_rows.isdisjoint(rows)
    )
    # In the order in which the receiver wants its rows, as the receiver's own plan
    # lists them.
    outgoing = [
        Move(rank, peer, tuple(row for row in dest[peer] if row in local_rows))
        for peer in asking
    ]
    parts: dict[int, list[int]] = {}
    for row in wanted:
        parts.setdefault(holder[row], []).append(row)
    incoming = [Move(peer, rank, tuple(parts[peer])) for peer in sorted(parts)]
    # Rows that stay on their rank are no message.
    return [
        move for move in outgoing + incoming if move.rows and move.source != move.dest
    ]


def _check_wanted(
    rank: int, rows: Sequence[int], holders: Mapping[int, object]
) -> None:
    """Raise DataError if a rank wants a row twice, or a row that no rank holds."""
    wanted = set(rows)
    if len(wanted) == len(rows) and wanted <= holders.keys():
        return
    twice = sorted(row for row, count in Counter(rows).items() if count > 1)
    if twice:
        raise DataError(f"rank {rank} wants the rows {twice[:8]} more than once")
    if nowhere := [row for row in rows if row not in holders]:
        raise DataError(
            f"rank {rank} wants the rows {nowhere[:8]}, which no rank holds"
        )


def plan_rows(
    source: Rows, dest: Rows, node_of: Callable[[int], int] | None = None
) -> Sequence[Plan]:
    """Return the plans of all ranks that bring each rank the rows it wants.

    Args:
        source: rows that every rank holds now.
        dest: rows that every rank wants.
        node_of: node of a rank. None: all ranks are on one node.

    Raises:
        DataError: a wanted row is held by no rank, or one rank wants it twice.
    """
    all_rows = dict.fromkeys(set().union(*source.values()))
    for rank, rows in dest.items():
        _check_wanted(rank, rows, all_rows)
    world = max([*source, *dest], default=-1) + 1
    return make_plans(
        _layouts(source), _layouts(dest), world, node_of, allow_unused=True
    )


def moves_of(plan: Plan) -> list[Move]:
    """Return the messages of one rank, one per peer and direction, with rows in the order in which they are wanted."""
    out = [
        Move(plan.rank, peer, _rows(transfers))
        for peer, transfers in plan.sends.items()
    ]
    return out + [
        Move(peer, plan.rank, _rows(transfers))
        for peer, transfers in plan.receives.items()
    ]


def _rows(transfers: Sequence[Transfer]) -> tuple[int, ...]:
    """Return the rows of transfers, in the order of their places at the destination."""
    return tuple(
        int(transfer.tensor)
        for transfer in sorted(transfers, key=lambda transfer: transfer.dest_box)
    )


def _layouts(rows_of: Rows) -> Callable[[int], Layout]:
    """Return the layouts of all ranks. Ranks with equal rows share one object, which keeps plans small."""
    layout_by_rows: dict[tuple[int, ...], Layout] = {(): EMPTY}
    by_rank: dict[int, Layout] = {}
    for rank, rows in rows_of.items():
        key = tuple(rows)
        if key not in layout_by_rows:
            pieces = [
                Piece(str(row), ONE, BATCH, Box((place,), (place + 1,)))
                for place, row in enumerate(key)
            ]
            layout_by_rows[key] = Layout(
                tuple(pieces),
                {BATCH: (len(key),)},
                {piece.tensor: ONE.stop for piece in pieces},
            )
        by_rank[rank] = layout_by_rows[key]
    return lambda rank: by_rank.get(rank, EMPTY)
