"""Messages between ranks of the job, point to point: on their way at once, waited for when it suits, never for ever."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.distributed.collectives import from_bytes, to_bytes
from megaverl.distributed.worlds import Fabric
from megaverl.errors import TrainingStopped
from megaverl.platform import platform


@dataclass
class Sent:
    """Messages on their way; their tensors are kept until they have left."""

    _under_way: list[tuple[Call, int, Any, Tensor]] = field(default_factory=list)

    def add(self, other: Sent) -> None:
        self._under_way += other._under_way

    def forget_done(self) -> None:
        """Let go of what has left."""
        self._under_way = [one for one in self._under_way if not one[2].is_completed()]

    def wait(self) -> None:
        """Until all have left.

        Raises:
            TrainingStopped: a rank did not take one in time, by number and role.
        """
        while self._under_way:
            call, peer, work, _ = self._under_way[0]
            call.wait(work, peer)
            del self._under_way[0]


@dataclass(frozen=True)
class Call:
    """Sends and receives under one name, with a deadline; under different names they do not mix (gloo)."""

    fabric: Fabric
    name: str

    @property
    def _tag(self) -> int:
        return zlib.crc32(self.name.encode()) & 0x7FFFFFFF

    def send(self, group: dist.ProcessGroup, out: Mapping[int, Tensor]) -> Sent:
        """By receiver; what is empty does not travel."""
        sent = Sent()
        for peer, tensor in out.items():
            if tensor.numel():
                try:
                    work = dist.isend(tensor, group=group, group_dst=peer, tag=self._tag)
                except RuntimeError as error:
                    raise self._blame(peer, error) from error
                sent._under_way.append((self, peer, work, tensor))
        return sent

    def receive(self, group: dist.ProcessGroup, into: Mapping[int, Tensor]) -> None:
        """By sender, all at once; what is empty does not travel."""
        works = []
        for peer, tensor in into.items():
            if tensor.numel():
                try:
                    works.append((peer, dist.irecv(tensor, group=group, group_src=peer, tag=self._tag)))
                except RuntimeError as error:
                    raise self._blame(peer, error) from error
        for peer, work in works:
            self.wait(work, peer)

    def exchange(self, group: dist.ProcessGroup, out: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
        """`out` by receiver, `into` by sender, all in one batch: NCCL would let two ranks wait for each other else."""
        peers = [peer for peer, tensor in into.items() if tensor.numel()]
        operations = [dist.P2POp(dist.irecv, into[peer], group=group, group_peer=peer, tag=self._tag) for peer in peers]
        for peer, tensor in out.items():
            if tensor.numel():
                peers.append(peer)
                operations.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=peer, tag=self._tag))
        if not peers:
            return
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self._blame(peers[0], error) from error
        for work, peer in zip(works, peers, strict=False):  # NCCL gives one work for all; gloo one for each
            self.wait(work, peer)

    def wait(self, work: Any, peer: int) -> None:
        try:
            if platform.is_cuda:
                work.wait()
                torch.cuda.current_stream().synchronize()
            else:
                work.wait(self.fabric.timeout)
        except RuntimeError as error:
            raise self._blame(peer, error) from error

    def _blame(self, peer: int, error: Exception) -> TrainingStopped:
        return TrainingStopped(
            f"{self.name}: {self.fabric.describe(peer)} died or stalled: nothing went between it and rank "
            f"{self.fabric.rank} within {self.fabric.timeout.total_seconds():g} s "
            f"({str(error).splitlines()[0][:200]})"
        )


def send_json(fabric: Fabric, name: str, dest: int, value: Any) -> Sent:
    """A small message to one rank."""
    data = to_bytes(value)
    call = Call(fabric, name)
    sent = call.send(fabric.control, {dest: torch.tensor([data.numel()])})
    sent.add(call.send(fabric.control, {dest: data}))
    return sent


def receive_json(fabric: Fabric, name: str, source: int) -> Any:
    """What `send_json` of that name has sent from there, when it comes."""
    call, length = Call(fabric, name), torch.zeros(1, dtype=torch.int64)
    call.receive(fabric.control, {source: length})
    data = torch.empty(int(length), dtype=torch.uint8)
    call.receive(fabric.control, {source: data})
    return from_bytes(data)
