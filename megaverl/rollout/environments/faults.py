"""Faults of environments: which attempts follow them, and when a run pauses or ends.

A fault is not the policy's: a lost connection, a time-out, a process that died, an
exception in an environment's code. Training on it would teach the policy that its last
tokens were wrong.

    an attempt at an episode fails
      -> another attempt with the same draws, after a wait           (retries)
      -> an episode with other draws, if its group would be too small (replacements)
      -> no attempt: the sample has no reward, and trains nothing
    most of the last attempts have failed -> the run pauses          (pause_above)
    nothing has worked yet, and every episode fails -> the run ends

The policy's own faults are no faults here: an environment answers them, and gives the
reward that they deserve. Mistakes in the configuration are other exceptions (see
`megaverl.errors`), and end the run at once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from megaverl.errors import EpisodeError

logger = logging.getLogger(__name__)

# Finish reason of a sample whose environment failed at every attempt.
FAILED = "failed"
# Episodes that a group needs for a baseline from the others.
SMALLEST_GROUP = 2
# The share of failures is computed over the last RECENT attempts, from ENOUGH on.
RECENT, ENOUGH = 64, 8
LONGEST_WAIT = 60.0
# Rounds in which every episode may fail before any has succeeded. A single failed round
# may be a passing fault.
ROUNDS_WITHOUT_SUCCESS = 2
# Different faults that are logged. Texts may contain times or addresses, so that a bound
# keeps the log readable.
MOST_LOGGED = 20


@dataclass(frozen=True)
class FaultLimits:
    """Limits of what a run does about faults; see `environment.faults` of the configuration.

    Attributes:
        retries: further attempts at an episode, with the same draws.
        backoff_seconds: wait before the first of them. Each later wait is twice as long.
        replacements: episodes with other draws in the place of one that keeps failing.
        pause_above: share of failed attempts from which the run pauses.
        pause_seconds: length of a pause.
        pauses: pauses in a row before the run ends.
    """

    retries: int = 3
    backoff_seconds: float = 1.0
    replacements: int = 1
    pause_above: float = 0.5
    pause_seconds: float = 60.0
    pauses: int = 5


@dataclass(frozen=True)
class FailedCall:
    """Result of a call of an environment that failed through no fault of the policy."""

    text: str


@dataclass(frozen=True)
class Attempt:
    """One attempt at an episode.

    Attributes:
        retry: attempts with the same draws before this one.
        replacement: number of draws that were given up before. An attempt with another number has other seeds.
    """

    retry: int = 0
    replacement: int = 0


@dataclass
class Faults:
    """Decides what follows a fault. Every rank makes the same calls, and comes to the same decisions.

    The decisions depend on nothing but results of calls, which all ranks have. Waits do
    not enter them.

    Args:
        name: the environment's name, for messages.
        sleep: waits for a number of seconds; a test replaces it.
    """

    name: str
    limits: FaultLimits = field(default_factory=FaultLimits)
    sleep: Callable[[float], None] = time.sleep
    _attempts: dict[int, Attempt] = field(init=False, default_factory=dict)
    _group_size: int = field(init=False, default=1)
    # Method -> rounds in which it failed for every episode; absent once it has worked.
    _never_worked: dict[str, int] = field(init=False)
    # Whether each of the last attempts was successful, over the whole run.
    _recent: deque[bool] = field(init=False)
    _pauses: int = field(init=False, default=0)
    _metrics: dict[str, float] = field(init=False, default_factory=dict)
    _lost: set[int] = field(init=False, default_factory=set)
    # Texts of the faults that have been logged.
    _logged: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._never_worked = {"reset": 0, "step": 0}
        self._recent = deque(maxlen=RECENT)

    def begin(self, count: int, group_size: int) -> dict[int, Attempt]:
        """Begin `count` episodes and return the first attempt at each.

        Args:
            group_size: number of consecutive episodes that are compared with each other.
        """
        self._group_size, self._lost = group_size, set()
        self._attempts = {number: Attempt() for number in range(count)}
        self._metrics = dict.fromkeys(
            ("faults", "retries", "replacements", "pause_seconds"), 0.0
        )
        return dict(self._attempts)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the episodes since `begin`; {} if there were none."""
        if not self._attempts:
            return {}
        counts = {f"environment/{name}": n for name, n in self._metrics.items()}
        lost = len(self._lost) / len(self._attempts)
        return {**counts, "environment/failed_fraction": lost}

    def finished(self, count: int) -> None:
        """Record episodes that came to their end."""
        self._recent.extend([True] * count)
        if count:
            self._pauses = 0

    def wait_before(self, attempt: Attempt) -> None:
        """Wait before an attempt that follows a fault."""
        if attempt.retry:
            seconds = self.limits.backoff_seconds * 2 ** (attempt.retry - 1)
            self.sleep(min(seconds, LONGEST_WAIT))

    def after(
        self, method: str, called: Collection[int], faults: Mapping[int, FailedCall]
    ) -> dict[int, Attempt]:
        """Return the attempts that follow the faults of one round of calls, by episode.

        An episode that failed and is not among them is lost.

        Args:
            method: `reset` or `step`.
            called: episodes whose environment was called.
            faults: those that failed.

        Raises:
            EpisodeError: the environment has never worked, or not after the last pause either.
        """
        if len(faults) < len(called):
            self._never_worked.pop(method, None)
        if not faults:
            return {}
        first = faults[min(faults)].text
        if len(faults) == len(called) and method in self._never_worked:
            self._never_worked[method] += 1
            rounds = min(ROUNDS_WITHOUT_SUCCESS, 1 + self.limits.retries)
            if self._never_worked[method] >= rounds:
                raise EpisodeError(
                    f"environment '{self.name}': {method}() has failed for every episode since the run began. {first} "
                    "Correct its options, start what it connects to, or mend its code."
                )
        self._metrics["faults"] += len(faults)
        self._recent.extend([False] * len(faults))
        paused = self._pause(first) if self._fails_often() else False
        retried = {
            number: attempt
            for number in sorted(faults)
            if (attempt := self._next(number, paused=paused)) is not None
        }
        self._attempts |= retried
        self._log(faults, retried)
        return retried

    def _log(self, faults: Mapping[int, FailedCall], retried: Collection[int]) -> None:
        """Log each kind of fault once. A fault that a further attempt cures would otherwise only be a number."""
        for number, fault in sorted(faults.items()):
            if fault.text in self._logged or len(self._logged) >= MOST_LOGGED:
                continue
            self._logged.add(fault.text)
            logger.warning(
                "environment '%s': an attempt at an episode failed, and the episode is %s. %s",
                self.name,
                "tried again" if number in retried else "left out",
                fault.text,
            )

    def _next(self, number: int, *, paused: bool) -> Attempt | None:
        """Return the attempt that follows a fault of an episode, or None if it is lost."""
        attempt = self._attempts[number]
        if paused:
            # Faults before a pause say nothing about this episode, so they do not count.
            self._metrics["retries"] += 1
            return Attempt(attempt.retry, attempt.replacement)
        if attempt.retry < self.limits.retries:
            self._metrics["retries"] += 1
            return Attempt(attempt.retry + 1, attempt.replacement)
        self._lost.add(number)
        group = number // self._group_size
        lost = sum(episode // self._group_size == group for episode in self._lost)
        smallest = min(SMALLEST_GROUP, self._group_size)
        too_small = self._group_size - lost < smallest
        if too_small and attempt.replacement < self.limits.replacements:
            self._lost.remove(number)
            self._metrics["replacements"] += 1
            return Attempt(0, attempt.replacement + 1)
        return None

    def _fails_often(self) -> bool:
        failed = self._recent.count(False)
        return (
            len(self._recent) >= ENOUGH
            and failed > len(self._recent) * self.limits.pause_above
        )

    def _pause(self, first: str) -> bool:
        """Wait until the environment may work again; return True.

        Raises:
            EpisodeError: it has not worked after any of the last pauses.
        """
        failed, count = self._recent.count(False), len(self._recent)
        if self._pauses >= self.limits.pauses:
            raise EpisodeError(
                f"environment '{self.name}': {failed} of the last {count} attempts at an episode failed, and "
                f"{self._pauses} pauses of {self.limits.pause_seconds:g} s did not help. {first} Mend the "
                "environment and start the run again: it goes on from its last checkpoint."
            )
        self._pauses += 1
        logger.warning(
            "environment '%s': %d of the last %d attempts at an episode failed. The run pauses for %g s "
            "(%d of %d pauses) and then tries again. %s",
            self.name, failed, count, self.limits.pause_seconds, self._pauses, self.limits.pauses, first,
        )  # fmt: skip
        self.sleep(self.limits.pause_seconds)
        self._metrics["pause_seconds"] += self.limits.pause_seconds
        self._recent.clear()
        return True
