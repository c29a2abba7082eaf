"""Which gradients are decided on together, and what the ranks hear: `program.finish_updates` on simulated ranks."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest

from megaverl.config import Config
from megaverl.controller.core import Controller
from megaverl.controller.failures import CallFailed
from megaverl.controller.groups import WorkerGroup
from megaverl.controller.references import Ref
from megaverl.distributed.placement import Node, ResolvedPlacement, parse_wanted
from megaverl.distributed.placement_resolver import resolve
from megaverl.errors import TrainingStopped
from megaverl.trainer.islands import reporting_ranks
from megaverl.trainer.program import finish_updates, policy_step
from megaverl.trainer.role_groups import Run, make_run
from megaverl.workers.decisions import Decision, GradientReport, UpdateCounts, Verdict
from tests.controller.simulation import SimulatedCluster, SimulatedOutcome

GRIDS = ("actor", "critic", "reference", "reward", "rollout", "coordinator")
PPO = {"algorithm": {"advantage": "gae"}}
APART = {"rollout": "0", "critic": "1-2", "actor": "3-4", "coordinator": "5"}
SHARED = {"rollout": "0", "critic": "1-4", "actor": "1-4", "coordinator": "5"}
GOOD = GradientReport("actor", 0, UpdateCounts(), tokens=8.0, norm=1.0)
# By rank and number of the mini-batch: what is wrong with the gradient.
Faults = Mapping[tuple[int, int], Mapping[str, Any]]


def place(wanted: Mapping[str, str], islands: int = 1) -> ResolvedPlacement:
    ranks = {role: parse_wanted(value) for role, value in wanted.items()}
    return resolve(ranks, 6, dict.fromkeys(GRIDS), [Node("here", 6)], islands=islands)


def make_config(**settings: Any) -> Config:
    return Config.model_validate({"model": {"path": "model"}, **PPO, **settings})


class Worker:
    """Worker of a trained role that reports on two mini-batches and notes the verdicts."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        rank: int,
        role: str,
        placement: ResolvedPlacement,
        asks: bool,
        reports: bool,
        faults: Faults,
        heard: list[str],
    ) -> None:
        self._cluster, self._rank, self._role, self._asks, self._reports = (
            cluster,
            rank,
            role,
            asks,
            reports,
        )
        self._island = next(
            (number for number, ranks in enumerate(placement.islands) if rank in ranks),
            0,
        )
        self._faults, self._heard = faults, heard

    async def update(self, rollouts: object, experience: object, step: int) -> bool:
        for number in range(2 if self._asks else 0):
            fault = self._faults.get((self._rank, number), {})
            report = replace(GOOD, role=self._role, island=self._island, **fault)
            decision = await self._cluster.ask(
                self._rank, report if self._reports else None, Decision
            )
            self._heard.append(f"{self._role} {self._rank} {decision.verdict.name}")
            if decision.verdict is Verdict.STOP:
                raise TrainingStopped(f"{self._role} is at fault")
        return True


class Maker:
    """Worker of all ranks that makes a value for the updates to refer to."""

    def make(self) -> int:
        return 1


class IslandWorker:
    def join_updates(self, role: str, step: int) -> bool:
        return True


async def update_together(run: Run, value: Ref[Any]) -> None:
    """Start updates of critic and actor, and finish them as the built-in step does."""
    assert run.critic is not None
    await finish_updates(
        run, [group.begin_update(value, value, 0) for group in (run.critic, run.actor)]
    )


def finish(
    config: Config,
    placement: ResolvedPlacement,
    faults: Faults | None = None,
    update: Callable[[Run, Ref[Any]], Awaitable[None]] = update_together,
) -> tuple[SimulatedOutcome, list[str]]:
    """Run the updates of critic and actor. Return the outcome and what each rank heard, in order."""
    heard: list[str] = []

    async def program(controller: Controller) -> None:
        run = make_run(
            config,
            controller,
            placement,
            step=policy_step,
            has_engines=False,
            restored_steps=frozenset(),
        )
        await update(run, await WorkerGroup("maker", range(6), controller).keep("make"))

    def make_workers(cluster: SimulatedCluster, rank: int) -> dict[str, object]:
        workers: dict[str, object] = {"maker": Maker(), "islands": IslandWorker()}
        for role in ("actor", "critic"):
            reporting = reporting_ranks(config, placement, role)
            asks, reports = bool(reporting), rank in reporting
            workers[role] = Worker(
                cluster, rank, role, placement, asks, reports, faults or {}, heard
            )
        return workers

    def start(controller: Controller) -> Coroutine[Any, Any, None]:
        return program(controller)

    return SimulatedCluster(6, seed=1).run(start, make_workers), sorted(heard)


