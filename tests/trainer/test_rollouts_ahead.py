"""The asynchronous program in virtual time: which weights generate which step, however long anything takes."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.config import Config
from megaverl.controller.core import CallTimeouts, Controller
from megaverl.controller.failures import CallFailed
from megaverl.distributed.grid import Sizes
from megaverl.distributed.placement import parse_wanted
from megaverl.distributed.placement_resolver import resolve
from megaverl.trainer.program import asynchronous_step, sample_ahead, train
from megaverl.trainer.role_groups import make_run
from megaverl.trainer.rollouts_ahead import RolloutsAhead
from megaverl.trainer.sample_rows import SampleFacts
from megaverl.trainer.schedule import Schedule
from tests.controller.simulation import SimulatedCluster

GRIDS = {"actor": Sizes(), "rollout": Sizes(), "reward": None}
PLACEMENT = resolve({"rollout": parse_wanted(0), "actor": parse_wanted(1)}, 2, GRIDS)
FACTS = SampleFacts([1], [1], [0], [0])
ENGINE, ACTOR = 0, 1
SCHEDULES: dict[str, Any] = {
    "num_steps": st.integers(1, 7),
    "max_staleness": st.integers(1, 3),
    "save_interval": st.integers(0, 3),
    "generate": st.floats(0.001, 10.0),
    "update": st.floats(0.001, 10.0),
    "seed": st.integers(0, 1000),
}


class Rollouts:
    """Samples that describe themselves."""

    def describe(self) -> SampleFacts:
        return FACTS


class Worker:
    """All roles of a rank; each call takes a random time.

    Args:
        slowest: by method, the seconds that a call takes at most. steady: share of them that it takes at least.

    Attributes:
        trace: what the rank has done, in order.
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        rank: int,
        slowest: dict[str, float],
        steady: float,
        fails: str,
    ) -> None:
        self._cluster, self._rank, self._slowest, self._steady, self._fails = (
            cluster,
            rank,
            slowest,
            steady,
            fails,
        )
        self.trace: list[str] = []

    async def _work(self, name: str, step: int | None = None) -> None:
        label = name if step is None else f"{name} {step}"
        self.trace.append(label)
        slowest = self._slowest.get(name, 0.001)
        await self._cluster.work(self._rank, (self._steady * slowest, slowest))
        if label == self._fails:
            raise RuntimeError("planted")

    async def generate(self, step: int) -> Rollouts:
        await self._work("generate", step)
        return Rollouts()

    async def begin_responses(self, step: int) -> None:
        await self._work("generate", step)

    async def finish_responses(self, step: int) -> Rollouts:
        await self._work("finish", step)
        return Rollouts()

    async def score(self, rollouts: Any, step: int) -> str:
        await self._work("score", step)
        return "scores"

    async def assign(self, value: int, facts: SampleFacts) -> dict[int, list[int]]:
        return {ACTOR: [0]}

    async def deliver(self, rollouts: Any, values: list[Any]) -> None:
        await self._work("deliver")

    async def old_log_probs(self, rollouts: Any, step: int) -> str:
        await self._work("old_log_probs", step)
        return "log_probs"

    async def advantages(self, rollouts: Any, scores: Any, signals: list[Any]) -> str:
        return "experience"

    async def update(self, rollouts: Any, experience: Any, step: int) -> bool:
        await self._work("update", step)
        return True

    async def sync(self, is_updated: bool) -> None:
        await self._work("sync")

    async def begin_step(self, step: int) -> None:
        self.trace.append(f"begin {step}")

    async def take(self, rollouts: Any, scores: Any) -> None: ...

    async def report_step(self, done: int) -> None:
        await self._work("report", done)

    async def save_if_due(self, done: int) -> None:
        self.trace.append(f"save {done}")


