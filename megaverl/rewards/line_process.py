"""Child process that answers one JSON line for each line that it gets, and is killed if an answer takes too long."""

from __future__ import annotations

import functools
import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megaverl.processes import ending_with_parent


class ProcessDied(Exception):
    """Raised if the process ended instead of answering."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"it ended with code {code}")
        self.code = code


class LineProcess:
    """Child process that starts on creation and ends with this process at the latest. Its error output is discarded.

    Args:
        command: command to run.
        environment: its whole environment.
        folder: its working folder.

    Example:
        process = LineProcess([sys.executable, "worker.py"], {})
        process.send({"x": 1})
        answer = process.answer(timeout_seconds=5.0)
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: str | None = None,
    ) -> None:
        self._received = b""
        self._process = (
            _lasting_thread(os.getpid())
            .submit(
                subprocess.Popen,
                ending_with_parent(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                cwd=folder,
            )
            .result()
        )

    def send(self, request: Any) -> None:
        """Send a line.

        Raises:
            ProcessDied: the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def answer(self, timeout_seconds: float) -> Any:
        """Return the next line's JSON.

        Raises:
            TimeoutError: no line came in time.
            ProcessDied: no line will come.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError
                data = os.read(self._process.stdout.fileno(), 65536)
                if not data:
                    raise self._died()
                self._received += data
        line, _, self._received = self._received.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            # Something else writes into the channel, so no further line can be trusted.
            self._process.kill()
            raise self._died() from None

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()

    def _died(self) -> ProcessDied:
        code = self._process.wait()
        self.close()
        return ProcessDied(code)


@functools.cache
def _lasting_thread(process: int) -> ThreadPoolExecutor:
    """Return a thread that lasts as long as this process, for starting children.

    The kernel kills such a child when the thread that started it ends. The cache is per
    process id, since a forked copy has no threads.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="starter")
