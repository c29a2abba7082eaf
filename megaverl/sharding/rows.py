"""Which rows of a batch go from whom to whom: arithmetic, the same on every rank, and nothing is asked of anyone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megaverl.distributed.grid import GridShape
from megaverl.errors import DataError

# rank of the job -> the rows of the step's batch that it holds, or wants, in this order. Who is left out has none.
Rows = Mapping[int, Sequence[int]]


class Move(NamedTuple):
    """One message: these rows, from one rank to another."""

    source: int
    dest: int
    rows: tuple[int, ...]


def rows_of_grid(ranks: Sequence[int], grid: GridShape, parts: Sequence[Sequence[int]]) -> dict[int, Sequence[int]]:
    """Rows of every rank of a role whose data-parallel rank d works on `parts[d]`.

    A replica's tensor, context and pipeline ranks all hold its rows.

    Args:
        ranks: of the job; the grid counts them from 0.
        parts: one for each data-parallel rank.

    Raises:
        DataError: as many ranks or parts as the grid does not have.
    """
    if grid.world_size != len(ranks) or grid.dp != len(parts):
        raise DataError(f"{len(ranks)} ranks and {len(parts)} parts of a batch do not fit the grid {grid}")
    return {rank: parts[grid.coords(number).dp] for number, rank in enumerate(ranks)}


def join_rows(parts: Iterable[Rows]) -> dict[int, Sequence[int]]:
    """Whatever a rank has in any of the parts, ascending."""
    found: dict[int, set[int]] = {}
    for part in parts:
        for rank, rows in part.items():
            found.setdefault(rank, set()).update(rows)
    return {rank: sorted(rows) for rank, rows in found.items()}


def rows_of_engines(ranks: Sequence[int], tp: int, parts: Sequence[Sequence[int]]) -> dict[int, Sequence[int]]:
    """Rows of every rank of engines of `tp` neighbours each; engine e works on `parts[e]`."""
    return rows_of_grid(ranks, GridShape.fit(len(ranks), tp=tp, role="rollout"), parts)


def plan_moves(source: Rows, dest: Rows, node_of: Callable[[int], int] = lambda rank: 0) -> list[Move]:
    """The fewest rows that bring every rank what it wants, each row from one of its nearest holders.

    A rank receives each row that it wants and does not hold, once. Rows held by the same ranks are shared out over
    those of them on the receiver's node, or over all where there is none, evenly up to one row, and in runs, so that
    messages are few. Whoever has sent least so far begins.

    Args:
        source: rows that every rank holds now; dest: rows that it wants.
        node_of: the node of a rank.

    Returns: one move for each pair of ranks, ordered by source, then by dest; rows in the order of dest.

    Raises:
        DataError: rows that are wanted and that nobody holds, or that one rank wants twice.
    """
    holders = _holders(source)
    _check(holders, dest)
    load = dict.fromkeys(source, 0)
    found: dict[tuple[int, int], list[int]] = {}
    for ranks, wanted in _classes(source, holders, dest).items():
        for pool, requests in _pools(ranks, wanted, node_of).items():
            for holder, share in zip(
                sorted(pool, key=lambda r: (load[r], r)), _shares(requests, len(pool)), strict=True
            ):
                for receiver, rows in share:
                    load[holder] += len(rows)
                    found.setdefault((holder, receiver), []).extend(rows)
    place = {(rank, row): number for rank, rows in dest.items() for number, row in enumerate(rows)}
    return [
        Move(holder, receiver, tuple(sorted(rows, key=lambda row: place[receiver, row])))
        for (holder, receiver), rows in sorted(found.items())
    ]


def _holders(source: Rows) -> dict[int, tuple[int, ...]]:
    """Row -> the ranks that hold it; ranks that hold the same rows are looked at once."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, rows in source.items():
        alike.setdefault(tuple(rows), []).append(rank)
    holders: dict[int, tuple[int, ...]] = {}
    for rows, ranks in alike.items():
        for row in rows:
            holders[row] = (*holders.get(row, ()), *ranks)
    return {row: tuple(sorted(set(ranks))) for row, ranks in holders.items()}


def _check(holders: Mapping[int, Sequence[int]], dest: Rows) -> None:
    for rank, rows in dest.items():
        if len(set(rows)) < len(rows):
            twice = sorted({row for row in rows if list(rows).count(row) > 1})
            raise DataError(f"rank {rank} wants the rows {twice[:8]} more than once")
        if nowhere := [row for row in rows if row not in holders]:
            raise DataError(f"rank {rank} wants the rows {nowhere[:8]}, which no rank holds")


def _classes(
    source: Rows, holders: Mapping[int, tuple[int, ...]], dest: Rows
) -> dict[tuple[int, ...], dict[int, list[int]]]:
    """Holders -> receiver -> the rows that it lacks, of all rows that exactly these ranks hold."""
    classes: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for rank in sorted(dest):
        held = set(source.get(rank, ()))
        for row in dest[rank]:
            if row not in held:
                classes.setdefault(holders[row], {}).setdefault(rank, []).append(row)
    return dict(sorted(classes.items()))


def _pools(
    ranks: Sequence[int], wanted: Mapping[int, list[int]], node_of: Callable[[int], int]
) -> dict[tuple[int, ...], dict[int, list[int]]]:
    """The holders that serve -> receiver -> rows: those on the receiver's node, or all."""
    pools: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for receiver, rows in wanted.items():
        near = tuple(rank for rank in ranks if node_of(rank) == node_of(receiver))
        pools.setdefault(near or tuple(ranks), {})[receiver] = rows
    return pools


def _shares(requests: Mapping[int, Sequence[int]], count: int) -> Iterator[list[tuple[int, Sequence[int]]]]:
    """All requests in a row, cut into `count` runs of equal length up to one, the longer ones first."""
    line = [(receiver, row) for receiver, rows in requests.items() for row in rows]
    each, extra = divmod(len(line), count)
    start = 0
    for number in range(count):
        stop = start + each + (number < extra)
        run: dict[int, list[int]] = {}
        for receiver, row in line[start:stop]:
            run.setdefault(receiver, []).append(row)
        yield list(run.items())
        start = stop
