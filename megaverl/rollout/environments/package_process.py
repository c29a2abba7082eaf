"""Processes of packages that need an interpreter of their own: lines of JSON in, lines of JSON out.

Packages such as Harbor and NeMo Gym need another Python, or other versions of the
libraries that the run uses. Their process starts a script of this package under their
interpreter. The script imports nothing of megaverl.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from megaverl.outside import clean, read_json
from megaverl.processes import ending_with_parent
from megaverl.user_code import describe

SHOWN = 400  # characters that are quoted of a process's last output
LINES_KEPT = 20
PROBE_SECONDS = 60.0


@lru_cache(maxsize=8)
def has_package(python: str, package: str) -> bool:
    """Return whether an interpreter can import a package."""
    code = (
        f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    )
    try:
        probe = subprocess.run(
            [python, "-P", "-c", code],
            timeout=PROBE_SECONDS,
            capture_output=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0


class PackageProcess:
    """A process that reads and writes lines of JSON, and ends with this one.

    Args:
        command: interpreter and script.
        on_line: receives each line that the process writes, in a thread, and None when the process has ended.
        variables: environment variables beside those of this process.

    Example:
        process = PackageProcess([python, "worker.py"], answers.put)
        process.send({"task": "a"})
        answer = answers.get(timeout=60)
    """

    def __init__(
        self,
        command: Sequence[str],
        on_line: Callable[[Any], None],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._command, self._on_line = command, on_line
        self._variables = {**os.environ, **(variables or {})}
        self._output: deque[str] = deque(maxlen=LINES_KEPT)
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        started = threading.Event()
        # The kernel ends a process with the thread that started it, and the calling
        # thread may last for one episode only.
        threading.Thread(
            target=self._run, args=(started,), name="package", daemon=True
        ).start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                ending_with_parent(self._command), stdin=pipe, stdout=pipe, stderr=pipe, text=True,
                start_new_session=True, encoding="utf-8", errors="replace", env=self._variables,
            )  # fmt: skip
        except OSError as error:
            self._output.append(describe(error))
            started.set()
            self._on_line(None)
            return
        self._process = process
        started.set()
        assert process.stdout is not None and process.stderr is not None
        errors = threading.Thread(
            target=self._output.extend, args=(process.stderr,), daemon=True
        )
        errors.start()
        for line in process.stdout:
            with suppress(ValueError):
                self._on_line(read_json(line))
        process.wait()
        errors.join(timeout=1.0)
        self._on_line(None)

    def send(self, value: Any) -> None:
        """Write one line. A process that has ended gets none, which its caller learns from `on_line`."""
        if self._process is None or self._process.stdin is None:
            return
        with self._lock, suppress(OSError):
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """End the process and those that it has started."""
        if self._process is not None:
            # It leads a process group of its own.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def is_running(self) -> bool:
        """False once the process has ended, or if it could not be started."""
        return self._process is not None and self._process.poll() is None

    def last_words(self) -> str:
        """Return the end of its output, as a sentence to append to a message."""
        output = clean("".join(self._output)).strip()[-SHOWN:]
        return f" The end of its output: {output}" if output else ""


def script(name: str) -> str:
    """Return the path of a script beside this module."""
    return str(Path(__file__).with_name(name))