@pytest.mark.parametrize(
    ("settings", "wanted", "islands", "actor", "critic"),
    [
        ({}, APART, 1, (3,), (1,)),
        ({}, SHARED, 1, (), ()),
        ({"algorithm": {"advantage": "grpo"}}, APART, 1, (), ()),
        ({}, SHARED, 2, (1, 3), (1, 3)),
        ({"algorithm": {"advantage": "grpo"}}, APART, 2, (3, 4), (1,)),
        ({"coordinator": {"islands_every": 4}}, APART, 2, (), ()),
        ({"trainer": {"program": "mine:step"}}, APART, 1, (3,), (1,)),
    ],
)
def test_who_reports_to_the_program(
    settings: dict[str, Any],
    wanted: dict[str, str],
    islands: int,
    actor: tuple[int, ...],
    critic: tuple[int, ...],
) -> None:
    config, placement = make_config(**settings), place(wanted, islands)
    assert reporting_ranks(config, placement, "actor") == actor
    assert (
        not config.uses_critic or reporting_ranks(config, placement, "critic") == critic
    )
    assert reporting_ranks(config, placement, "reward_model") == (
        actor if islands > 1 else ()
    )


def test_actor_and_critic_on_separate_ranks_skip_together() -> None:
    outcome, heard = finish(
        make_config(), place(APART), {(1, 0): {"has_overflow": True}}
    )
    assert outcome.error is None
    each = [
        f"{role} {rank}"
        for role, ranks in (("actor", (3, 4)), ("critic", (1, 2)))
        for rank in ranks
    ]
    assert heard == sorted(
        f"{who} {verdict}" for who in each for verdict in ("APPLY", "SKIP")
    )


def test_only_the_model_at_fault_ends_the_run() -> None:
    outcome, heard = finish(make_config(), place(APART), {(1, 1): {"norm": math.nan}})
    assert (
        isinstance(outcome.error, CallFailed) and outcome.error.call == "critic.update"
    )
    assert "critic is at fault" in str(outcome.error)
    assert heard == [
        "actor 3 APPLY",
        "actor 4 APPLY",
        *(f"critic {n} {v}" for n in (1, 2) for v in ("APPLY", "STOP")),
    ]


def test_islands_on_shared_ranks_decide_on_one_model_after_the_other() -> None:
    outcome, heard = finish(
        make_config(), place(SHARED, islands=2), {(3, 0): {"tokens": 0.0}}
    )
    assert outcome.error is None
    for role in ("actor", "critic"):
        # Rank 3 has no tokens in the first mini-batch of either model.
        assert [line.split()[2] for line in heard if line.startswith(role)] == [
            "APPLY",
            "SKIP",
        ] * 4


def test_islands_that_diverge_end_the_run() -> None:
    outcome, _ = finish(
        make_config(), place(SHARED, islands=2), {(3, 1): {"norm": 1.1}}
    )
    assert isinstance(outcome.error, CallFailed) and "is at fault" in str(outcome.error)


def test_ranks_that_decide_by_themselves_are_not_asked() -> None:
    config = make_config(coordinator={"islands_every": 4})
    outcome, heard = finish(config, place(APART, islands=2))
    assert outcome.error is None and heard == []


@pytest.mark.parametrize("awaits", [False, True])
def test_an_update_of_a_users_program_decides_on_its_own_gradients_alone(
    awaits: bool,
) -> None:
    """The critic skips a mini-batch and the actor does not, whether or not the program awaits the updates."""

    async def update_alone(run: Run, value: Ref[Any]) -> None:
        assert run.critic is not None
        updates = [group.update(value, value, 0) for group in (run.actor, run.critic)]
        if awaits:
            assert [await update for update in updates] == [True, True]
        # As in a run, a later call to all ranks is awaited before the program ends.
        await WorkerGroup("maker", range(6), run.controller).keep("make")

    outcome, heard = finish(
        make_config(), place(APART), {(1, 0): {"tokens": 0.0}}, update_alone
    )
    assert outcome.error is None
    verdicts = {"actor": ("APPLY", "APPLY"), "critic": ("SKIP", "APPLY")}
    ranks = {"actor": (3, 4), "critic": (1, 2)}
    expected = [
        f"{role} {rank} {verdict}"
        for role in ranks
        for rank in ranks[role]
        for verdict in verdicts[role]
    ]
    assert heard == sorted(expected)
