"""Samples that the engines generate ahead of training (`rollout.async_rollout`), for a program.

    engines    gen 0 | gen 1 | sync 1 | gen 2     | sync 2 | gen 3
    actor      .     | train 0 ------^  train 1 ----------^  train 2       max_staleness: 1

Which weights generate a step's responses follows from the step's number alone, never from who is faster. A resumed run
therefore generates the same responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from megaverl.trainer.role_groups import EarlySamples, Run

# Number of a step -> steps that must be behind all ranks when the engines begin it.
BeginsAfter = Callable[[int], int]


class RolloutsAhead:
    """Task that generates samples while the program trains on earlier ones.

    Args:
        sample: generates the samples of a step, and scores them where whoever scores may be ahead too.
        first_step, last_step: steps of the run; the last one excluded.

    Example:
        ahead = RolloutsAhead(run, sample, lambda step: max(0, step - 1), 0, 100)
        for step in range(100):
            samples = await ahead.take(step)
            ...                             # train
            await ahead.until_begun(step)
            ...                             # new weights for the engines
    """

    def __init__(
        self,
        run: Run,
        sample: Callable[[Run, int], Awaitable[EarlySamples]],
        begins_after: BeginsAfter,
        first_step: int,
        last_step: int,
    ) -> None:
        self._run, self._sample, self._begins_after = run, sample, begins_after
        self._first_step, self._last_step = first_step, last_step
        self._num_done = first_step  # steps behind all ranks
        self._num_begun = first_step  # steps whose generation has begun
        self._samples: dict[int, EarlySamples] = {}
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def take(self, step: int) -> EarlySamples:
        """Return the samples of a step, once they are there; all steps before are behind all ranks."""
        if self._task is None:
            self._task = asyncio.create_task(self._generate())
            self._task.add_done_callback(lambda task: asyncio.ensure_future(self._notify()))
        self._num_done = step
        await self._notify()
        await self._wait(lambda: step in self._samples)
        return self._samples.pop(step)

    async def until_begun(self, step: int) -> None:
        """Wait until the engines have begun everything that is generated with the weights before the step's update."""
        due = [later for later in range(step, self._last_step) if self._begins_after(later) <= step]
        await self._wait(lambda: self._num_begun > max(due))

    def stop(self) -> None:
        """Begin nothing more."""
        if self._task is not None:
            self._task.cancel()

    async def _generate(self) -> None:
        for step in range(self._first_step, self._last_step):
            earliest = self._begins_after(step)
            await self._wait_until_done(earliest)
            generation = asyncio.ensure_future(self._sample(self._run, step))
            await asyncio.sleep(0)  # until it has made its first call; calls of others that wait for it come after
            self._num_begun = step + 1
            await self._notify()
            self._samples[step] = await generation
            await self._notify()

    async def _wait_until_done(self, num_steps: int) -> None:
        await self._wait(lambda: self._num_done >= num_steps)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: holds() or self._has_failed())
        if not holds():
            assert self._task is not None
            self._task.result()  # raises what ended it

    def _has_failed(self) -> bool:
        return self._task is not None and self._task.done() and not self._task.cancelled()
