"""Samples that the engines generate ahead of training (`rollout.async_rollout`).

    engines    gen 0 | gen 1 | sync 1 | gen 2     | sync 2 | gen 3
    actor      .     | train 0 ------^  train 1 ----------^  train 2       max_staleness: 1

The weights that generate a step's responses depend only on the step's number, never on
timing. A resumed run therefore generates the same responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from megaverl.controller.references import Ref
from megaverl.data.batch import RolloutBatch
from megaverl.trainer.schedule import Schedule
from megaverl.workers.reward import Scores


class EarlySamples(NamedTuple):
    """Samples of a future step. `scores` is None if the reward ranks do not score ahead of training."""

    rollouts: Ref[RolloutBatch]
    scores: Ref[Scores] | None


class RolloutsAhead:
    """Task that generates samples while the program trains on earlier ones.

    Args:
        schedule: after how many completed steps the engines begin a step, and take new weights within it.
        sample: generates the samples of a step, and also scores them if the reward ranks may run ahead.
        first_step, last_step: range of the run's steps, excluding `last_step`.
        is_in_flight: whether the engines take new weights in the middle of a step's responses.

    Example:
        ahead = RolloutsAhead(Schedule.of(config, placement), sample, 0, 100, is_in_flight=False)
        for step in range(100):
            samples = await ahead.take(step)
            ...                             # train
            await ahead.until_begun(step)
            ...                             # new weights for the engines
    """

    def __init__(
        self,
        schedule: Schedule,
        sample: Callable[[int], Awaitable[EarlySamples]],
        first_step: int,
        last_step: int,
        *,
        is_in_flight: bool,
    ) -> None:
        self._schedule, self._sample = schedule, sample
        self._first_step, self._last_step = first_step, last_step
        self.is_in_flight = is_in_flight
        self._num_done = first_step  # steps completed on all ranks
        self._num_begun = first_step  # steps whose generation has begun
        # Steps whose generation has continued with new weights.
        self._num_resumed = first_step
        self._samples: dict[int, EarlySamples] = {}
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def take(self, step: int) -> EarlySamples:
        """Wait for the samples of a step and return them. All earlier steps must be complete on all ranks."""
        if self._task is None:
            self._task = asyncio.create_task(self._generate())
            # Wake up waiting tasks if the generation fails, so that they raise its
            # error.
            self._task.add_done_callback(
                lambda task: asyncio.ensure_future(self._notify())
            )
        self._num_done = step
        await self._notify()
        await self._wait(lambda: step in self._samples)
        return self._samples.pop(step)

    async def until_begun(self, step: int) -> None:
        """Wait until the engines have begun all samples that the weights before the update of `step` generate."""
        last_begun = self._last_due(self._schedule.begins_after, step)
        last_resumed = -1
        if self.is_in_flight:
            last_resumed = self._last_due(self._schedule.new_weights_after, step)
        await self._wait(
            lambda: self._num_begun > last_begun and self._num_resumed > last_resumed
        )

    def _last_due(self, is_after: Callable[[int], int], step: int) -> int:
        """Return the last step of which a phase must happen before the update of `step`."""
        return max(
            later for later in range(step, self._last_step) if is_after(later) <= step
        )

    async def until_new_weights(self, step: int) -> None:
        """Wait until the engines have received the weights that arrive in the middle of the responses of `step`."""
        assert self.is_in_flight, "rollout.in_flight_updates is off"
        await self._wait_until_done(self._schedule.new_weights_after(step))
        # Tasks that wait for this wake up only after the caller has made its next call.
        self._num_resumed = step + 1
        asyncio.ensure_future(self._notify())

    def stop(self) -> None:
        """Start no further samples."""
        if self._task is not None:
            self._task.cancel()

    async def _generate(self) -> None:
        for step in range(self._first_step, self._last_step):
            await self._wait_until_done(self._schedule.begins_after(step))
            generation = asyncio.ensure_future(self._sample(step))
            # Let the task make its first call, so that calls of tasks that wait for it
            # are sent afterwards.
            await asyncio.sleep(0)
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
        # The condition does not hold, so the generation must have failed.
        if not holds():
            assert self._task is not None
            self._task.result()  # raises the error that ended the task

    def _has_failed(self) -> bool:
        return (
            self._task is not None and self._task.done() and not self._task.cancelled()
        )
