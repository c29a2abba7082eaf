"""A calculator whose calls time out, raise or kill their process, for tools/check_faults.py."""

from __future__ import annotations

import os
import random
import signal
import time

from megaverl.rollout.environments.tools import calculate

# Shares of the calls.
TIME_OUT, RAISE, KILL = 0.10, 0.05, 0.02
# Each process draws for itself.
_draws = random.Random()


def unreliable(expression: str) -> str:
    """Return the value of an arithmetic expression, or fail.

    Raises:
        RuntimeError: in 5 % of the calls.
    """
    drawn = _draws.random()
    if drawn < TIME_OUT:
        time.sleep(600)
    elif drawn < TIME_OUT + RAISE:
        raise RuntimeError("no state")
    elif drawn < TIME_OUT + RAISE + KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    return calculate(expression)
