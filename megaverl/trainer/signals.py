"""SIGTERM and SIGUSR1: the run saves at the next safe point, and every rank leaves with the same exit code."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import device_of

HANDLED = (signal.SIGTERM, signal.SIGUSR1)


class Leaving(Exception):
    """The run was asked to leave, and nothing is lost: every rank ends with `errors.SAVED_AND_LEFT`."""


class PreemptionHandler:
    """Whether somebody wants this run to leave. A signal only notes it; the ranks agree at safe points."""

    def __init__(self) -> None:
        self._heard = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the signals for as long as this lasts; before and after, they do what they did."""
        before = {number: signal.signal(number, self._note) for number in HANDLED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agreed(self, group: dist.ProcessGroup | None = None) -> str | None:
        """The name of a signal that any rank has got, the same on all; every rank (of `group`) takes part."""
        heard = torch.tensor(self._heard, dtype=torch.int64, device=device_of(group))
        dist.all_reduce(heard, op=dist.ReduceOp.MAX, group=group)
        number = int(heard)
        return signal.Signals(number).name if number else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._heard = number
