"""The controller's watch names ranks that stall or are silent in simulated time, before any deadline of a call."""

from __future__ import annotations

import asyncio

import pytest

from megaverl.controller.core import CallTimeouts, Controller
from megaverl.controller.failures import CallFailed
from megaverl.controller.groups import WorkerGroup
from megaverl.controller.references import PendingCall
from megaverl.distributed.heartbeat import Heartbeat, RankWatch
from tests.controller.simulation import (
    Fault,
    Latencies,
    SimulatedCluster,
    SimulatedOutcome,
)

BEGIN = 20.0  # virtual seconds until the call that stalls
WATCH = RankWatch(stalled_after=5.0, lost_after=8.0)
FOREVER = 10_000.0


class Worker:
    """Worker whose rank 1 works for too long in `update`, while rank 0 waits for it in a collective."""

    def __init__(self, rank: int, since: dict[int, float]) -> None:
        self._rank, self._since = rank, since

    async def rest(self) -> int:
        await asyncio.sleep(BEGIN)
        return 0

    async def update(self) -> int:
        self._since[self._rank] = asyncio.get_running_loop().time()
        await asyncio.sleep(FOREVER)
        return 0


class Group(WorkerGroup):
    def rest(self) -> PendingCall[int]:
        return self.report("rest", int)

    def update(self) -> PendingCall[int]:
        return self.report("update", int)


async def train(controller: Controller, failed_at: list[float]) -> None:
    """Update on ranks 0 and 1, while rank 2 has nothing to do. Note when that has failed."""
    await Group("actor", range(3), controller).rest()
    try:
        await Group("actor", (0, 1), controller).update()
    except CallFailed:
        failed_at.append(asyncio.get_running_loop().time())
        raise


def run(
    *faults: Fault,
    watch: RankWatch | None = WATCH,
    latencies: Latencies | None = None,
) -> tuple[SimulatedOutcome, float]:
    """Return the end of a run, and the seconds from the start of the update to its failure (0: it had not begun)."""
    since: dict[int, float] = {}
    failed_at: list[float] = []

    def observe(rank: int) -> Heartbeat:
        is_inside = rank in since
        waited = cluster._loop.time() - since.get(rank, 0.0)
        return Heartbeat(
            doing="step 1: actor_update" if is_inside else "start",
            seconds=waited,
            waits_for="ranks" if rank == 0 and is_inside else "",
            waited=waited if rank == 0 and is_inside else 0.0,
            where="update.py:7 (update)",
            host="node/1",
            pid=7,
        )

    cluster = SimulatedCluster(
        3, seed=3, faults=faults, latencies=latencies, observe=observe
    )
    timeouts = CallTimeouts(call=60.0)
    outcome = cluster.run(
        lambda controller: train(controller, failed_at),
        lambda cluster, rank: {"actor": Worker(rank, since)},
        timeouts=timeouts,
        watch=watch,
    )
    return outcome, failed_at[0] - min(since.values()) if failed_at else 0.0


def test_a_rank_that_stalls_is_named_within_two_seconds() -> None:
    """Rank 2, which waits for a call as long as the others, is not blamed."""
    outcome, seconds = run()
    assert isinstance(outcome.error, CallFailed)
    assert (outcome.error.ranks, outcome.error.call) == ((1,), "actor.update")
    text = str(outcome.error)
    assert text.startswith("rank 1 stalls: it was in step 1: actor_update for")
    assert text.endswith("(run.timeout_minutes). Call: actor.update")
    assert WATCH.stalled_after < seconds < WATCH.stalled_after + 2.0


@pytest.mark.parametrize("event", [8, 25, 40])
def test_a_rank_that_is_silent_is_named(event: int) -> None:
    """A frozen process keeps its connection, and answers nothing."""
    outcome, _ = run(Fault("freeze", rank=2, event=event))
    assert isinstance(outcome.error, CallFailed)
    assert outcome.error.ranks == (2,)
    assert str(outcome.error).startswith("rank 2 has not been heard of for")


def test_ranks_whose_answers_are_always_late_are_not_silent() -> None:
    """Every answer comes after the controller has stopped waiting for it."""
    slow = Latencies(message=(0.8, 0.9))
    assert 2 * slow.message[0] > CallTimeouts().answer
    outcome, _ = run(latencies=slow)
    assert str(outcome.error).startswith("rank 1 stalls: it was in step 1")


def test_ranks_that_wait_for_a_silent_one_do_not_wait_for_each_other() -> None:
    """Rank 1 freezes inside the update. Rank 0 has then waited for too long before rank 1 counts as lost."""
    outcome, seconds = run(Fault("freeze", rank=1, event=280))
    assert isinstance(outcome.error, CallFailed)
    assert outcome.error.ranks == (1,)
    assert str(outcome.error).startswith("rank 1 has not been heard of for")
    assert str(outcome.error).endswith("Call: actor.update")
    assert seconds > WATCH.lost_after > WATCH.stalled_after


def test_without_a_watch_the_deadline_of_the_call_ends_the_run() -> None:
    outcome, _ = run(watch=None)
    assert isinstance(outcome.error, CallFailed)
    assert "did not finish actor.update in time (60 s)" in str(outcome.error)
