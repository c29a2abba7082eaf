"""Rows before a call: every rank receives what it lacks exactly once, in one order that cannot deadlock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.controller.moves import Rows, plan_moves
from megaverl.errors import DataError


@st.composite
def rows_and_wishes(
    draw: st.DrawFn,
) -> tuple[dict[int, Rows], dict[int, Rows | None], int]:
    num_ranks = draw(st.integers(1, 6))
    num_rows = draw(st.integers(0, 8))
    subset = st.sets(st.integers(0, max(num_rows - 1, 0)), max_size=num_rows).map(
        lambda rows: tuple(sorted(rows))
    )
    holders = draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))
    held = {rank: draw(subset) if num_rows else () for rank in holders}
    known = sorted({row for rows in held.values() for row in rows})
    some = st.sets(st.sampled_from(known)) if known else st.just(set())
    wish = st.one_of(st.none(), some.map(lambda rows: tuple(sorted(rows))))
    wanted = {rank: draw(wish) for rank in range(num_ranks) if draw(st.booleans())}
    return held, wanted, draw(st.integers(1, 3))


@given(rows_and_wishes())
def test_each_missing_row_arrives_once(
    case: tuple[dict[int, Rows], dict[int, Rows | None], int],
) -> None:
    held, wanted, node_size = case
    moves = plan_moves(5, held, wanted, lambda rank: rank // node_size)
    known = {row for rows in held.values() for row in rows}
    for rank, rows in wanted.items():
        received = [
            row for move in moves if move.dest == rank for row in move.rows or ()
        ]
        missing = (known if rows is None else set(rows)) - set(held.get(rank, ()))
        assert sorted(received) == sorted(missing)
    for move in moves:
        assert move.source != move.dest
        assert set(move.rows or ()) <= set(held[move.source])
        near = [other for other in held if other // node_size == move.dest // node_size]
        for row in move.rows or ():
            same_node = move.source // node_size == move.dest // node_size
            assert same_node or not any(row in held[other] for other in near), (
                "a row crosses nodes without need"
            )


@given(
    st.sets(st.integers(0, 15), min_size=1),
    st.sets(st.integers(0, 15)),
    st.integers(1, 4),
)
def test_a_whole_value_is_passed_on_by_those_that_have_it(
    holders: set[int], wanted: set[int], node_size: int
) -> None:
    moves = plan_moves(
        1, dict.fromkeys(holders), dict.fromkeys(wanted), lambda rank: rank // node_size
    )
    have = set(holders)
    entered: list[int] = []
    for move in moves:
        assert move.source in have, "a rank passes on what it has not received"
        assert move.dest not in have
        if move.source // node_size != move.dest // node_size:
            entered.append(move.dest // node_size)
        have.add(move.dest)
    assert have == holders | wanted
    assert len(entered) == len(set(entered)), "the value enters a node twice"
    most = max((sum(move.source == rank for move in moves) for rank in have), default=0)
    assert most <= 2 * max(len(wanted), 1).bit_length(), "one rank sends most copies"


def test_a_row_that_no_rank_holds_is_named() -> None:
    with pytest.raises(
        DataError,
        match="rank 1 needs row 9 of the value of call 4, which no rank holds",
    ):
        plan_moves(4, {0: (1, 2)}, {1: (2, 9)})


def test_transfers_of_one_distance_can_run_side_by_side() -> None:
    held = {rank: (rank,) for rank in range(6)}
    moves = plan_moves(1, held, dict.fromkeys(range(6)))
    rounds = [moves[first : first + 6] for first in range(0, len(moves), 6)]
    for transfers in rounds:
        assert (
            {move.source for move in transfers}
            == {move.dest for move in transfers}
            == set(range(6))
        )
