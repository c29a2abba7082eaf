"""Waiting for other ranks with a deadline; and when one does not answer, which rank is at the root of it.

A rank that cannot go on says whom it waits for, and all learn who is the one that waits for nobody.
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

# How long a rank waits to hear whether the rank that it blames has itself been waiting for another.
GRACE_SECONDS = 2.0
POLL_SECONDS, DEVICE_POLL_SECONDS = 0.05, 1e-4

_made: Counter[str] = Counter()  # so that all ranks of a group name their resharders alike


def wait(work: dist.Work, timeout: timedelta | None) -> None:
    """Wait for an operation; on CUDA only the current stream does: see `wait_for_event`.

    Raises:
        RuntimeError: it failed, or took longer than `timeout` (None: than the group's own).
    """
    if platform.is_cuda or timeout is None:
        work.wait()
    else:
        work.wait(timeout)


def record_event() -> torch.cuda.Event | None:
    """An event behind all that the current stream has been given; None without CUDA."""
    if not platform.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def wait_for_event(event: torch.cuda.Event | None, timeout: timedelta | None) -> None:
    """Wait until the device has come to the event.

    Raises:
        TimeoutError: it took longer than `timeout`.
    """
    if event is None:
        return
    end = None if timeout is None else time.monotonic() + timeout.total_seconds()
    while not event.query():
        if end is not None and time.monotonic() > end:
            raise TimeoutError("no answer on the device")
        time.sleep(DEVICE_POLL_SECONDS)


def cause_of(error: BaseException) -> str:
    """What a transport says, in short: without the place in its source, and the causes that it guesses."""
    text = str(error).splitlines()[0] if str(error) else "no answer"
    return re.sub(r"^\[[^\]]*:\d+\] ", "", text).partition(". ")[0][:160]


class Report(NamedTuple):
    """`reporter` waited for `culprit` (-1: for all) while it was `doing` something."""

    culprit: int
    doing: str
    reporter: int


class Failures:
    """Reports of one resharder's ranks in the store of the process group, looked at only when something failed.

    Where that store is hosted by the rank that is lost (rank 0, without torchrun), each rank says what it knows.

    Args:
        group: the ranks; None: all.
        timeout: how long they wait for each other.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, timeout: timedelta | None) -> None:
        name = "" if group is None else group.group_name
        self._prefix = f"megaverl/reshard/{name}/{_made[name]}"
        _made[name] += 1
        self._rank = rank
        self._group = group
        self._world = dist.get_world_size(group) if dist.is_initialized() else 1
        self._seconds = None if timeout is None else timeout.total_seconds()

    def blame(self, version: int, peer: int, what: str, error: Exception) -> ReshardError:
        """An error that names the rank at the root of this one's failure.

        Args:
            version: of the weights that were moving.
            peer: the rank that this one waited for; -1: all.
            what: this rank was doing, with the boxes concerned.
            error: the transport's.
        """
        found = [Report(peer, what, self._rank)]

        def ask() -> None:
            # the group's own: a group over several worlds reaches ranks that the default group's store does not know
            group = self._group or dist.distributed_c10d._get_default_group()
            store = dist.distributed_c10d._get_process_group_store(group)
            store = dist.PrefixStore(f"{self._prefix}/{version}", store)
            if peer >= 0:
                store.set(f"report/{self._rank}", json.dumps(found[0]))
                store.set("reporter", str(self._rank))
                found[0] = _follow(store, found[0])
            elif culprit := self._missing(store, what):
                found[0] = culprit

        patience = (self._seconds or 0.0) if peer < 0 else 0.0
        _within(patience + 3 * GRACE_SECONDS, ask)
        root = found[0]
        who = f"rank {root.culprit}" if root.culprit >= 0 else "some rank"
        waited = "in time" if self._seconds is None else f"within {self._seconds:g} s"
        here = "" if root.reporter == self._rank else f" Rank {self._rank} was {what}."
        return ReshardError(
            f"{who} died or stalled while the weights of version {version} moved: rank {root.reporter}, {root.doing}, "
            f"got no answer {waited}.{here} ({type(error).__name__}: {cause_of(error)})"
        )

    def _missing(self, store: dist.Store, what: str) -> Report | None:
        """Who is at the root when this rank only knows that not all have come: someone else's report says it, or
        there is one rank alone of which nothing is heard."""
        store.set(f"present/{self._rank}", "")
        store.add("num_present", 1)
        end = time.monotonic() + (self._seconds or 0.0) + GRACE_SECONDS
        while time.monotonic() < end:
            if store.check(["reporter"]):
                return _follow(store, _report_of(store, store.get("reporter").decode()))
            if store.add("num_present", 0) >= self._world - 1:
                break
            time.sleep(POLL_SECONDS)
        silent = [rank for rank in range(self._world) if not store.check([f"present/{rank}"])]
        return Report(silent[0], what, self._rank) if len(silent) == 1 else None


def _report_of(store: dist.Store, rank: int | str) -> Report:
    return Report(*json.loads(store.get(f"report/{rank}")))


def _follow(store: dist.Store, report: Report) -> Report:
    """From a report to that of the rank blamed in it, and on, until one that says nothing."""
    end = time.monotonic() + GRACE_SECONDS
    seen = {report.reporter}
    while time.monotonic() < end and report.culprit not in seen:
        if store.check([f"report/{report.culprit}"]):
            report = _report_of(store, report.culprit)
            seen.add(report.reporter)
        else:
            time.sleep(POLL_SECONDS)
    return report


def _within(seconds: float, function: Callable[[], None]) -> None:
    """Run it in a thread and leave it there if it takes longer: the store's own host may be the one that stalled."""

    def run() -> None:
        try:
            function()
        except RuntimeError:
            # The store went with the rank that hosts it; what this rank knows by itself must do.
            return

    thread = threading.Thread(target=run, daemon=True, name="reshard-failure")
    thread.start()
    thread.join(seconds)
