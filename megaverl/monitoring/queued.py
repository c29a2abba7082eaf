"""A tracker behind a thread: whatever it does, and however long it takes, training goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from megaverl.monitoring.backend import Backend

WAITING = 1000  # records that may wait; then the oldest tracker is not worth waiting for
SECONDS_TO_FINISH = 60.0


class Record(NamedTuple):
    step: int
    seconds: float
    metrics: Mapping[str, float]


class Queued:
    """Starts a tracker in a thread of its own and hands it what is written, in order.

    Args:
        make: makes the tracker; called in the thread, as a login or a connection may take its time.
        failed: told once, from the thread or from `write`, why it is left out from now on.
    """

    def __init__(self, name: str, make: Callable[[], Backend], failed: Callable[[str], None]) -> None:
        self._make, self._failed = make, failed
        self._records: queue.Queue[Record | None] = queue.Queue(WAITING)
        self._lock = threading.Lock()
        self.works = True
        self._thread = threading.Thread(target=self._serve, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        if self.works:
            try:
                self._records.put_nowait(Record(step, seconds, dict(metrics)))
            except queue.Full:
                self._leave_out(f"it has not taken the last {WAITING} records, and is left out at step {step}")

    def close(self, seconds: float = SECONDS_TO_FINISH) -> None:
        """Wait until it has written everything, but no longer than `seconds`."""
        if not self.works:
            return
        try:
            self._records.put(None, timeout=seconds)
        except queue.Full:
            self._leave_out("it does not finish, and is left alone")
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._leave_out(f"it has not finished within {seconds:.0f} s, and is left alone")

    def _serve(self) -> None:
        step: int | None = None
        try:
            backend = self._make()
            while (record := self._records.get()) is not None:
                step = record.step
                backend.write(*record)
            backend.close()
        except BaseException as error:  # whatever a tracker's library raises, SystemExit too
            where = "could not start" if step is None else f"failed at step {step}"
            self._leave_out(f"{where}, it is left out now: {type(error).__name__}: {error}")

    def _leave_out(self, why: str) -> None:
        with self._lock:
            told, self.works = not self.works, False
        if not told:
            self._failed(why)
