"""Calls that ask the program while they run, on simulated clusters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from megaverl.controller.core import CallTimeouts, Controller
from megaverl.controller.failures import CallFailed
from megaverl.controller.references import PendingCall
from tests.controller.every_rank import EveryRank
from tests.controller.simulation import SimulatedCluster, SimulatedOutcome

SEEDS = range(20)


class Worker:
    """Worker that asks, and notes what it does."""

    def __init__(self, cluster: SimulatedCluster, rank: int, trace: list[str]) -> None:
        self._cluster, self._rank, self._trace = cluster, rank, trace

    async def update(self, asking: list[int], count: int) -> list[int]:
        answers = []
        for number in range(count):
            question = 10 * self._rank + number if self._rank in asking else None
            answers.append(await self._cluster.ask(self._rank, question, int))
            self._trace.append(f"{self._rank} applies {answers[-1]}")
        return answers

    async def other(self) -> int:
        self._trace.append(f"{self._rank} other")
        return self._rank

    async def stay(self) -> int:
        await asyncio.get_running_loop().create_future()
        return 0


class Group(EveryRank):
    """Handle on the workers."""

    def update(self, asking: list[int], count: int) -> PendingCall[list[list[int]]]:
        return self.report_all("update", list[int], asking, count, asking=asking)

    def other(self) -> PendingCall[list[int]]:
        return self.report_all("other", int)

    def stay(self) -> PendingCall[int]:
        return self.report("stay", int)


def run(
    program: Callable[[Group, Group], Coroutine[Any, Any, Any]],
    seed: int = 0,
    timeouts: CallTimeouts | None = None,
) -> tuple[SimulatedOutcome, list[str]]:
    """Run a program on four ranks, two of each group."""
    trace: list[str] = []

    def start(controller: Controller) -> Coroutine[Any, Any, Any]:
        return program(
            Group("critic", (0, 1), controller), Group("actor", (2, 3), controller)
        )

    def make_workers(cluster: SimulatedCluster, rank: int) -> dict[str, object]:
        worker = Worker(cluster, rank, trace)
        return {"critic": worker, "actor": worker}

    return SimulatedCluster(4, seed).run(start, make_workers, timeouts=timeouts), trace


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_reach_every_rank_of_the_call(seed: int) -> None:
    async def program(critic: Group, actor: Group) -> object:
        update = actor.update([2, 3], 2)
        later = actor.other()
        asked = []
        while questions := await update.questions(int):
            asked.append(questions)
            update.answer(sum(questions))
        assert await update.questions(int) == [], "the call has ended"
        return [asked, await update, await later]

    outcome, trace = run(program, seed)
    assert outcome.result == [[[20, 30], [21, 31]], [[50, 52], [50, 52]], [2, 3]]
    for rank in (2, 3):
        own = [line for line in trace if line.startswith(str(rank))]
        assert own == [f"{rank} applies 50", f"{rank} applies 52", f"{rank} other"], (
            "a later call waits"
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_on_several_groups_are_answered_together(seed: int) -> None:
    async def program(critic: Group, actor: Group) -> object:
        updates = [critic.update([0], 2), actor.update([2], 2)]
        while questions := [
            one for update in updates for one in await update.questions(int)
        ]:
            for update in updates:
                update.answer(sum(questions))
        return [await update for update in updates]

    assert run(program, seed)[0].result == [[[20, 22]] * 2] * 2


def test_a_call_that_asks_nothing_is_not_waited_for() -> None:
    async def program(critic: Group, actor: Group) -> object:
        call = actor.stay()
        assert await call.questions(int) == []
        raise ValueError("the end")

    assert isinstance(run(program)[0].error, ValueError)


def test_ranks_that_wait_for_an_answer_leave_with_the_program() -> None:
    async def program(critic: Group, actor: Group) -> None:
        update = actor.update([2], 3)
        actor.other()
        await update.questions(int)
        raise ValueError("no decision")

    outcome, trace = run(program)
    assert isinstance(outcome.error, ValueError)
    assert outcome.rank_ends == ("the program raised ValueError: no decision",) * 4
    assert outcome.seconds < 2.0, "nobody had to be ended"
    assert trace == [], "calls behind the one that waited do not run"


def test_a_rank_that_waits_for_an_answer_is_not_blamed() -> None:
    """The actor's call is the later one, but the critic only waits for what the actor asks."""

    async def program(critic: Group, actor: Group) -> None:
        update = critic.update([0], 1)
        await update.questions(int)
        await actor.stay()

    outcome, _ = run(
        program,
        timeouts=CallTimeouts(call=5.0, slow=60.0, answer=0.5, grace=0.5, leave=2.0),
    )
    assert isinstance(outcome.error, CallFailed)
    assert outcome.error.ranks == (2, 3) and outcome.error.call == "actor.stay"
