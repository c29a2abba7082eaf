"""State of a rank for the controller: the call and the stage that its main thread is in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from msgspec.structs import replace

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
        self._status = Status(0, 0, "", START, 0.0, is_idle=False)
        self._since = clock()

    def enter_program(self) -> None:
        """Note that this rank waits for the first call of a program."""
        self._change(name="the start", stage="", is_idle=True)

    def leave_program(self) -> None:
        """Note that this rank serves no program any more."""
        self._change(name="", stage=START, is_idle=False)

    def begin(self, call: int, name: str) -> None:
        """Note that a call begins."""
        self._change(call=call, name=name, stage=START, is_idle=False)

    def enter(self, stage: str) -> None:
        """Note the stage of the running call. A worker calls it at the start of each part of a long call."""
        self._change(stage=stage)

    def ask(self, is_asking: bool) -> None:
        """Note whether the running call waits for the program's answer."""
        with self._lock:
            self._status = replace(self._status, is_asking=is_asking)

    def end(self) -> None:
        """Note that the call is over."""
        self._change(stage="", is_idle=True)

    @property
    def is_outside(self) -> bool:
        """Return whether the rank serves no program."""
        return not self._status.name

    @property
    def call(self) -> int:
        """Return the id of the running call, or of the last one."""
        return self._status.call

    @property
    def stage(self) -> str:
        """Return the stage that the running call has named last, or "" if it has named none."""
        stage = self._status.stage
        return "" if stage in (START, RUN) else stage

    def answer(self, question: int) -> Status:
        """Return the answer to one question."""
        beat = None if self._observe is None else self._observe()
        with self._lock:
            seconds = self._clock() - self._since
            return replace(self._status, question=question, seconds=seconds, beat=beat)

    def _change(self, **changes: int | str | bool) -> None:
        """Change the status of a stage that begins now."""
        with self._lock:
            self._status = replace(self._status, **changes)
            self._since = self._clock()
