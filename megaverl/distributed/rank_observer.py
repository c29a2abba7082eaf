"""Observation of a rank's main thread: the stage that it is in, and what it waits for."""

from __future__ import annotations

import os
import sys
import threading
import time

from megaverl.distributed.flight_record import waits_in
from megaverl.distributed.heartbeat import Heartbeat, Wait, place, this_host

ASKS_AFTER = 10.0  # seconds of waiting after which the flight recorder is read


class RankObserver:
    """Observer of the main thread that creates it.

    Args:
        world: name of this rank's world; ranks with the same name run the same stages.
        asks_after: seconds of waiting after which the flight recorder says for which collective.

    Example:
        observer = RankObserver("actor")
        observer.enter("generate", step=3)
        ...
        beat = observer.observe()       # on any thread
    """

    def __init__(self, world: str = "", asks_after: float = ASKS_AFTER) -> None:
        self._world, self._asks_after = world, asks_after
        self._main = threading.get_ident()
        # The step, and the stages begun in it.
        self._position: tuple[int, tuple[str, ...]] = (0, ("start",))
        self._doing, self._since = "start", time.monotonic()
        self._lock = threading.Lock()
        # The main thread's current call, and `_called` its start.
        self._call: tuple[int, int, Wait] = (0, 0, "")
        self._called = 0.0
        # None: the flight recorder has not been read yet.
        self._collective: str | None = None

    @property
    def doing(self) -> str:
        """Return the stage that began last, with its step: "step 3: generate"."""
        return self._doing

    def enter(self, stage: str, step: int | None = None) -> None:
        """Note that this rank begins a stage of a step.

        Calls from other threads, such as a writer's, do not change the rank's position.
        """
        if threading.get_ident() == self._main:
            before, begun = self._position
            now = before if step is None else step
            earlier = (
                (earlier_stage for earlier_stage in begun if earlier_stage != stage)
                if now == before
                else ()
            )
            self._position = (now, (*earlier, stage))
        self._doing, self._since = (
            stage if step is None else f"step {step}: {stage}",
            time.monotonic(),
        )

    def observe(self) -> Heartbeat:
        """Return this rank's heartbeat: its position, and what its main thread waits for."""
        with self._lock:
            return self._observe()

    def _observe(self) -> Heartbeat:
        # Reading the main thread's frame from outside works even while that thread is
        # blocked.
        frame = sys._current_frames().get(self._main or 0)
        where, waits_for = place(frame)
        now = time.monotonic()
        call = (id(frame), frame.f_lasti if frame else 0, waits_for)
        # The same frame at the same instruction means that the thread is still in the
        # same call.
        if call != self._call:
            self._call, self._called, self._collective = call, now, None
        waited = now - self._called
        if waits_for and self._collective is None and waited > self._asks_after:
            self._collective = waits_in()
        step, begun = self._position
        return Heartbeat(
            doing=self._doing,
            seconds=now - self._since,
            waits_for=waits_for,
            waited=waited if waits_for else 0.0,
            where=where,
            host=this_host(),
            pid=os.getpid(),
            world=self._world,
            step=step,
            begun=begun,
            collective=self._collective or "",
        )
