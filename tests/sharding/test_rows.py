"""Which rows go from whom to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.distributed.grid import GridShape
from megaverl.errors import DataError
from megaverl.sharding.proof import check_plans
from megaverl.sharding.rows import (
    Move,
    Rows,
    join_rows,
    moves_of,
    plan_moves,
    plan_rows,
)


def rows_of_grid(
    ranks: Sequence[int], grid: GridShape, parts: Sequence[Sequence[int]]
) -> dict[int, Sequence[int]]:
    """Rows of every rank of a role whose data-parallel rank d works on `parts[d]`."""
    return {rank: parts[grid.coords(number).dp] for number, rank in enumerate(ranks)}


def all_moves(
    source: Rows, dest: Rows, node_of: Callable[[int], int] | None = None
) -> list[Move]:
    """Of all ranks; what one says that it sends, the other says that it receives."""
    plans = plan_rows(source, dest, node_of)
    check_plans(plans)
    found = [move for plan in plans for move in moves_of(plan)]
    received = [
        move for plan in plans for move in moves_of(plan) if move.dest == plan.rank
    ]
    assert Counter(found) == Counter(received * 2)
    return received


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[int, list[int]], dict[int, list[int]], int]:
    """(who holds what, who wants what, ranks per node), any of them."""
    num_ranks, num_rows = draw(st.integers(1, 8)), draw(st.integers(0, 12))
    some = (
        st.lists(st.sampled_from(range(num_rows)), unique=True, max_size=num_rows)
        if num_rows
        else st.just([])
    )
    source = {rank: draw(some) for rank in range(num_ranks)}
    held = sorted({row for rows in source.values() for row in rows})
    wanted = st.lists(st.sampled_from(held), unique=True) if held else st.just([])
    return (
        source,
        {rank: draw(wanted) for rank in range(num_ranks)},
        draw(st.integers(1, 4)),
    )


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_every_row_once_from_a_nearest_holder_and_nothing_that_is_there(case) -> None:  # type: ignore[no-untyped-def]
    source, dest, per_node = case
    moves = all_moves(source, dest, lambda rank: rank // per_node)
    got = Counter((move.dest, row) for move in moves for row in move.rows)
    assert set(got.values()) <= {1}
    assert set(got) == {
        (rank, row)
        for rank, rows in dest.items()
        for row in rows
        if row not in source[rank]
    }
    assert len({(move.source, move.dest) for move in moves}) == len(moves), (
        "one message for a pair"
    )
    for move in moves:
        for row in move.rows:
            assert row in source[move.source]
            near = [
                r
                for r in source
                if r // per_node == move.dest // per_node and row in source[r]
            ]
            assert not near or move.source in near
    again = all_moves(
        dict(reversed(source.items())),
        dict(reversed(dest.items())),
        lambda rank: rank // per_node,
    )
    assert again == moves, (
        "the same on every rank, in whatever order it lists the others"
    )


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 40),
)
def test_from_grid_to_grid_the_holders_share_evenly(
    tp: int, pp: int, engine_tp: int, num_rows: int
) -> None:
    """Rollout on ranks 0-7, actor on 8-15."""
    grid = GridShape.fit(8, tp=tp, pp=pp)
    num_engines = 8 // engine_tp
    engines = GridShape.fit(8, tp=engine_tp)
    source = rows_of_grid(
        range(8), engines, [range(e, num_rows, num_engines) for e in range(num_engines)]
    )
    dest = rows_of_grid(
        range(8, 16), grid, [range(d, num_rows, grid.dp) for d in range(grid.dp)]
    )
    sent = Counter[int]()
    for move in all_moves(source, dest):
        sent[move.source] += len(move.rows)
    for engine in range(num_engines):
        loads = [
            sent[rank] for rank in range(engine * engine_tp, (engine + 1) * engine_tp)
        ]
        assert max(loads) - min(loads) <= 1
    assert sum(sent.values()) == sum(len(rows) for rows in dest.values())


def test_a_colocated_role_on_the_same_grid_moves_nothing() -> None:
    rows = rows_of_grid(range(4), GridShape(tp=2, dp=2), [[0, 1], [2, 3]])
    assert rows == {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    assert all_moves(rows, rows) == []


def test_only_what_is_missing_moves() -> None:
    assert all_moves({0: [0, 1], 1: [2]}, {1: [1, 2, 0]}) == [Move(0, 1, (1, 0))]


@pytest.mark.parametrize(
    ("dest", "words"),
    [
        ({1: [0, 7]}, r"wants the rows \[7\], which no rank"),
        ({1: [0, 0]}, "more than once"),
    ],
)
def test_what_cannot_be_moved(dest: dict[int, list[int]], words: str) -> None:
    with pytest.raises(DataError, match=words):
        all_moves({0: [0, 1]}, dest)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_a_rank_that_plans_for_itself_alone_plans_the_same(case) -> None:  # type: ignore[no-untyped-def]
    source, dest, _ = case
    first = {
        row: min(r for r in source if row in source[r])
        for rows in source.values()
        for row in rows
    }
    for holders in (
        source,
        {
            rank: [row for row in rows if first[row] == rank]
            for rank, rows in source.items()
        },
    ):
        plans = plan_rows(holders, dest)
        for rank in range(len(plans)):
            assert sorted(plan_moves(rank, holders, dest)) == sorted(
                moves_of(plans[rank])
            )


@given(st.lists(st.dictionaries(st.integers(0, 5), st.integers(0, 3)), max_size=3))
def test_ranks_that_have_the_same_rows_share_what_is_joined(
    parts: list[dict[int, int]],
) -> None:
    shared = [[4, 1], [1, 2, 7], [], range(3, 6)]
    found = join_rows(
        {rank: shared[number] for rank, number in part.items()} for part in parts
    )
    assert found == {
        rank: sorted(
            {row for part in parts if rank in part for row in shared[part[rank]]}
        )
        for rank in {rank for part in parts for rank in part}
    }
    for part in parts[:1] if len(parts) == 1 else ():
        assert len({id(rows) for rows in found.values()}) == len({*part.values()})
