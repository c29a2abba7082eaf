"""Point-to-point messages between ranks of a job. They are sent without blocking, and every wait has a deadline.

NCCL messages are sent in batches (`batch_isend_irecv`). For a single message torch
creates a communicator for each pair of ranks, with its own buffers and a rendezvous
that blocks both ranks; batches share the group's communicator (`pointToPoint` in torch
2.11's and 2.13's ProcessGroupNCCL.cpp). A communicator has one stream, on which a
message waits for all earlier ones, whatever their destination. So messages that may be
received late, such as samples that are sent while they are generated, go through host
memory (`HostMessages`). Rows on devices go through NCCL only if all ranks send and
receive them in the same order, which is that of the program's calls.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.distributed.failures import cause_of
from megaverl.distributed.job_context import JobContext
from megaverl.errors import TrainingStopped


class Sending(Protocol):
    """Operation in progress."""

    def is_completed(self) -> bool: ...

    def wait(self) -> None: ...


@dataclass
class PendingSends:
    """Messages in progress. Their tensors are kept until they are sent.

    Example:
        sends = channel.send_to([1, 2], tensor)
        ...
        sends.wait()
    """

    _under_way: list[Sending] = field(default_factory=list)

    def add(self, other: PendingSends) -> None:
        self._under_way += other._under_way

    def forget_done(self) -> None:
        """Drop messages that have been sent."""
        self._under_way = [
            batch for batch in self._under_way if not batch.is_completed()
        ]

    def wait(self) -> None:
        """Wait until all messages are sent.

        Raises:
            TrainingStopped: a rank did not receive one in time; names the rank and its roles.
        """
        while self._under_way:
            self._under_way[0].wait()
            del self._under_way[0]


@dataclass(frozen=True)
class Batch:
    """Messages through a group that were started together, with their tensors by peer."""

    channel: Channel
    works: Sequence[dist.Work]  # one per message (gloo), or one for all (NCCL)
    tensors: Sequence[tuple[int, Tensor]]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self, *, host: bool = True) -> None:
        """Wait until all messages are received or sent.

        With `host=False`, only the current stream waits for messages of a device.
        """
        for work, (peer, tensor) in zip(self.works, self.tensors, strict=False):
            with self.channel.waiting_for(peer):
                if not tensor.is_cuda:
                    work.wait(self.channel.context.timeout)
                    continue
                work.wait()
                if host:
                    torch.cuda.current_stream().synchronize()


@dataclass(frozen=True)
class ToHost:
    """Message between hosts."""

    channel: Channel
    dest: int
    taken: Future[None]

    def is_completed(self) -> bool:
        return self.taken.done()

    def wait(self) -> None:
        with self.channel.waiting_for(self.dest):
            self.taken.result(self.channel.context.timeout.total_seconds())


@dataclass(frozen=True)
class Channel:
    """Sends and receives under one name, with a deadline. Messages of different names do not mix (hosts, gloo).

    Attributes:
        name: name of the channel, which error messages mention.

    Example:
        channel = Channel(context, "samples")
        channel.send_to([1], tensor).wait()  # on rank 0
        (data,) = channel.receive_from(0)  # on rank 1: [n] uint8
    """

    context: JobContext
    name: str

    @property
    def _tag(self) -> int:
        return zlib.crc32(self.name.encode()) & 0x7FFFFFFF

    def send_to(self, dest: Sequence[int], *parts: Tensor | bytes) -> PendingSends:
        """Start sending one message of host data to several ranks through host memory."""
        sent = PendingSends()
        for rank in dest:
            with self.waiting_for(rank):
                taken = self.context.messages.send(rank, self.name, parts)
                sent.add(PendingSends([ToHost(self, rank, taken)]))
        return sent

    def receive_from(self, source: int) -> list[Tensor]:
        """Wait for the message that `send_to` sent from `source`, and return the bytes of its parts, [n] uint8 each."""
        with self.waiting_for(source):
            return self.context.messages.receive(
                source, self.name, self.context.timeout
            )

    def send(self, group: dist.ProcessGroup, out: Mapping[int, Tensor]) -> PendingSends:
        """Start sending tensors through a group, by receiver. Empty tensors are not sent."""
        return PendingSends([self._begin(group, out, {})])

    def receive(self, group: dist.ProcessGroup, into: Mapping[int, Tensor]) -> None:
        """Receive tensors through a group, by sender, all in one batch. Empty tensors are skipped."""
        self._begin(group, {}, into).wait(host=False)

    def exchange(
        self,
        group: dist.ProcessGroup,
        out: Mapping[int, Tensor],
        into: Mapping[int, Tensor],
    ) -> None:
        """Send `out` by receiver and receive `into` by sender, in one batch.

        Separate NCCL calls could deadlock, because each rank could wait for the other
        one to receive first.
        """
        self._begin(group, out, into).wait(host=False)

    def _begin(
        self,
        group: dist.ProcessGroup,
        out: Mapping[int, Tensor],
        into: Mapping[int, Tensor],
    ) -> Batch:
        moving: list[tuple[Callable[..., dist.Work | None], int, Tensor]]
        moving = [
            (dist.irecv, peer, tensor)
            for peer, tensor in into.items()
            if tensor.numel()
        ]
        moving += [
            (dist.isend, peer, tensor) for peer, tensor in out.items() if tensor.numel()
        ]
        if not moving:
            return Batch(self, (), ())
        operations = [
            dist.P2POp(move, tensor, None, group, self._tag, peer)
            for move, peer, tensor in moving
        ]
        with self.waiting_for(moving[0][1]):
            works = dist.batch_isend_irecv(operations)
        return Batch(self, works, [(peer, tensor) for _, peer, tensor in moving])

    @contextmanager
    def waiting_for(self, peer: int) -> Iterator[None]:
        """Return a context that turns errors about a lost or late peer into `TrainingStopped`."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise TrainingStopped(
                f"{self.name}: {self.context.describe(peer)} died or stalled: nothing went between it and rank "
                f"{self.context.rank} within {self.context.timeout.total_seconds():g} s "
                f"({cause_of(error) if str(error) else 'timed out'})"
            ) from error


def send_json(context: JobContext, name: str, dest: int, value: Any) -> PendingSends:
    """Start sending a small JSON message to one rank."""
    return Channel(context, name).send_to([dest], json.dumps(value).encode())


def receive_json(context: JobContext, name: str, source: int) -> Any:
    """Wait for the message that `send_json` sent under this name from `source`, and return its value."""
    (data,) = Channel(context, name).receive_from(source)
    return json.loads(data.numpy().tobytes())
