"""Waiting for other ranks with a deadline, on gloo and on NCCL."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megaverl.platform import platform

POLL_SECONDS = 1e-4


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
        time.sleep(POLL_SECONDS)
