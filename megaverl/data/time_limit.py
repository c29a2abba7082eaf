"""Time limit for third-party code that runs in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`.

    Only the main thread can be interrupted, and not within one call of C code. In other
    threads there is no limit. A timer that is already set, such as a test runner's, is
    left alone.
    """
    is_free = (
        threading.current_thread() is threading.main_thread()
        and signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
    )
    if not is_free:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"not finished after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
