"""Process that compares formulas with math-verify, and can be killed if a comparison takes forever.

`python -m megaverl.rewards.math_worker` reads one JSON list [reference, response] per
line and answers true or false. math-verify's own time limit is a signal. It needs the
main thread, and never interrupts a huge integer power.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from typing import ClassVar

from megaverl.errors import RewardError
from megaverl.rewards.line_process import LineProcess, ProcessDied

START_SECONDS = 120.0  # importing sympy on a loaded machine takes long


class MathWorker:
    """Client of the process. Starts it when it is first needed, and again after it was killed."""

    _shared: ClassVar[MathWorker | None] = None

    def __init__(self) -> None:
        self._process: LineProcess | None = None
        self._lock = threading.Lock()
        self.num_timeouts = 0

    @classmethod
    def shared(cls) -> MathWorker:
        """Return this process's worker, closed when the process ends."""
        if cls._shared is None:
            cls._shared = cls()
            atexit.register(cls._shared.close)
        return cls._shared

    def equal(self, reference: str, response: str, timeout_seconds: float) -> bool:
        """Return whether both formulas mean the same; False if that takes longer than `timeout_seconds`.

        Raises:
            RewardError: the process cannot be started, or dies.
        """
        with self._lock:
            try:
                process = self._process = self._process or self._start()
                process.send([reference, response])
                return bool(process.answer(timeout_seconds))
            except TimeoutError:
                self.num_timeouts += 1
                self.close()
                return False
            except ProcessDied as died:
                self._process = None
                raise RewardError(
                    f"reward 'math_verify': its process ended with code {died.code}. Try it by hand: "
                    'echo \'["1/2", "0.5"]\' | python -m megaverl.rewards.math_worker'
                ) from None

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _start(self) -> LineProcess:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        root = os.path.dirname(
            os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        )
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [root, environment.get("PYTHONPATH")])
        )
        process = LineProcess(
            [sys.executable, "-m", "megaverl.rewards.math_worker"], environment
        )
        try:
            process.answer(START_SECONDS)
        except TimeoutError:
            process.close()
            raise RewardError(
                f"reward 'math_verify': its process did not start within {START_SECONDS:.0f} s."
            ) from None
        return process


def serve() -> None:
    """Answer on standard output until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Redirect output of libraries to standard error, so that it does not mix with the
    # answers.
    os.dup2(2, 1)
    import logging

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def answer(value: bool) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer(True)
    for line in sys.stdin.buffer:
        reference, response = json.loads(line)
        # math-verify finds a bare formula reliably only as LaTeX, so mark it unless it
        # has marks already.
        marked = any(mark in reference for mark in ("$", "\\(", "\\[", "\\boxed"))
        expected = parse(
            reference if marked else f"${reference}$", parsing_timeout=None
        )
        answer(
            bool(
                verify(
                    expected,
                    parse(response, parsing_timeout=None),
                    timeout_seconds=None,
                )
            )
        )


if __name__ == "__main__":
    serve()
