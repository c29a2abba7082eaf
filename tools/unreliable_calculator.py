"""A calculator whose calls time out, raise or kill their process, for tools/check_faults.py."""

from __future__ import annotations

import random
import signal
import time

from megaverl.rollout.environments.tools import calculate

# Shares of the calls.
TIME_OUT, RAISE, KILL = 0.10, 0.05, 0.02
# Each process draws for itself.
_draws = random.Random()


def unreliable(expression: str) -> str:
    """Return the value of an arithmetic expression, or fail."""
    drawn = _draws.random()
    if drawn < TIME_OUT:
        return time_out(expression)
    if drawn < TIME_OUT + RAISE:
        return raise_error(expression)
    if drawn < TIME_OUT + RAISE + KILL:
        return end_process(expression)
    return calculate(expression)


def time_out(expression: str) -> str:
    """Take longer than any limit."""
    time.sleep(600)
    return calculate(expression)


def raise_error(expression: str) -> str:
    """Raise an error that the argument does not explain."""
    raise RuntimeError("no state")


def end_process(expression: str) -> str:
    """End the tool's process. A tool may not call `os.kill`: that would be an error that the model reads."""
    signal.raise_signal(signal.SIGKILL)
    return calculate(expression)
