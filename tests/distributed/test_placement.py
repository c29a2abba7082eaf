"""Who is where: the language, the rules, and everything that is refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.config.grids import placement_mistakes, role_grids
from megaverl.config.roles import PlacementConfig
from megaverl.config.schema import Config
from megaverl.distributed.grid import GridShape, Sizes
from megaverl.distributed.placement import (
    ROLES,
    Node,
    PlacementError,
    ResolvedPlacement,
    parse_claims,
    parse_ranks,
    parse_wanted,
    ranks_text,
)
from megaverl.distributed.placement_resolver import problems_of, resolve, smallest_world

PPO: dict[str, Sizes | None] = {
    role: Sizes() for role in ("actor", "critic", "reference", "rollout")
} | {"reward": None}


def place(
    size: int,
    nodes: list[Node] | None = None,
    grids: Any = PPO,
    islands: int = 1,
    **said: Any,
) -> Any:
    wanted = {role: parse_wanted(value) for role, value in said.items()}
    return resolve(wanted, size, grids, nodes, islands=islands)


def refusals(
    size: int, nodes: list[Node] | None = None, grids: Any = PPO, **said: Any
) -> list[str]:
    with pytest.raises(PlacementError) as caught:
        place(size, nodes, grids, **said)
    assert all(
        problem.message in str(caught.value) for problem in caught.value.problems
    )
    return [f"{problem.key}: {problem.message}" for problem in caught.value.problems]


def test_nothing_said_is_everything_everywhere() -> None:
    found = place(4)
    assert found.is_colocated and found.role_groups[0].ranks == (0, 1, 2, 3)
    assert set(found.ranks) == set(ROLES)
    assert found.ranks["coordinator"] == (0,) and found.coordinator == 0
    assert found.roles_of(0) == ROLES and found.roles_of(1) == ROLES[:-1]


def test_split_colocated_and_mixed_in_one_language() -> None:
    nodes = [Node(name, 4) for name in ("a", "b", "c", "d")]
    found = place(
        16,
        nodes,
        rollout={"nodes": ["c", 3]},
        critic={"num_ranks": 3},
        coordinator=0,
        reward="critic",
    )
    assert found.ranks["rollout"] == tuple(range(8, 16))
    assert found.ranks["critic"] == (1, 2, 3) == found.ranks["reward"]
    assert found.ranks["actor"] == (4, 5, 6, 7) == found.ranks["reference"]
    assert [
        (role_group.name, ranks_text(role_group.ranks))
        for role_group in found.role_groups
    ] == [
        ("coordinator", "0"),
        ("critic+reward", "1-3"),
        ("actor+reference", "4-7"),
        ("rollout", "8-15"),
    ]
    assert found.colocated("actor", "reference") and not found.colocated(
        "actor", "critic"
    )
    assert found.node_of(9) == 2
    assert any("on c, d" in line for line in found.lines())


def test_ranges_counts_and_nodes_are_the_same_places() -> None:
    nodes = [Node("a", 2), Node("b", 2), Node("c", 2)]
    places: list[Any] = [
        "0-1",
        "0,1",
        [0, 1],
        [0, "1"],
        {"ranks": "0-1"},
        {"nodes": "a"},
        {"nodes": 0},
        {"nodes": "0"},
    ]
    for said in [*places, {"num_ranks": 2}, {"num_nodes": 1}]:
        assert place(6, nodes, rollout=said).ranks["rollout"] == (0, 1), said


def test_the_short_form() -> None:
    section = PlacementConfig(actor_devices=[0, 1, 2, 3], critic_devices=[4, "5-7"])
    wanted, mistakes = section.wanted()
    assert mistakes == [] and section.is_given
    found = resolve(wanted, 8, PPO)
    assert found.ranks["actor"] == (0, 1, 2, 3) and found.ranks["critic"] == (
        4,
        5,
        6,
        7,
    )
    both = PlacementConfig(actor=1, actor_devices=[0]).wanted()[1]
    assert [mistake.key for mistake in both] == ["placement.actor_devices"]


def test_nodes_say_what_they_are() -> None:
    nodes = [
        Node("r1", 1, ("rollout",)),
        Node("r2", 1, ("rollout",)),
        Node("rc", 1, parse_claims("reward, critic")),
        Node("t", 1, parse_claims("train")),
        Node("k", 1, ("coordinator",)),
    ]
    found = place(5, nodes)
    assert {role: ranks_text(ranks) for role, ranks in found.ranks.items()} == {
        "actor": "3",
        "critic": "2",
        "reference": "3",
        "reward": "2",
        "rollout": "0-1",
        "coordinator": "4",
    }


def test_engines_have_the_actor_where_no_node_takes_it() -> None:
    roles = ("rollout", "rollout", "reward", "critic", "coordinator")
    nodes = [
        Node(f"n{number}", 2 if number < 4 else 1, parse_claims(role))
        for number, role in enumerate(roles)
    ]
    found = place(9, nodes)
    assert {role: ranks_text(ranks) for role, ranks in found.ranks.items()} == {
        "actor": "0-3",
        "critic": "6-7",
        "reference": "0-3",
        "reward": "4-5",
        "rollout": "0-3",
        "coordinator": "8",
    }
    assert (
        "actor shares the ranks of rollout: no node took it (--role train)"
        in found.lines()
    )
    assert not any(
        "no node" in line for line in place(4, nodes[:2], actor="rollout").lines()
    ), "as the file says"
    both = [Node("n0", 2, parse_claims("rollout,reward")), *nodes[3:]]
    assert place(5, both).ranks["actor"] == (0, 1) == place(5, both).ranks["reward"]


@pytest.mark.parametrize(
    ("nodes", "said", "words"),
    [
        (["train", "", "rollout"], {}, ["node 'n1' took no role"]),
        (
            ["critic", "reward"],
            {},
            [
                "actor: no node took it. Start one with --role train",
                "rollout: no node took it",
            ],
        ),
        (["train", "critic"], {}, ["rollout: no node took it"]),
        (
            ["train,rollout", "coordinator", "coordinator"],
            {},
            ["nodes 'n1', 'n2' all claim it"],
        ),
        (
            ["train", "rollout", "critic"],
            {"critic": {"nodes": 1}},
            ["node 'n2' (ranks 4-5) claims it", "ranks 2-3"],
        ),
    ],
)
def test_claims_that_do_not_fit(
    nodes: list[str], said: dict[str, Any], words: list[str]
) -> None:
    claimed = [
        Node(f"n{i}", 2 if i < 3 else 1, parse_claims(c) if c else ())
        for i, c in enumerate(nodes)
    ]
    found = "\n".join(refusals(sum(node.size for node in claimed), claimed, **said))
    assert [word for word in words if word not in found] == [], found


def test_two_nodes_of_one_name() -> None:
    assert (
        "nodes 0, 1 are all called 'a'" in refusals(2, [Node("a", 1), Node("a", 1)])[0]
    )


def test_every_mistake_at_once() -> None:
    grids = PPO | {"actor": Sizes(tp=3), "rollout": Sizes(tp=4), "critic": Sizes(ep=3)}
    found = refusals(
        16,
        grids=grids,
        actor="0-7",
        critic="6-9",
        rollout="10-12",
        coordinator=[10, 11],
    )
    text = "\n".join(found)
    for word in (
        "placement.coordinator: has the ranks 10-11; it is one rank, for example 10",
        "placement.critic: ranks 6-9 of critic and ranks 0-7 of actor, reference have ranks 6-7 in common",
        "placement.actor: tp=3 x cp=1 x pp=1 = 3 does not divide its 8 ranks. Products that fit: 1, 2, 4, 8",
        "placement.rollout: tp=4",
        "placement.critic: etp=1 x ep=3 does not divide the 4 ranks of a pipeline stage",
        "placement: ranks 13-15 have no role",
    ):
        assert word in text, text


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"rollout": "6-9"}, "ranks 8-9 are not there: the job has ranks 0-7."),
        ({"rollout": [1, 1]}, "rank 1 stands there more than once"),
        ({"rollout": {"nodes": "x"}}, "there is no node 'x'; there are 0: node 0"),
        ({"rollout": {"num_ranks": 9}}, "asks for 9 ranks, and 8 are left"),
        ({"rollout": {"num_nodes": 2}}, "asks for 2 whole nodes, and 1 are left"),
        ({"rollout": "all"}, "nothing is left for it"),
        ({"rollout": "reward", "reward": "rollout"}, "rollout -> reward -> rollout"),
        ({"critic": "rest", "actor": "rest"}, "takes the rest, and so does actor"),
        ({"critic": "rest"}, "the actor does where it is not placed"),
    ],
)
def test_places_that_cannot_be(said: dict[str, Any], words: str) -> None:
    assert words in "\n".join(refusals(8, **said))


def test_a_role_that_the_run_does_not_have() -> None:
    grids = {"actor": Sizes(), "rollout": Sizes(), "reward": None}
    text = "\n".join(refusals(4, grids=grids, critic=1, reward="reference"))
    assert "critic: is placed, and the run has no such role" in text
    assert "reward: shares the ranks of reference, and the run has no such role" in text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("rolout", "Did you mean `rollout`?"),
        ("node-a", "{nodes: node-a}"),
        ("7-3", "write 3-7"),
        ("1;2", "expected numbers and ranges"),
        ([], "no ranks at all"),
        ({"nodes": []}, "no nodes at all"),
        ({"num_ranks": 0}, "at least 1"),
        ({"nodes": "a", "ranks": 1}, "expected ranks"),
        ({"num_rank": 1}, "expected ranks"),
        (True, "expected ranks"),
        (-1, "expected ranks"),
        ("0-99999999999", "go up to"),
    ],
)
def test_words_that_say_nothing(value: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_wanted(value)
    assert words in str(caught.value)


def test_islands_are_worlds_of_their_own() -> None:
    grids = PPO | {"actor": Sizes(tp=2), "critic": Sizes(tp=2)}
    found = place(9, grids=grids, islands=2, rollout=8, coordinator="rollout")
    assert found.islands == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert [role_group.name for role_group in found.role_groups] == [
        "actor+critic+reference.0",
        "actor+critic+reference.1",
        "reward+rollout",
    ]
    with pytest.raises(PlacementError, match="8 ranks can be split into 1, 2, 4, 8"):
        place(9, islands=3, coordinator=8)
    with pytest.raises(PlacementError, match="2 ranks of an island"):
        place(9, islands=4, coordinator=8, grids=PPO | {"actor": Sizes(tp=4)})
    with pytest.raises(
        PlacementError, match="needs a rank that is none of the actor's"
    ):
        place(8, islands=2)


def test_the_smallest_job_that_a_placement_fits() -> None:
    grids = {"actor": Sizes(tp=2, pp=2), "rollout": Sizes(tp=2), "reward": None}
    assert smallest_world({}, grids) == 4
    assert (
        smallest_world(
            {"rollout": parse_wanted({"num_ranks": 2}), "coordinator": parse_wanted(0)},
            grids,
        )
        == 6 + 1
    )
    assert (
        smallest_world({"rollout": parse_wanted({"num_nodes": 2})}, grids, most=64)
        is None
    )


def test_a_configuration_as_it_stands() -> None:
    config = Config()
    grids = role_grids(config, ["actor", "critic"])
    section = PlacementConfig(rollout={"num_ranks": 1}, actor_devices=["0-2"])
    assert placement_mistakes(section, grids, 4) == []
    assert [m.key for m in placement_mistakes(section, grids, 3)] == [
        "placement.rollout"
    ]
    assert placement_mistakes(section, grids, None) == []
    assert [
        m.key for m in placement_mistakes(PlacementConfig(actor_devices=[9]), grids, 4)
    ] == ["placement.actor_devices"]


def random_place(rng: random.Random, size: int, num_nodes: int) -> Any:
    kind = rng.randrange(12)
    if kind >= 8:  # a half or a quarter of the job, so that many fit
        each = max(1, size // rng.choice([2, 4]))
        first = each * rng.randrange(size // each)
        return ranks_text(range(first, first + each))
    if kind == 0:
        return rng.choice(["rest", "all", *ROLES])
    if kind == 1:
        return {"num_ranks": rng.randint(1, size)}
    if kind == 2:
        return {
            "nodes": [rng.randrange(num_nodes + 1) for _ in range(rng.randint(1, 2))]
        }
    if kind == 3:
        return {"num_nodes": rng.randint(1, num_nodes)}
    first = rng.randrange(size)
    last = rng.randrange(first, size + (rng.random() < 0.1))
    return f"{first}-{last}" if kind % 2 else list(range(first, last + 1))


def random_job(
    seed: int,
) -> tuple[dict[str, Any], int, dict[str, Sizes | None], list[Node], int]:
    rng = random.Random(seed)
    per_node, num_nodes = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 3, 4])
    size = per_node * num_nodes
    roles = [
        role
        for role in ROLES[:5]
        if role in ("actor", "rollout", "reward") or rng.random() < 0.5
    ]
    grids: dict[str, Sizes | None] = {
        role: Sizes(
            tp=rng.choice([1, 1, 1, 2]),
            pp=rng.choice([1, 1, 2]),
            ep=rng.choice([1, 1, 1, 2]),
        )
        for role in roles
        if role != "reward"
    } | {"reward": None}
    claiming = rng.random() < 0.2
    nodes = [
        Node(
            f"n{i}",
            per_node,
            tuple(rng.sample(roles, rng.randint(1, 2))) if claiming else (),
        )
        for i in range(num_nodes)
    ]
    placed = [
        role
        for role in [*roles, "coordinator"]
        if rng.random() < (0.1 if claiming else 0.25)
    ]
    said = {role: random_place(rng, size, num_nodes) for role in placed}
    return said, size, grids, nodes, rng.choice([1, 1, 1, 2])


def check_consistent(
    found: ResolvedPlacement, grids: Mapping[str, Sizes | None], islands: int
) -> None:
    used = [rank for role_group in found.role_groups for rank in role_group.ranks]
    assert sorted(used) == list(range(found.size)), "every rank in one role group"
    assert list(found.ranks) == [
        role for role in ROLES if role in grids or role == "coordinator"
    ]
    assert len(found.ranks["coordinator"]) == 1
    assert [rank for island in found.islands for rank in island] == list(
        found.ranks["actor"]
    )
    for role_group in found.role_groups:
        for role in role_group.roles:
            assert set(role_group.ranks) <= set(found.ranks[role])
            grid = grids.get(role)
            if grid is not None:  # the same arithmetic as the grids that will be built
                shape = GridShape.fit(
                    role_group.size,
                    tp=grid.tp,
                    cp=grid.cp,
                    pp=grid.pp,
                    ep=grid.ep,
                    etp=grid.etp,
                )
                assert shape.world_size == role_group.size
    for role, ranks in found.ranks.items():
        assert list(ranks) == sorted(set(ranks)) and ranks
        assert all(role in found.roles_of(rank) for rank in ranks)
        if role != "coordinator":
            homes = [
                role_group
                for role_group in found.role_groups
                if role in role_group.roles
            ]
            assert sorted(
                rank for role_group in homes for rank in role_group.ranks
            ) == list(ranks)
            assert len(homes) == (islands if found.colocated(role, "actor") else 1)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_ten_thousand_random_placements_are_accepted_or_refused_with_a_reason(
    start: int,
) -> None:
    accepted = 0
    for seed in range(start, start + 500):
        said, size, grids, nodes, islands = random_job(seed)
        wanted = {role: parse_wanted(value) for role, value in said.items()}
        try:
            found = resolve(wanted, size, grids, nodes, islands=islands)
        except PlacementError as error:
            assert error.problems and all(problem.message for problem in error.problems)
            assert (
                problems_of(wanted, size, grids, nodes, islands=islands)
                == error.problems
            )
            continue
        accepted += 1
        check_consistent(found, grids, islands)
        again = resolve(
            dict(reversed(wanted.items())), size, grids, nodes, islands=islands
        )
        assert again == found, f"seed {seed}: the order of the entries matters"
    assert 20 < accepted < 480


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 99), min_size=1))
def test_ranks_read_back(ranks: set[int]) -> None:
    assert set(parse_ranks(ranks_text(ranks))) == ranks


def test_a_node_without_a_gpu_only_coordinates() -> None:
    """... behind all others, whose ranks then have no gap; anything else is told."""
    roles = {"rollout": 0, "critic": 1, "coordinator": 3, "actor": "rest"}
    found = place(4, [Node("a", 3, memory=8e10), Node("small", 1)], **roles)
    assert found.num_with_device == 3
    assert place(4, [Node("a", 3), Node("small", 1)], **roles).num_with_device == 4, (
        "no GPU anywhere: all are alike"
    )
    first = refusals(
        4,
        [Node("small", 1), Node("a", 3, memory=8e10)],
        **(roles | {"coordinator": 0, "rollout": 3}),
    )
    other = refusals(
        4,
        [Node("a", 3, memory=8e10), Node("small", 1)],
        **(roles | {"coordinator": 0, "rollout": 3}),
    )
    assert [
        "node 'small' has no GPU that can be used, others have, and coordinator is placed there"
        in first[0]
    ] == [True]
    assert [
        "others have, and rollout is placed there" in text or "reward, rollout" in text
        for text in other
    ] == [True]
