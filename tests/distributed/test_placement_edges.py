"""Whether a grid fills its ranks, also where experts are cut otherwise; ends of ranges, and what is said of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.distributed.grid import GridShape, grid_problem
from megaverl.distributed.placement import (
    Node,
    PlacementError,
    ResolvedPlacement,
    RoleGroup,
    parse_claims,
    parse_wanted,
    ranks_named,
)
from megaverl.distributed.placement_resolver import smallest_world
from megaverl.errors import GridError
from tests.distributed.test_placement import PPO, Sizes, place, refusals

SMALL = st.integers(1, 4)


@given(
    SMALL,
    st.integers(1, 2),
    SMALL,
    SMALL,
    st.sampled_from([None, 1, 2, 3, 4]),
    st.integers(1, 24),
)
def test_a_grid_fits_where_it_can_be_made(
    tp: int, cp: int, pp: int, ep: int, etp: int | None, ranks: int
) -> None:
    sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
    try:
        GridShape.fit(ranks, **sizes)  # type: ignore[arg-type]
        fits = True
    except GridError:
        fits = False
    assert (grid_problem(Sizes(**sizes), ranks, "ranks") == "") == fits


@pytest.mark.parametrize(
    ("sizes", "ranks", "words"),
    [
        (
            {"tp": 4, "pp": 2},
            12,
            "tp=4 x cp=1 x pp=2 = 8 does not divide its 12 ranks. Products that fit: 1, 2, 3, 4, 6",
        ),
        ({"tp": 4, "pp": 2}, 12, ", 12; or give it a multiple of 8 ranks."),
        (
            {"tp": 0},
            4,
            "= 0 does not divide its 4 ranks. Products that fit: 1, 2, 4; or give it a multiple of 1 ranks.",
        ),
        (
            {"tp": 2, "pp": 2, "ep": 3},
            8,
            "etp=2 x ep=3 does not divide the 4 ranks of a pipeline stage (8 ranks / pp=2) .* ep that fit: 1, 2.",
        ),
        (
            {"tp": 2, "etp": 1, "ep": 3},
            4,
            "etp=1 x ep=3 does not divide the 4 ranks .* ep that fit: 1, 2, 4.",
        ),
        (
            {"tp": 2, "etp": 4, "ep": 3},
            4,
            "etp=4 x ep=3 does not divide the 4 ranks .* ep that fit: 1.",
        ),
        (
            {"tp": 1, "etp": 3},
            4,
            "etp=3 x ep=1 does not divide the 4 ranks .* ep that fit: none with etp=3.",
        ),
        (
            {"tp": 1, "etp": 3},
            5,
            "etp=3 x ep=1 does not divide the 5 ranks .* ep that fit: none with etp=3.",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_what_would(
    sizes: dict[str, int], ranks: int, words: str
) -> None:
    found = grid_problem(Sizes(**sizes), ranks, f"{ranks} ranks")
    before, _, after = words.partition(" .* ")
    assert (
        before in found
        and after in found
        and (found.endswith(after) or not words.endswith("."))
    )


def test_experts_are_cut_on_the_ranks_of_their_own_role_and_island() -> None:
    grids = PPO | {"actor": Sizes(tp=2, etp=1, ep=4)}
    assert place(9, grids=grids, islands=2, rollout=8, coordinator="rollout").islands[
        1
    ] == (4, 5, 6, 7)
    [problem] = refusals(9, grids=grids, islands=4, rollout=8, coordinator="rollout")
    assert (
        "etp=1 x ep=4 does not divide the 2 ranks of a pipeline stage (2 ranks of an island / pp=1)"
        in problem
    )


def test_ranks_without_a_role_are_counted() -> None:
    grids = {"actor": Sizes(), "rollout": Sizes()}
    [problem] = refusals(9, grids=grids, actor="0-1", rollout="2-3", coordinator=0)
    assert "ranks 4-8 have no role" in problem and problem.endswith("or start 4 ranks.")
    [problem] = refusals(5, grids=grids, actor="0-1", rollout="2-3", coordinator=0)
    assert "rank 4 has no role" in problem


def test_what_a_placement_says_of_itself() -> None:
    nodes = tuple(Node(name, 2, memory=1.0) for name in "abcde") + (Node("f", 1),)
    role_groups = (
        RoleGroup("actor", tuple(range(10)), ("actor",)),
        RoleGroup("coordinator", (10,), ("coordinator",)),
    )
    ranks = {"actor": role_groups[0].ranks, "coordinator": role_groups[1].ranks}
    found = ResolvedPlacement(11, ranks, role_groups, (role_groups[0].ranks,), nodes)
    assert [line[line.index(" on ") + 1 :] for line in found.lines()] == [
        "on a, b, c, d and 1 more",
        "on f",
    ]
    assert len({line.index(" on ") for line in found.lines()}) == 1, (
        "in a column of its own"
    )
    assert (
        found.coordinator == 10
        and found.num_with_device == 10
        and not found.is_colocated
    )
    assert (
        found.role_group_of(10) is role_groups[1]
        and found.role_group_of(9) is role_groups[0]
        and role_groups[0].size == 10
    )
    assert found.roles_of(10) == ("coordinator",) and found.roles_of(3) == ("actor",)
    four = ResolvedPlacement(11, {"actor": tuple(range(8))}, role_groups, (), nodes)
    assert four.lines()[0].endswith("on a, b, c, d")
    without = ResolvedPlacement(
        11, ranks, role_groups, (), tuple(Node(name, 2) for name in "abcdef")
    )
    assert without.num_with_device == 11


def test_one_rank_and_several_are_named() -> None:
    assert ranks_named([3], " has", " have") == "rank 3 has"
    assert ranks_named({4, 2, 3, 7}, " has", " have") == "ranks 2-4,7 have"
    assert ranks_named([1, 2]) == "ranks 1-2" and ranks_named([1, 3]) == "ranks 1,3"


@pytest.mark.parametrize("text", ["", " , ", "critic,rollot", "rollot"])
def test_claims_of_no_role_are_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match="expected one or more of .*with commas between them"
    ):
        parse_claims(text)


def test_claims_are_taken_once_each() -> None:
    assert parse_claims(" train,critic , train,actor") == ("actor", "critic")


def test_the_smallest_jobs() -> None:
    grids = {"actor": Sizes(tp=2, pp=2), "rollout": Sizes(tp=2), "reward": None}
    assert (
        smallest_world({}, grids, most=4) == 4
        and smallest_world({}, grids, most=3) is None
    )
    assert smallest_world({"actor": parse_wanted(0)}, {"actor": Sizes()}) == 1
    assert place(1, grids={"actor": Sizes()}).ranks == {
        "actor": (0,),
        "coordinator": (0,),
    }
    with pytest.raises(
        PlacementError, match="the nodes have 0 ranks together, and the job has 0"
    ):
        place(0, [])


@pytest.mark.parametrize("number", [3, 4, 9])
def test_a_number_of_no_node_is_refused(number: int) -> None:
    nodes = [Node(name, 2) for name in "abc"]
    assert (
        f"there is no node {number}; there are 0: a, 1: b, 2: c."
        in refusals(6, nodes, rollout={"nodes": number})[0]
    )
    assert place(6, nodes, rollout={"nodes": 2}).ranks["rollout"] == (4, 5)


def test_claims_that_contradict_the_configuration_are_all_named() -> None:
    nodes = [
        Node("a", 2, ("actor",)),
        Node("b", 2, ("critic",)),
        Node("c", 2, ("rollout",)),
    ]
    found = refusals(6, nodes, actor="2-3", critic={"nodes": "c"}, rollout="4-5")
    assert [
        line.split(":")[0] for line in found if "claims it with --role" in line
    ] == [
        "placement.actor",
        "placement.critic",
    ]


def test_a_node_that_took_no_role_is_said_so_only_where_others_did() -> None:
    nodes, grids = (
        [Node(name, 2) for name in "ab"],
        {"actor": Sizes(), "rollout": Sizes()},
    )
    [problem] = refusals(4, nodes, grids, actor="0-1", rollout="0-1", coordinator=0)
    assert "ranks 2-3 have no role" in problem and "--role" not in problem


def test_grids_are_looked_at_also_where_islands_do_not_divide() -> None:
    grids = PPO | {"actor": Sizes(tp=3), "rollout": Sizes(tp=3)}
    found = "\n".join(
        refusals(9, grids=grids, islands=3, rollout=8, coordinator="rollout")
    )
    assert "the actor's 8 ranks can be split into 1, 2, 4, 8." in found
    assert "placement.rollout: tp=3" in found and "placement.actor: tp=3" not in found


def test_numbers_of_ranks_have_an_end() -> None:
    assert parse_wanted(2**20 - 1).ranks == (2**20 - 1,)
    for value in (2**20, [0, 2**20], f"0-{2**20}"):
        with pytest.raises(ValueError, match="expected|go up to"):
            parse_wanted(value)
