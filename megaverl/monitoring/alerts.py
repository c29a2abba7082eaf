"""Alerts: conditions on metrics, stalls and disk space, shown on the console and posted to a URL.

A receiver that is slow, fails or hangs must not delay training. Each one has a thread,
a bounded queue, and a deadline for every message.
"""

from __future__ import annotations

import json
import math
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megaverl.config.watching import (
    AlertConfig,
    Condition,
    post_address,
    read_condition,
)
from megaverl.config.wording import did_you_mean

WAITING = 100  # queued messages to one receiver; further ones are dropped
ATTEMPTS, SECONDS_OF_ONE = 3, 10.0
SECONDS_TO_FINISH = 10.0
LOOKS_EVERY = 5.0  # seconds between checks of stalls and the disk
SEEN_AFTER = 20  # records after which a warning names metrics that have not occurred


@dataclass
class _Watched:
    """An alert and its state.

    Attributes:
        count: consecutive records in which its condition held.
        is_told: whether it was reported since its condition last failed.
        was_seen: whether its metric has occurred.
    """

    alert: AlertConfig
    condition: Condition
    count: int = 0
    is_told: bool = False
    was_seen: bool = False

    def becomes_due(self, holds: bool) -> bool:
        """Update the state, and return whether the alert is to be reported now."""
        self.count = self.count + 1 if holds else 0
        self.is_told &= holds
        if self.is_told or self.count < self.condition.records:
            return False
        self.is_told = True
        return True


