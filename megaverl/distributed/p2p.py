"""Messages between ranks of the job, point to point: sent at once, waited for when it suits, never for ever.

What goes through NCCL goes in batches (`batch_isend_irecv`). torch gives every pair of ranks that exchanges a lone
message a communicator of its own, with its buffers and a rendezvous that blocks both; those of a batch share the
group's (`pointToPoint` in torch 2.11's and 2.13's ProcessGroupNCCL.cpp). One communicator has one stream, on which
messages wait for those before them whomever they go to. So what may be taken late, such as samples that are sent
while they are written, goes through the control group.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.distributed.failures import cause_of
from megaverl.distributed.worlds import Fabric
from megaverl.errors import TrainingStopped


@dataclass
class PendingSends:
    """Messages being sent; their tensors are kept until they have left."""

    _under_way: list[Batch] = field(default_factory=list)

    def add(self, other: PendingSends) -> None:
        self._under_way += other._under_way

    def forget_done(self) -> None:
        """Let go of what has left."""
        self._under_way = [one for one in self._under_way if not one.is_completed()]

    def wait(self) -> None:
        """Until all have left.

        Raises:
            TrainingStopped: a rank did not take one in time, by number and role.
        """
        while self._under_way:
            self._under_way[0].wait()
            del self._under_way[0]


@dataclass(frozen=True)
class Batch:
    """Messages that were begun together, and their tensors, by peer."""

    channel: Channel
    works: Sequence[dist.Work]  # one for each message (gloo), or one for all (NCCL)
    tensors: Sequence[tuple[int, Tensor]]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Until all have come or left."""
        for work, (peer, tensor) in zip(self.works, self.tensors, strict=False):
            self.channel.wait(work, peer, tensor)


@dataclass(frozen=True)
class Channel:
    """Sends and receives under one name, with a deadline; under different names they do not mix (gloo).

    Attributes:
        patience: how much longer than the fabric's timeout a message may take.
    """

    fabric: Fabric
    name: str
    patience: timedelta = timedelta(0)

    @property
    def _tag(self) -> int:
        return zlib.crc32(self.name.encode()) & 0x7FFFFFFF

    def send(self, group: dist.ProcessGroup, out: Mapping[int, Tensor]) -> PendingSends:
        """By receiver; what is empty does not travel."""
        return PendingSends([self._begin(group, out, {})])

    def receive(self, group: dist.ProcessGroup, into: Mapping[int, Tensor]) -> None:
        """By sender, all at once; what is empty does not travel."""
        self._begin(group, {}, into).wait()

    def exchange(self, group: dist.ProcessGroup, out: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
        """`out` by receiver, `into` by sender, all in one batch: NCCL would let two ranks wait for each other else."""
        self._begin(group, out, into).wait()

    def _begin(self, group: dist.ProcessGroup, out: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> Batch:
        moving: list[tuple[Callable[..., dist.Work | None], int, Tensor]]
        moving = [(dist.irecv, peer, tensor) for peer, tensor in into.items() if tensor.numel()]
        moving += [(dist.isend, peer, tensor) for peer, tensor in out.items() if tensor.numel()]
        if not moving:
            return Batch(self, (), ())
        operations = [dist.P2POp(move, tensor, None, group, self._tag, peer) for move, peer, tensor in moving]
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self._lost(moving[0][1], error) from error
        return Batch(self, works, [(peer, tensor) for _, peer, tensor in moving])

    def wait(self, work: dist.Work, peer: int, tensor: Tensor) -> None:
        """Until a message from or to a peer has come or left."""
        try:
            if tensor.is_cuda:
                work.wait()
                torch.cuda.current_stream().synchronize()
            else:
                work.wait(self.fabric.timeout + self.patience)
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _lost(self, peer: int, error: Exception) -> TrainingStopped:
        return TrainingStopped(
            f"{self.name}: {self.fabric.describe(peer)} died or stalled: nothing went between it and rank "
            f"{self.fabric.rank} within {(self.fabric.timeout + self.patience).total_seconds():g} s "
            f"({cause_of(error)})"
        )


def send_json(fabric: Fabric, name: str, dest: int, value: Any) -> PendingSends:
    """A small message to one rank."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    channel = Channel(fabric, name)
    sent = channel.send(fabric.control, {dest: torch.tensor([data.numel()])})
    sent.add(channel.send(fabric.control, {dest: data}))
    return sent


def receive_json(fabric: Fabric, name: str, source: int) -> Any:
    """What `send_json` of that name has sent from there, when it comes."""
    channel, length = Channel(fabric, name), torch.zeros(1, dtype=torch.int64)
    channel.receive(fabric.control, {source: length})
    data = torch.empty(int(length), dtype=torch.uint8)
    channel.receive(fabric.control, {source: data})
    return json.loads(data.numpy().tobytes())
