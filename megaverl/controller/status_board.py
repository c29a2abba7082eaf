"""State of a rank for the controller: the call and the stage that its main thread is in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from megaverl.controller.messages import Status
from megaverl.distributed.heartbeat import Heartbeat

# Stages of every call: before its method runs, and until the method names another.
START, RUN = "start", "run"


class StatusBoard:
    """State of a rank, for `Where`. The main thread writes it, a side thread reads it.

    Args:
        observe: returns what the main thread does, called by the side thread; None: it is not observed.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        observe: Callable[[], Heartbeat] | None = None,
    ) -> None:
        self._clock = clock
        self._observe = observe
        self._lock = threading.Lock()
        self._call, self._name, self._stage, self._is_idle = 0, "", START, False
        self._is_asking = False
        self._since = clock()

    def enter_program(self) -> None:
        """Note that this rank waits for the first call of a program."""
        self._set(self._call, "the start", "", True)

    def leave_program(self) -> None:
        """Note that this rank serves no program any more."""
        self._set(self._call, "", START, False)

    def begin(self, call: int, name: str) -> None:
        """Note that a call begins."""
        self._set(call, name, START, False)

    def enter(self, stage: str) -> None:
        """Note the stage of the running call. A worker calls it at the start of each part of a long call."""
        self._set(self._call, self._name, stage, self._is_idle)

    def ask(self, is_asking: bool) -> None:
        """Note whether the running call waits for the program's answer."""
        with self._lock:
            self._is_asking = is_asking

    def end(self) -> None:
        """Note that the call is over."""
        self._set(self._call, self._name, "", True)

    @property
    def is_outside(self) -> bool:
        """Return whether the rank serves no program."""
        return not self._name

    @property
    def call(self) -> int:
        """Return the id of the running call, or of the last one."""
        return self._call

    @property
    def stage(self) -> str:
        """Return the stage that the running call has named last, or "" if it has named none."""
        return "" if self._stage in (START, RUN) else self._stage

    def answer(self, question: int) -> Status:
        """Return the answer to one question."""
        beat = None if self._observe is None else self._observe()
        with self._lock:
            seconds = self._clock() - self._since
            return Status(
                question,
                self._call,
                self._name,
                self._stage,
                seconds,
                self._is_idle,
                self._is_asking,
                beat,
            )

    def _set(self, call: int, name: str, stage: str, is_idle: bool) -> None:
        with self._lock:
            self._call, self._name, self._stage, self._is_idle = (
                call,
                name,
                stage,
                is_idle,
            )
            self._since = self._clock()
