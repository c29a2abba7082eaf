"""Transfers of rows between ranks before a call, as pure arithmetic on row numbers.

The moves of a call have one order for the whole job, and each rank goes through its own
moves in that order. So no two ranks can wait for each other, even where a send blocks
until the other rank receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megaverl.controller.messages import RowTransfer
from megaverl.errors import DataError

Rows = tuple[int, ...]


def plan_moves(
    value: int,
    held: Mapping[int, Rows | None],
    wanted: Mapping[int, Rows | None],
    node_of: Callable[[int], int] = lambda rank: 0,
) -> list[RowTransfer]:
    """Return the transfers that bring every rank what it wants and does not hold.

    Args:
        value: id of the value.
        held: by rank, the rows that it holds; None: the whole value.
        wanted: by rank, the rows that it needs; None: the whole value.
        node_of: node of a rank. A rank receives from its own node where it can.

    Returns:
        Transfers in the order of the job. Each rank receives each missing row exactly once.

    Raises:
        DataError: no rank holds a row that is wanted.
    """
    if any(rows is None for rows in held.values()):
        return _copy_whole(value, held, wanted, node_of)
    return _move_rows(
        value, {rank: rows or () for rank, rows in held.items()}, wanted, node_of
    )


def _copy_whole(
    value: int,
    held: Mapping[int, Rows | None],
    wanted: Mapping[int, Rows | None],
    node_of: Callable[[int], int],
) -> list[RowTransfer]:
    """Copy a whole value. Every rank that has received it passes it on, so the number of rounds is logarithmic."""
    holders = [rank for rank, rows in held.items() if rows is None]
    missing = [rank for rank in sorted(wanted) if rank not in holders]
    nodes = {node_of(rank) for rank in holders}
    by_node: dict[int, list[int]] = {}
    for rank in missing:
        by_node.setdefault(node_of(rank), []).append(rank)
    moves: list[RowTransfer] = []
    # A value enters each node once. Rounds: every holder serves one rank, then all that
    # hold it serve.
    first_of_nodes = [
        ranks.pop(0) for node, ranks in by_node.items() if node not in nodes
    ]
    _spread(value, holders, first_of_nodes, moves)
    # Inside a node, only its own holders serve, over links that do not load the
    # network.
    for node, ranks in by_node.items():
        _spread(
            value, [rank for rank in holders if node_of(rank) == node], ranks, moves
        )
    return moves


def _spread(
    value: int, holders: list[int], missing: Sequence[int], moves: list[RowTransfer]
) -> None:
    """Add transfers in rounds to `moves`; ranks that have received the value join `holders`."""
    rest = list(missing)
    while rest:
        # A copy: ranks that receive the value in this round serve from the next one on.
        sources = list(holders)
        for source in sources[: len(rest)]:
            dest = rest.pop(0)
            moves.append(RowTransfer(value, source, dest))
            holders.append(dest)


def _move_rows(
    value: int,
    held: Mapping[int, Rows],
    wanted: Mapping[int, Rows | None],
    node_of: Callable[[int], int],
) -> list[RowTransfer]:
    holders_of: dict[int, list[int]] = {}
    for rank in sorted(held):
        for row in held[rank]:
            holders_of.setdefault(row, []).append(rank)
    everything = tuple(sorted(holders_of))
    parts: dict[tuple[int, int], list[int]] = {}
    sent: dict[int, int] = dict.fromkeys(held, 0)
    for dest in sorted(wanted):
        rows = wanted[dest]
        present = set(held.get(dest, ()))
        for row in everything if rows is None else rows:
            if row in present:
                continue
            if row not in holders_of:
                raise DataError(
                    f"rank {dest} needs row {row} of the value of call {value}, which no rank holds"
                )
            # Prefer a holder on the same node, then the holder that sends least. The
            # rank number breaks ties, so that all runs plan alike.
            near = [rank for rank in holders_of[row] if node_of(rank) == node_of(dest)]
            source = min(near or holders_of[row], key=lambda rank: (sent[rank], rank))
            sent[source] += 1
            parts.setdefault((source, dest), []).append(row)
    size = max((*held, *wanted), default=0) + 1
    # Ordered by distance, so that transfers between different pairs of ranks can run
    # side by side.
    ordered = sorted(parts, key=lambda pair: ((pair[1] - pair[0]) % size, pair[0]))
    return [
        RowTransfer(value, source, dest, tuple(sorted(parts[source, dest])))
        for source, dest in ordered
    ]
