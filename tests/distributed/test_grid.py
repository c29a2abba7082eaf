"""The arithmetic of grids, against the plain nested loop that it stands for."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.distributed.grid import Coords, GridShape
from megaverl.errors import GridError

SMALL = st.integers(1, 4)


@st.composite
def shapes(draw: st.DrawFn) -> GridShape:
    """Any small grid, with expert sizes that divide its stages."""
    tp, cp, dp, pp = (draw(SMALL) for _ in range(4))
    stage = tp * cp * dp
    etp = draw(st.sampled_from([d for d in range(1, stage + 1) if stage % d == 0]))
    ep = draw(
        st.sampled_from(
            [d for d in range(1, stage // etp + 1) if stage // etp % d == 0]
        )
    )
    return GridShape(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp)


@given(shapes())
def test_ranks_count_through_tp_then_cp_then_dp_then_pp(shape: GridShape) -> None:
    order = product(range(shape.pp), range(shape.dp), range(shape.cp), range(shape.tp))
    for rank, (pp, dp, cp, tp) in enumerate(order):
        coords = shape.coords(rank)
        assert (coords.tp, coords.cp, coords.dp, coords.pp) == (tp, cp, dp, pp)
        assert shape.rank(tp=tp, cp=cp, dp=dp, pp=pp) == rank
    assert rank == shape.world_size - 1


@given(shapes())
def test_experts_fill_the_same_ranks_of_a_stage(shape: GridShape) -> None:
    assert (
        shape.expert_tp * shape.ep * shape.expert_dp == shape.tp * shape.cp * shape.dp
    )
    order = product(
        range(shape.pp), range(shape.expert_dp), range(shape.ep), range(shape.expert_tp)
    )
    for rank, (pp, edp, ep, etp) in enumerate(order):
        coords = shape.coords(rank)
        assert (coords.etp, coords.ep, coords.edp, coords.pp) == (etp, ep, edp, pp)


def test_sizes_come_in_the_order_asked_for() -> None:
    shape = GridShape(tp=2, cp=3, dp=4, pp=5, ep=6, etp=1)
    assert shape.sizes() == (2, 3, 4, 5)
    assert shape.sizes(("etp", "ep", "edp", "pp")) == (1, 6, 4, 5)
    assert shape.coords(119) == Coords(tp=1, cp=2, dp=3, pp=4, etp=0, ep=5, edp=3)


@given(SMALL, SMALL, SMALL, st.integers(1, 5))
def test_data_parallel_is_what_is_left_of_the_world(
    tp: int, cp: int, pp: int, dp: int
) -> None:
    shape = GridShape.fit(tp * cp * pp * dp, tp=tp, cp=cp, pp=pp)
    assert (shape.tp, shape.cp, shape.pp, shape.dp) == (tp, cp, pp, dp)
    assert shape.world_size == tp * cp * pp * dp


def test_a_world_that_is_not_filled_is_told_with_numbers_and_divisors() -> None:
    with pytest.raises(GridError) as caught:
        GridShape.fit(12, tp=4, pp=2, role="critic")
    assert str(caught.value) == (
        "critic: tp=4 x cp=1 x pp=2 = 8 does not divide the world of 12 ranks. "
        "Products that fit: 1, 2, 3, 4, 6, 12; or start a multiple of 8 processes."
    )


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 0}, {"cp": 0}, {"pp": -1}, {"dp": 0}, {"ep": 0}, {"etp": 0}, {"vpp": 0}],
)
def test_a_size_below_one_is_named(sizes: dict[str, int]) -> None:
    ((name, size),) = sizes.items()
    with pytest.raises(
        GridError, match=f"^{name}={size}: a parallel size is at least 1"
    ):
        GridShape(**sizes)


def test_experts_that_do_not_divide_a_stage_are_told_what_would() -> None:
    with pytest.raises(
        GridError, match=r"etp=1 x ep=3 .* the 4 ranks .* ep that fit: 1, 2, 4\."
    ):
        GridShape(tp=2, dp=2, etp=1, ep=3)
    with pytest.raises(GridError, match=r"ep that fit: none with etp=3\."):
        GridShape(tp=2, dp=2, etp=3)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_grid(rank: int) -> None:
    with pytest.raises(GridError, match=f"rank {rank} is outside the grid of 4 ranks"):
        GridShape(tp=2, pp=2).coords(rank)


def test_a_grid_is_written_short() -> None:
    assert str(GridShape(tp=2, pp=4, dp=3)) == "tp2 pp4 dp3"
    assert (
        str(GridShape(tp=2, cp=2, pp=4, vpp=2, dp=2, ep=2))
        == "tp2 pp4 dp2 cp2 ep2 vpp2"
    )


@given(shapes())
def test_the_groups_of_a_rank_share_all_but_one_coordinate(shape: GridShape) -> None:
    """Each dimension's groups cut the world into parts of its size, which agree on who is in which."""
    groups = [shape.groups_of(rank) for rank in range(shape.world_size)]
    sizes = {"tp": shape.tp, "cp": shape.cp, "dp": shape.dp, "pp": shape.pp}
    if shape.ep > 1:
        sizes |= {"etp": shape.expert_tp, "ep": shape.ep, "edp": shape.expert_dp}
    assert all(mine.keys() <= sizes.keys() for mine in groups)
    for dim, size in sizes.items():
        for rank, mine in enumerate(groups):
            if size == 1:
                assert dim not in mine
                continue
            assert len(mine[dim]) == size and rank in mine[dim]
            assert {getattr(shape.coords(other), dim) for other in mine[dim]} == set(
                range(size)
            )
            assert all(groups[other][dim] == mine[dim] for other in mine[dim])
