"""The call that a lost rank is named with: one that it runs, and not one for which it only sent rows."""

from __future__ import annotations

import asyncio

from megaverl.controller.core import Controller
from megaverl.controller.failures import CallFailed
from megaverl.controller.groups import WorkerGroup, remote
from megaverl.controller.references import Ref
from tests.controller.simulation import Fault, SimulatedCluster, SimulatedOutcome


class Worker:
    """Worker whose calls take some time."""

    def __init__(self, cluster: SimulatedCluster, rank: int) -> None:
        self._cluster, self._rank = cluster, rank

    async def make(self) -> int:
        return 7

    async def take(self, value: int) -> int:
        await self._cluster.work(self._rank, (1.0, 1.0))
        return value

    async def work(self) -> int:
        await self._cluster.work(self._rank, (1.0, 1.0))
        return 0


class Group(WorkerGroup):
    @remote
    def make(self) -> Ref[int]:
        """A value for the other rank."""

    @remote
    def take(self, value: Ref[int]) -> int:
        """A call for which rank 0 sends its value to rank 1."""

    @remote
    def work(self) -> int:
        """A call that rank 0 runs after that."""


async def program(controller: Controller) -> list[int]:
    actor, critic = Group("actor", (0,), controller), Group("critic", (1,), controller)
    value = await actor.make()
    return await asyncio.gather(critic.take(value), actor.work())


def run(*faults: Fault) -> SimulatedOutcome:
    cluster = SimulatedCluster(2, seed=1, faults=faults)
    return cluster.run(
        program,
        lambda cluster, rank: dict.fromkeys(("actor", "critic"), Worker(cluster, rank)),
    )


def test_a_lost_rank_is_named_with_a_call_that_it_runs() -> None:
    clean = run()
    assert clean.result == [7, 0]
    named = set()
    for event in range(clean.num_events):
        error = run(Fault("kill", rank=0, event=event)).error
        if error is not None:
            assert isinstance(error, CallFailed) and error.ranks == (0,)
            named.add(error.call)
    assert named >= {"actor.make", "actor.work"}
    assert "critic.take" not in named
