"""One rank's part of a checkpoint, written in a thread while training goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

NICENESS = 10  # of the writing thread: training comes first


class Writing:
    """Runs `write` in a thread of its own, at once, and keeps its result or error.

    Args:
        in_background: False: run it here, and be done when this returns.
    """

    def __init__(self, write: Callable[[], Any], *, in_background: bool = True) -> None:
        self._write = write
        self._result: Any = None
        self._error: str | None = None
        self._thread: threading.Thread | None = None
        if in_background:
            self._thread = threading.Thread(target=self._run, args=(True,), name="checkpoint-writer", daemon=True)
            self._thread.start()
        else:
            self._run()

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def outcome(self) -> tuple[Any, str | None]:
        """(result, None) or (None, why it failed); waits until there is one."""
        if self._thread is not None:
            self._thread.join()
        return self._result, self._error

    def _run(self, in_background: bool = False) -> None:
        try:
            if in_background and hasattr(os, "setpriority"):
                # on Linux a thread has a priority of its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            self._result = self._write()
        except Exception as error:  # told to all ranks when the checkpoint is committed
            self._error = f"{type(error).__name__}: {error}"
