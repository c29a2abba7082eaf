"""Operators on roles' own ranks: what moves, what runs side by side, and that every rank ends up with what it needs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.dataflow import DataFlow, Operator
from megaverl.dataflow.on_ranks import FlowWorker, run_flow
from megaverl.dataflow.runner import OperatorRunner, Result
from megaverl.errors import ConfigError
from tests.controller.simulation import SimulatedCluster
from tests.launcher import Launcher

PLACES = {"actor": (0, 1), "critic": (2,), "rollout": (3, 4), "reward": (3, 4)}


def step() -> DataFlow:
    flow = DataFlow()
    flow.add_operator(
        Operator("rollouts", lambda prompts: [p * 2 for p in prompts], role="rollout")
    )
    flow.add_operator(Operator("scores", lambda rollouts: sum(rollouts), role="reward"))
    flow.add_operator(Operator("old", lambda rollouts: rollouts[0], role="actor"))
    flow.add_operator(Operator("values", lambda rollouts: len(rollouts), role="critic"))
    flow.add_operator(
        Operator(
            "advantages",
            lambda scores, values, old: scores - values - old,
            role="actor",
        )
    )
    flow.add_operator(
        Operator("critic_update", lambda advantages: None, outputs=(), role="critic")
    )
    flow.add_operator(
        Operator("updated", lambda advantages: advantages + 1, role="actor")
    )
    return flow


def run_all(flow: DataFlow, size: int, **given: Any) -> dict[int, Result]:
    """Run a flow as a program on simulated ranks; return what each has."""
    runners = {
        rank: OperatorRunner(flow.plan, given, {}, lambda name: nullcontext())
        for rank in range(size)
    }
    outcome = SimulatedCluster(size, seed=0).run(
        lambda controller: run_flow(runners[0], controller),
        lambda cluster, rank: {"flow": FlowWorker(runners[rank])},
    )
    if outcome.error is not None:
        raise outcome.error
    return {rank: runner.result for rank, runner in runners.items()}


def test_what_moves_and_what_runs_side_by_side() -> None:
    plan = step().compile(["prompts"], places=PLACES).plan
    assert plan.stages == (
        ("rollouts",),
        ("scores", "old", "values"),
        ("advantages",),
        ("critic_update", "updated"),
    )
    assert [
        (edge.value, edge.source, edge.dest, edge.takers) for edge in plan.transfers
    ] == [
        ("rollouts", (3, 4), (0, 1), ("old",)),
        ("rollouts", (3, 4), (2,), ("values",)),
        ("scores", (3, 4), (0, 1), ("advantages",)),
        ("values", (2,), (0, 1), ("advantages",)),
        ("advantages", (0, 1), (2,), ("critic_update",)),
    ]
    assert plan.ranks["updated"] == (0, 1)


def test_every_rank_runs_its_own_and_nothing_else() -> None:
    flow = step()
    flow.compile(["prompts"], places=PLACES)
    found = run_all(flow, 5, prompts=[1, 2])
    assert found[0] == found[1] == {**found[0], "updated": 6 - 2 - 2 + 1}
    assert set(found[3]) == {"prompts", "rollouts", "scores"} and set(found[2]) == {
        "prompts",
        "rollouts",
        "values",
        "advantages",
    }
    assert [span.operator for span in found[0].timeline] == [
        "old",
        "advantages",
        "updated",
    ]
    assert all(span.start <= span.end for span in found[0].timeline)


@given(st.data())
def test_the_result_does_not_depend_on_the_places(data: Any) -> None:
    """Chains and trees of operators on random worlds: what each rank has is what one rank alone would have."""
    worlds = [(0,), (1, 2), (3,)]
    count = data.draw(st.integers(2, 7))
    operators, home = [], []
    for i in range(count):
        takes = tuple(f"v{j}" for j in range(i) if data.draw(st.booleans())) or (
            f"v{i - 1}" if i else "start",
        )
        home.append(data.draw(st.integers(0, 2)))
        operators.append(
            Operator(
                f"v{i}",
                lambda i=i, **given: sum(given.values()) + i,
                takes,
                role=f"role{home[-1]}",
            )
        )
    alone = DataFlow(operators).compile(["start"]).run(start=1)
    places = {f"role{n}": world for n, world in enumerate(worlds)}
    flow = DataFlow(operators).compile(["start"], places=places)
    for found in run_all(flow, 4, start=1).values():
        assert all(alone[name] == value for name, value in found.items())
    edges = [(edge.value, rank) for edge in flow.plan.transfers for rank in edge.dest]
    assert len(edges) == len(set(edges)), "nothing goes to a rank twice"


def test_operators_are_put_between_others() -> None:
    """One watches, one changes what all later ones see; what the changed value itself rests on does not see it."""
    seen: list[Any] = []
    flow = step()
    flow.add_operator(
        Operator(
            "watch",
            lambda rollouts: seen.append(("watch", rollouts)),
            outputs=(),
            role="rollout",
        )
    )
    flow.add_operator(
        Operator(
            "clip", lambda scores: min(scores, 3), outputs=("scores",), role="reward"
        )
    )
    flow.add_operator(
        Operator("last", lambda updated: seen.append(("last", updated)), outputs=()),
        after="updated",
    )
    flow.add_operator(
        Operator("first", lambda prompts: seen.append(("first", prompts)), outputs=()),
        before="rollouts",
    )
    flow.compile(["prompts"])
    assert flow.order.index("first") < flow.order.index("rollouts")
    assert flow.run(prompts=[1, 2])["updated"] == 3 - 2 - 2 + 1
    assert [name for name, _ in seen] == ["first", "watch", "last"]
    twice = DataFlow(
        [Operator("x", lambda: 1), Operator("a", lambda x: x + 1, outputs=("x",))]
    )
    twice.add_operator(Operator("b", lambda x: x * 10, outputs=("x",)))
    assert twice.compile().run()["x"] == 20
    with pytest.raises(
        ConfigError, match="no operator 'upated' to put 'z' beside: rollouts,"
    ):
        step().add_operator(Operator("z", lambda: None), after="upated")


def test_a_change_moves_from_where_it_was_made() -> None:
    flow = DataFlow(
        [
            Operator("x", lambda: 1, role="rollout"),
            Operator("y", lambda x: x, role="critic"),
        ]
    )
    flow.add_operator(Operator("more", lambda x: x + 1, outputs=("x",), role="actor"))
    flow.compile(places=PLACES)
    assert [(e.value, e.maker, e.source, e.dest) for e in flow.plan.transfers] == [
        ("x", "x", (3, 4), (0, 1)),
        ("x", "more", (0, 1), (2,)),
    ]
    assert run_all(flow, 5)[2]["y"] == 2


def test_every_change_starts_from_the_one_before() -> None:
    """And those that only read take the last change, wherever each is made."""
    roles = ["rollout", "actor", "critic", "actor"]
    flow = DataFlow(
        [
            Operator("x", lambda: 1, role="rollout"),
            Operator("seen", lambda x: x, role="reward"),
        ]
    )
    for number, role in enumerate(roles, start=2):
        flow.add_operator(
            Operator(
                f"times{number}",
                lambda x, number=number: x * number,
                ("x",),
                ("x",),
                role=role,
            )
        )
    flow.compile(places=PLACES)
    chain = ["x", *(f"times{number}" for number in range(2, 6))]
    assert {name: flow.plan.makers[name]["x"] for name in chain[1:]} == dict(
        zip(chain[1:], chain, strict=False)
    )
    assert flow.plan.makers["seen"] == {"x": "times5"}
    alone = DataFlow([Operator("x", lambda: 1)])
    for number in range(2, 6):
        alone.add_operator(
            Operator(
                f"times{number}", lambda x, number=number: x * number, ("x",), ("x",)
            )
        )
    assert alone.compile().run()["x"] == 2 * 3 * 4 * 5


def test_shapes_are_compared_before_and_in_the_run() -> None:
    import torch

    make = Operator(
        "values", lambda n: torch.zeros(4, n), shapes={"values": ("B", "R")}
    )
    take = Operator("out", lambda values: values.sum(1), shapes={"values": ("B", "S")})
    with pytest.raises(
        ConfigError,
        match=r"'values' has the shape .*'R'. for operator 'values', and .*'S'.",
    ):
        DataFlow([make, take]).compile(["n"])
    with pytest.raises(
        ConfigError, match="declares the shape of 'z', which it neither takes nor gives"
    ):
        DataFlow([Operator("a", lambda: 1, shapes={"z": (1,)})]).compile()
    right = Operator(
        "out",
        lambda values: values.sum(1),
        shapes={"values": ("B", "R"), "out": ("B",)},
    )
    flow = DataFlow([make, right]).compile(["n"])
    assert flow.run(n=3)["out"].shape == (4,)
    wrong = Operator("out", lambda values: values.sum(0), shapes={"out": ("B",)})
    with pytest.raises(
        ConfigError,
        match=r"operator 'out': 'out' has the shape \[3\]; declared is \['B'\], with B=4",
    ):
        DataFlow([make, wrong]).compile(["n"]).run(n=3)


def test_places_that_cannot_be_read_are_named() -> None:
    with pytest.raises(
        ConfigError,
        match="places: 'critic' is on '0-1'; expected its ranks, such as .0, 1.",
    ) as caught:
        step().compile(
            ["prompts"], places={**PLACES, "critic": "0-1", "reward": [], "actor": [-1]}
        )  # type: ignore[dict-item]
    assert len(str(caught.value).splitlines()) == 3


def test_a_role_without_a_place_is_named() -> None:
    with pytest.raises(
        ConfigError,
        match="operator 'a' runs on the role 'judge', which has no place; there are: ",
    ):
        DataFlow([Operator("a", lambda: 1, role="judge")]).compile(places=PLACES)


PROGRAM = """
from megaverl import DataFlow, Operator

flow = DataFlow()
flow.add_operator(Operator("rollout", lambda prompts: [p + "!" for p in prompts], role="rollout"))
flow.add_operator(Operator("lengths", lambda rollout: [len(text) for text in rollout], role="reward"))
flow.compile(given=["prompts"], places={"rollout": [0], "reward": [1]})
for prompts in (["a", "bcd"], ["ef"]):
    result = flow.run(prompts=prompts)
    print([span.operator for span in result.timeline], result.get("lengths"), flush=True)
"""


def test_ranks_of_torchrun_run_a_flow(launch: Launcher, tmp_path: Path) -> None:
    """Each its own operators, as often as the program runs the flow; nothing else has joined them before."""
    program = tmp_path / "my_flow.py"
    program.write_text(PROGRAM)
    ended = launch.command([str(program)], logs=tmp_path / "logs", ranks=2)
    assert ended.codes == [0, 0], ended.text
    first, second = (output.splitlines() for output in ended.output)
    assert [line for line in first if line.startswith("[")] == ["['rollout'] None"] * 2
    assert [line for line in second if line.startswith("[")] == [
        "['lengths'] [2, 4]",
        "['lengths'] [3]",
    ]
