"""Waits with a deadline, and search for the rank at the root of a failure.

A rank that times out reports which rank it was waiting for. Following these reports
leads to the rank that waits for none, which every rank then names in its error.

    rank 2 waits for 1, rank 1 waits for 0, rank 0 has no report  ->  rank 0 is at fault
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from megaverl.errors import ReshardError
from megaverl.platform import platform
from megaverl.user_code import describe

# How long a rank waits for a report from the rank that it blames, which may itself have
# waited for another.
GRACE_SECONDS = 2.0
POLL_SECONDS, DEVICE_POLL_SECONDS = 0.05, 1e-4

# Counts resharders per group, so that all ranks use the same store keys.
_made: Counter[str] = Counter()


def wait(work: dist.Work, timeout: timedelta | None) -> None:
    """Wait for an operation. On CUDA only the current stream waits; see `wait_for_event`.

    Raises:
        RuntimeError: the operation failed, or took longer than `timeout` (None: than the group's timeout).
    """
    if platform.is_cuda or timeout is None:
        work.wait()
    else:
        work.wait(timeout)


def record_event() -> torch.cuda.Event | None:
    """Record an event after all work on the current stream. Return None without CUDA."""
    if not platform.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def wait_for_event(event: torch.cuda.Event | None, timeout: timedelta | None) -> None:
    """Wait until the device has reached the event.

    Raises:
        TimeoutError: it took longer than `timeout`.
    """
    if event is None:
        return
    # The device has no timeout of its own, so the event is polled.
    end = None if timeout is None else time.monotonic() + timeout.total_seconds()
    while not event.query():
        if end is not None and time.monotonic() > end:
            raise TimeoutError("no answer on the device")
        time.sleep(DEVICE_POLL_SECONDS)


# Parts of transport errors that mean the peer is gone.
_PEER_IS_GONE = re.compile(
    r"closed by peer|Connection reset|Broken pipe|Timed out waiting|timed out|Socket|gloo|NCCL|recvBytes|TCPStore"
)


def says_peer_is_gone(error: BaseException) -> bool:
    """Return whether an error or one of its causes is that of a transport whose peer is gone or silent."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError) or _PEER_IS_GONE.search(describe(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def cause_of(error: BaseException) -> str:
    """Return a transport's error message without source locations and guesses about its cause."""
    text = str(error).splitlines()[0] if str(error) else "no answer"
    return re.sub(r"^\[[^\]]*:\d+\] ", "", text).partition(". ")[0][:160]


class Report(NamedTuple):
    """Report that `reporter` waited for `culprit` (-1: for all ranks) while it was `doing` something."""

    culprit: int
    doing: str
    reporter: int


class Failures:
    """Failure reports of one resharder's ranks, in the store of the process group. They are read only after a failure.

    If the lost rank hosts the store (rank 0 without torchrun), each rank reports only
    what it knows itself.

    Args:
        group: the ranks. None: all.
        rank: this rank in the group.
        timeout: how long ranks wait for each other.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, timeout: timedelta | None
    ) -> None:
        name = "" if group is None else group.group_name
        # All ranks create their resharders in the same order, so that equal numbers
        # mean the same one.
        self._prefix = f"megaverl/reshard/{name}/{_made[name]}"
        _made[name] += 1
        self._rank = rank
        self._group = group
        self._world = dist.get_world_size(group) if dist.is_initialized() else 1
        self._seconds = None if timeout is None else timeout.total_seconds()

    def blame(
        self, version: int, peer: int, action: str, error: Exception
    ) -> ReshardError:
        """Return an error that names the rank at the root of this rank's failure.

        Args:
            version: version of the weights that were moving.
            peer: the rank that this one waited for; -1: all.
            action: what this rank was doing, with the affected boxes.
            error: the transport's error.
        """
        reports = [Report(peer, action, self._rank)]

        def ask() -> None:
            # Use the group's store, because a group over several role groups has ranks that
            # the default group's store lacks.
            group = self._group or dist.distributed_c10d._get_default_group()
            store = dist.distributed_c10d._get_process_group_store(group)
            store = dist.PrefixStore(f"{self._prefix}/{version}", store)
            # The report is there before the name of its reporter, which others look
            # for.
            if peer >= 0:
                store.set(f"report/{self._rank}", json.dumps(reports[0]))
                store.set("reporter", str(self._rank))
                reports[0] = _follow(store, reports[0])
            elif culprit := self._missing(store, action):
                reports[0] = culprit

        # A rank that waited for all ranks waits once more for their timeouts, after
        # which they report whom they lack.
        patience = (self._seconds or 0.0) if peer < 0 else 0.0
        _within(patience + 3 * GRACE_SECONDS, ask)
        root = reports[0]
        culprit_name = f"rank {root.culprit}" if root.culprit >= 0 else "some rank"
        waited = "in time" if self._seconds is None else f"within {self._seconds:g} s"
        own_part = (
            "" if root.reporter == self._rank else f" Rank {self._rank} was {action}."
        )
        return ReshardError(
            f"{culprit_name} died or stalled while the weights of version {version} moved: rank {root.reporter}, "
            f"{root.doing}, got no answer {waited}.{own_part} ({type(error).__name__}: {cause_of(error)})"
        )

    def _missing(self, store: dist.Store, action: str) -> Report | None:
        """Find the root of a failure if this rank knows only that some rank is missing.

        Either another rank's report leads to it, or exactly one rank is silent.
        Otherwise return None.
        """
        # Presence is counted, so that ranks need not ask for each other one by one.
        store.set(f"present/{self._rank}", "")
        store.add("num_present", 1)
        end = time.monotonic() + (self._seconds or 0.0) + GRACE_SECONDS
        while time.monotonic() < end:
            if store.check(["reporter"]):
                return _follow(store, _report_of(store, store.get("reporter").decode()))
            # All but one have arrived. The answer names the missing rank.
            if store.add("num_present", 0) >= self._world - 1:
                break
            time.sleep(POLL_SECONDS)
        silent = [
            rank for rank in range(self._world) if not store.check([f"present/{rank}"])
        ]
        return Report(silent[0], action, self._rank) if len(silent) == 1 else None


def _report_of(store: dist.Store, rank: int | str) -> Report:
    return Report(*json.loads(store.get(f"report/{rank}")))


def _follow(store: dist.Store, report: Report) -> Report:
    """Follow reports from the reporter to the rank that it blames, until a rank without a report."""
    end = time.monotonic() + GRACE_SECONDS
    # Reports may form a circle, if ranks wait for each other.
    seen = {report.reporter}
    while time.monotonic() < end and report.culprit not in seen:
        if store.check([f"report/{report.culprit}"]):
            report = _report_of(store, report.culprit)
            seen.add(report.reporter)
        else:
            time.sleep(POLL_SECONDS)
    return report


def _within(seconds: float, function: Callable[[], None]) -> None:
    """Run `function` in a thread, and abandon the thread after `seconds`, because the store's host may have stalled."""

    def run() -> None:
        try:
            function()
        except RuntimeError:
            # The store was lost together with its host. This rank falls back to what it
            # knows.
            return

    thread = threading.Thread(target=run, daemon=True, name="reshard-failure")
    thread.start()
    thread.join(seconds)