class Alerts:
    """The alerts of a run, on the rank that keeps its records.

    Args:
        name: name of the run.
        warn: shows a line to the user: alerts, and failures to send them.
    """

    def __init__(
        self,
        alerts: Sequence[AlertConfig],
        run_dir: Path,
        name: str,
        warn: Callable[[str], None],
    ) -> None:
        self._watched = [
            _Watched(alert, read_condition(alert.when)) for alert in alerts
        ]
        self._run_dir, self._name, self._warn = run_dir, name, warn
        addresses = dict.fromkeys(
            post_address(alert.post) for alert in alerts if alert.post
        )
        self._receivers = {address: Receiver(address, warn) for address in addresses}
        self._known: set[str] = set()
        self._records = 0
        self._step, self._last_step = 0, time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="alerts", daemon=True)
        if any(not watched.condition.is_of_metrics for watched in self._watched):
            self._thread.start()

    def note(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Check the alerts on metrics against a new record."""
        self._step, self._last_step, self._records = (
            step,
            time.monotonic(),
            self._records + 1,
        )
        self._known.update(metrics)
        for watched in self._watched:
            if not watched.condition.is_of_metrics:
                continue
            pattern = watched.condition.metric
            # An exact name needs no search, and may contain a character that patterns
            # give another meaning.
            names = (
                [pattern]
                if pattern in metrics
                else [name for name in metrics if fnmatchcase(name, pattern)]
            )
            if not names:
                continue
            watched.was_seen = True
            values = {name: float(metrics[name]) for name in names}
            holding = [
                name for name, value in values.items() if watched.condition.holds(value)
            ]
            if watched.becomes_due(bool(holding)):
                self._tell(
                    watched,
                    values[holding[0]],
                    f"{holding[0]} is {values[holding[0]]:.6g}",
                )
        if self._records == SEEN_AFTER:
            self._tell_of_unseen()

    def close(self) -> None:
        """Wait briefly until queued messages are sent."""
        self._stop.set()
        if self._records < SEEN_AFTER:
            self._tell_of_unseen()
        end = time.monotonic() + SECONDS_TO_FINISH
        for receiver in self._receivers.values():
            receiver.close(max(0.0, end - time.monotonic()))

    def _tell_of_unseen(self) -> None:
        """Warn about metrics that have not occurred. They cannot be checked earlier,
        since a run's parts decide its metrics.
        """
        for number, watched in enumerate(self._watched):
            if watched.condition.is_of_metrics and not watched.was_seen and self._known:
                name = watched.condition.metric
                hint = (
                    did_you_mean(name, self._known) or " metrics.jsonl has the names."
                )
                self._warn(
                    f"alerts.{number}: no record so far has a metric {name!r}.{hint}"
                )

    def _look(self) -> None:
        """Check stalls and disk space in a thread, beside the training."""
        spans = (
            watched.condition.value
            for watched in self._watched
            if watched.condition.metric == "stalled"
        )
        # An alert on a stall of a few seconds must not wait for a look that comes
        # later.
        every = min([LOOKS_EVERY, *spans])
        while not self._stop.wait(every):
            for watched in self._watched:
                if watched.condition.metric == "stalled":
                    seconds = time.monotonic() - self._last_step
                    if watched.becomes_due(watched.condition.holds(seconds)):
                        self._tell(watched, seconds, f"no step for {seconds:.0f} s")
                elif watched.condition.metric == "disk":
                    try:
                        free = shutil.disk_usage(self._run_dir).free
                    except OSError as error:
                        if watched.becomes_due(True):
                            self._tell(watched, math.nan, str(error))
                        continue
                    if watched.becomes_due(watched.condition.holds(free)):
                        self._tell(
                            watched,
                            float(free),
                            f"{free / 1e9:.2f} GB are free at {self._run_dir}",
                        )

    def _tell(self, watched: _Watched, value: float, event: str) -> None:
        text = f"{self._name}, step {self._step}: {event} ({watched.alert.when})"
        self._warn(f"alert: {text}")
        if watched.alert.post is not None:
            message = {
                "run": self._name,
                "when": watched.alert.when,
                "step": self._step,
                "text": text,
            }
            # JSON has no NaN and no infinity.
            message["value"] = value if math.isfinite(value) else str(value)
            self._receivers[post_address(watched.alert.post)].give(message)


@dataclass
class Receiver:
    """Thread that sends messages to one address in order."""

    address: str
    warn: Callable[[str], None]
    _messages: queue.Queue[dict[str, Any] | None] = field(
        default_factory=lambda: queue.Queue(WAITING)
    )
    _has_warned: bool = False
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(
            target=self._serve, name="alert receiver", daemon=True
        )
        self._thread.start()

    def give(self, message: dict[str, Any]) -> None:
        """Queue a message, without waiting."""
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            self._complain(f"{WAITING} messages wait already; this one is dropped")

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` until all messages are sent."""
        try:
            self._messages.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _serve(self) -> None:
        while (message := self._messages.get()) is not None:
            problem = ""
            for attempt in range(ATTEMPTS):
                if attempt:
                    time.sleep(0.2 * 4**attempt)
                problem = post(self.address, message)
                if not problem:
                    break
            if problem:
                self._complain(problem)

    def _complain(self, problem: str) -> None:
        """Warn once, so that a receiver that is gone does not fill the console."""
        if not self._has_warned:
            self._has_warned = True
            # Show only the host: credentials, path and query may be secret.
            host = self.address.split("//")[-1].split("/")[0].rpartition("@")[2]
            self.warn(
                f"alerts: {host} does not take them: {problem}. The run continues; this is logged once"
            )


def post(address: str, message: Mapping[str, Any], seconds: float | None = None) -> str:
    """Post a message; return the problem, or "" if the receiver accepted it (2xx).

    Args:
        seconds: limit for the whole exchange; None: `SECONDS_OF_ONE`.
    """
    import httpx

    seconds = SECONDS_OF_ONE if seconds is None else seconds
    end = time.monotonic() + seconds
    try:
        # httpx's timeout applies to each read, and a server may send one byte a minute.
        # Reading in parts lets the loop check the total time.
        with httpx.stream(
            "POST", address, content=json.dumps(message), headers=JSON, timeout=seconds
        ) as response:
            for _ in response.iter_raw(1):
                if time.monotonic() > end:
                    break
        return "" if response.is_success else f"status {response.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return type(error).__name__


JSON = {"content-type": "application/json"}
