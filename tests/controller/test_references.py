"""Values that the program has dropped: every rank that holds them, or received a copy, lets go of them."""

from __future__ import annotations

import weakref
from collections.abc import Coroutine
from typing import Any

from megaverl.controller.core import Controller
from megaverl.controller.groups import WorkerGroup
from megaverl.controller.references import PendingCall, Ref
from tests.controller.simulation import SimulatedCluster


class Samples:
    """Value that one rank makes and another one reads."""


class Worker:
    """Worker that notes the samples it has returned."""

    def __init__(self, living: weakref.WeakSet[Samples]) -> None:
        self._living = living

    def make(self) -> Samples:
        samples = Samples()
        self._living.add(samples)
        return samples

    def read(self, samples: Samples) -> int:
        return len(self._living)

    def rest(self) -> int:
        return len(self._living)


class Group(WorkerGroup):
    """Handle on the workers."""

    def make(self) -> PendingCall[Ref[Samples]]:
        return self.keep("make")

    def read(self, samples: Ref[Samples]) -> PendingCall[int]:
        return self.report("read", int, samples)

    def rest(self) -> PendingCall[int]:
        return self.report("rest", int)


def test_dropped_values_leave_makers_and_receivers() -> None:
    living: weakref.WeakSet[Samples] = weakref.WeakSet()

    async def program(makers: Group, readers: Group) -> list[int]:
        counts = []
        for _ in range(3):
            samples = await makers.make()
            counts.append(await readers.read(samples))
            del samples
            # The next call to a rank carries its releases.
            await makers.rest()
            counts.append(await readers.rest())
        return counts

    def start(controller: Controller) -> Coroutine[Any, Any, Any]:
        return program(
            Group("maker", (0,), controller), Group("reader", (1,), controller)
        )

    outcome = SimulatedCluster(2, seed=0).run(
        start, lambda cluster, rank: dict.fromkeys(("maker", "reader"), Worker(living))
    )
    assert outcome.result == [1, 0, 1, 0, 1, 0], outcome
