"""Signal handlers for the duration of a block."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handling(
    signals: Sequence[signal.Signals],
    handler: Callable[[int, FrameType | None], object],
) -> Iterator[None]:
    """Handle these signals inside. The previous handlers are restored afterwards."""
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