def run_asynchronously(
    num_steps: int,
    max_staleness: int,
    save_interval: int,
    slowest: dict[str, float],
    seed: int,
    *,
    steady: float = 0.0,
    fails: str = "",
    is_in_flight: bool = False,
) -> tuple[list[str], list[str], float]:
    """Run the program; return what the engine's and the actor's rank have done, and the seconds that it took."""
    config = Config.model_validate(
        {
            "model": {"path": "model"},
            "trainer": {
                "steps": num_steps,
                "validate_at_start": False,
                "validate_every": 0,
            },
            "algorithm": {"name": "grpo", "group_size": 4},
            "rollout": {
                "async_rollout": True,
                "max_staleness": max_staleness,
                "in_flight_updates": is_in_flight,
            },
            "checkpoint": {"save_interval": save_interval},
        }
    )
    schedule = Schedule.of(config, PLACEMENT)
    workers: dict[int, Worker] = {}

    def make_workers(cluster: SimulatedCluster, rank: int) -> dict[str, object]:
        workers[rank] = Worker(cluster, rank, slowest, steady, fails)
        roles = (
            "session",
            "recorder",
            "receiver",
            "rollout",
            "reward",
            "actor",
            "weights",
        )
        return dict.fromkeys(roles, workers[rank])

    def program(controller: Controller) -> Coroutine[Any, Any, None]:
        run = make_run(
            config,
            controller,
            PLACEMENT,
            step=asynchronous_step,
            has_engines=True,
            restored_steps=frozenset(),
        )
        run.scores_ahead = True
        run.ahead = RolloutsAhead(
            schedule,
            partial(sample_ahead, run),
            0,
            num_steps,
            is_in_flight=is_in_flight,
        )
        return train(run, 0)

    outcome = SimulatedCluster(2, seed).run(
        program, make_workers, timeouts=CallTimeouts(call=1e4, slow=1e5)
    )
    if outcome.error is not None:
        raise outcome.error
    return workers[ENGINE].trace, workers[ACTOR].trace, outcome.seconds


@settings(max_examples=150, deadline=None)
@given(
    **SCHEDULES,
    score=st.floats(0.001, 10.0),
)
def test_a_step_is_generated_with_the_same_weights_however_long_anything_takes(
    num_steps: int,
    max_staleness: int,
    save_interval: int,
    generate: float,
    update: float,
    score: float,
    seed: int,
) -> None:
    slowest = {
        "generate": generate,
        "update": update,
        "score": score,
        "sync": 0.1,
        "deliver": 0.1,
    }
    engine, actor, _ = run_asynchronously(
        num_steps, max_staleness, save_interval, slowest, seed
    )
    num_updates = 0
    for action in engine:
        num_updates += action == "sync"
        if action.startswith("generate "):
            step = int(action.split()[1])
            ahead = range(max(0, step - max_staleness), step + 1)
            barriers = [
                done for done in ahead if save_interval and done % save_interval == 0
            ]
            assert num_updates == max([step - max_staleness, *barriers, 0])
    assert [action for action in engine if action.startswith("generate ")] == [
        f"generate {n}" for n in range(num_steps)
    ]
    assert [action for action in actor if action.startswith("update ")] == [
        f"update {n}" for n in range(num_steps)
    ]
    assert [action for action in engine if action.startswith("save ")] == [
        f"save {n + 1}" for n in range(num_steps)
    ]


@settings(max_examples=150, deadline=None)
@given(
    **SCHEDULES,
    finish=st.floats(0.001, 10.0),
)
def test_weights_in_flight_come_in_the_middle_of_the_same_responses(
    num_steps: int,
    max_staleness: int,
    save_interval: int,
    generate: float,
    finish: float,
    update: float,
    seed: int,
) -> None:
    """The rest of a step's responses has the weights of one update more than their
    beginning, unless a checkpoint has kept the engines from being ahead.
    """
    slowest = {
        "generate": generate,
        "finish": finish,
        "update": update,
        "sync": 0.1,
        "deliver": 0.1,
    }
    engine, _, _ = run_asynchronously(
        num_steps, max_staleness, save_interval, slowest, seed, is_in_flight=True
    )
    num_updates = 0
    begun: dict[int, int] = {}
    for action in engine:
        num_updates += action == "sync"
        kind, _, number = action.partition(" ")
        if kind == "generate":
            begun[int(number)] = num_updates
        elif kind == "finish":
            step = int(number)
            assert num_updates == max(begun[step], min(step, step - max_staleness + 1))
    halves = [
        action for action in engine if action.startswith(("generate ", "finish "))
    ]
    assert halves == [
        f"{kind} {n}" for n in range(num_steps) for kind in ("generate", "finish")
    ]


def test_engines_and_training_work_side_by_side() -> None:
    """A step takes as long as the longer of the two, not as both."""
    slowest = {
        "generate": 10.0,
        "update": 10.0,
        "sync": 0.001,
        "deliver": 0.001,
        "score": 0.001,
    }
    # Nobody is ahead of a checkpoint, and here there is one after every step.
    in_turn = run_asynchronously(20, 1, 1, slowest, seed=1, steady=0.95)[2]
    beside = run_asynchronously(20, 1, 0, slowest, seed=1, steady=0.95)[2]
    assert 380 < in_turn < 405
    assert 200 < beside < 215


@pytest.mark.parametrize("where", ["generate 3", "score 2", "update 1"])
def test_whatever_fails_ends_the_program_with_its_name(where: str) -> None:
    with pytest.raises(CallFailed, match="planted") as error:
        run_asynchronously(5, 2, 0, {}, seed=0, fails=where)
    assert error.value.call.endswith(f".{where.split()[0]}")
