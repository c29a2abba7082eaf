"""Messages of so many numbers, written and read where they are sent from: torch's conversions would take longer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


class PackedMessage:
    """Of `count` float64 numbers, to be sent or received again and again, by one thread at a time.

    Attributes:
        data: [count] float64, what travels. peer: to whom it went last.
    """

    def __init__(self, count: int) -> None:
        self.data = torch.zeros(count, dtype=torch.float64)
        self.peer = -1
        self._memory = self.data.numpy().data.cast("B")
        self._form = struct.Struct(f"{count}d")
        self._sent: list[tuple[int, dist.Work]] = []

    @property
    def num_bytes(self) -> int:
        return self._form.size

    def write(self, numbers: Sequence[float]) -> None:
        self._form.pack_into(self._memory, 0, *numbers)

    def read(self) -> tuple[float, ...]:
        return self._form.unpack_from(self._memory)

    def send(self, group: dist.ProcessGroup, to: int, tag: int) -> None:
        """Begin to; `settle` before anything else is written."""
        work = dist.isend(self.data, group=group, group_dst=to, tag=tag)
        assert work is not None
        self._sent.append((to, work))

    def settle(self, timeout: timedelta) -> None:
        """Wait until all that was sent is on its way.

        Raises:
            RuntimeError: the transport's, with `peer` whom it was for.
        """
        for peer, work in self._sent:
            self.peer = peer
            work.wait(timeout)
        self._sent.clear()

    def receive(self, group: dist.ProcessGroup, source: int, tag: int, timeout: timedelta) -> tuple[float, ...]:
        """The numbers that come.

        Raises:
            RuntimeError: the transport's.
        """
        work = dist.irecv(self.data, group=group, group_src=source, tag=tag)
        assert work is not None
        work.wait(timeout)
        return self.read()
