"""Movers: what carries a plan's boxes. Local copies, and point to point between ranks in bounded buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist

from megaverl.layout.boxes import Box, carry, split
from megaverl.reshard.plan import Plan, Transfer
from megaverl.reshard.views import view

BUCKET_BYTES = 64 * 2**20
# A box of at least this part of a bucket travels alone, so that it can be sent from and land in its place.
ALONE = 1 / 16
# Boxes start at multiples of this in a bucket, whatever their dtypes.
ALIGNMENT = 16

Tensors = Mapping[str, torch.Tensor]


class Message(NamedTuple):
    """Boxes that travel together from one rank to another, and the byte at which each starts."""

    transfers: tuple[Transfer, ...]
    offsets: tuple[int, ...]
    nbytes: int


class Round(NamedTuple):
    """One message out and one in, either of which may be missing."""

    to: int
    outgoing: Message | None
    from_: int
    incoming: Message | None


def copy_local(copies: Sequence[Transfer], source: Tensors, dest: Tensors) -> int:
    """Copy each box within this rank, converting the dtype. Returns the bytes written."""
    nbytes = 0
    for transfer in copies:
        target = view(dest[transfer.dest_local], transfer.dest_box)
        origin = view(source[transfer.source_local], transfer.source_box)
        target.copy_(origin.reshape(target.shape))
        nbytes += target.numel() * target.element_size()
    return nbytes


def messages(transfers: Sequence[Transfer], itemsize: int, bucket_bytes: int) -> list[Message]:
    """Pack the boxes from one rank to another into messages of at most `bucket_bytes`.

    Both ranks call this with the same boxes and get the same messages: it looks at sizes only. Their number
    grows with the bytes, not with the boxes: small boxes share a message, large ones travel alone, and those
    larger than a bucket in several parts.
    """
    out: list[Message] = []
    packed: list[Transfer] = []
    offsets: list[int] = []
    end = 0

    def close() -> None:
        if packed:
            out.append(Message(tuple(packed), tuple(offsets), end))
            packed.clear()
            offsets.clear()

    for transfer in _parts(transfers, max(1, bucket_bytes // itemsize)):
        nbytes = transfer.box.numel * itemsize
        if nbytes >= bucket_bytes * ALONE:
            out.append(Message((transfer,), (0,), nbytes))
            continue
        start = -(-end // ALIGNMENT) * ALIGNMENT if packed else 0
        if start + nbytes > bucket_bytes:
            close()
            start = 0
        packed.append(transfer)
        offsets.append(start)
        end = start + nbytes
    close()
    return out


def _parts(transfers: Sequence[Transfer], max_numel: int) -> Iterator[Transfer]:
    for transfer in transfers:
        if transfer.box.numel <= max_numel:
            yield transfer
            continue
        for box in split(transfer.box, max_numel):
            yield transfer._replace(
                box=box,
                source_box=carry(box, transfer.box, transfer.source_box),
                dest_box=carry(box, transfer.box, transfer.dest_box),
            )


class PointToPoint:
    """Sends and receives between the ranks of a group, in rounds that every rank walks through alike.

    In shift s, rank r sends to r + s and receives from r - s, one message each way at a time: a rank never
    holds more than one bucket for sending and one for receiving, and no order of messages can lock up.

    Args:
        group: the ranks of the plan, in order; None: all.
        wire_dtype: what travels; sender and receiver convert to and from it.
        device: of the tensors and buckets.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        wire_dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group = group
        self._wire_dtype = wire_dtype
        self._device = device
        self._bucket_bytes = bucket_bytes

    def rounds(self, plan: Plan) -> list[Round]:
        """The messages of a plan, in the order in which they go."""
        itemsize = self._wire_dtype.itemsize
        rounds = []
        for shift in range(1, plan.world):
            to, from_ = (plan.rank + shift) % plan.world, (plan.rank - shift) % plan.world
            outgoing = messages(plan.sends.get(to, ()), itemsize, self._bucket_bytes)
            incoming = messages(plan.receives.get(from_, ()), itemsize, self._bucket_bytes)
            rounds += [Round(to, out, from_, in_) for out, in_ in zip_longest(outgoing, incoming)]
        return rounds

    def run(self, rounds: Sequence[Round], source: Tensors, dest: Tensors) -> tuple[int, int]:
        """Walk through the rounds. Returns the bytes sent and received."""
        sent = received = 0
        send_bucket, receive_bucket = self._buckets(rounds)
        for round_ in rounds:
            ops = []
            landing = None
            if round_.outgoing is not None:
                data = self._outgoing(round_.outgoing, source, send_bucket)
                ops.append(dist.P2POp(dist.isend, data, group=self._group, group_peer=round_.to))
                sent += round_.outgoing.nbytes
            if round_.incoming is not None:
                landing = self._in_place(round_.incoming, dest, lambda t: (t.dest_local, t.dest_box))
                data = receive_bucket[: round_.incoming.nbytes] if landing is None else landing
                ops.append(dist.P2POp(dist.irecv, data, group=self._group, group_peer=round_.from_))
                received += round_.incoming.nbytes
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            if round_.incoming is not None and landing is None:
                for transfer, space in self._spaces(round_.incoming, receive_bucket):
                    box = view(dest[transfer.dest_local], transfer.dest_box)
                    box.copy_(space.view(box.shape))
        return sent, received

    def _outgoing(self, message: Message, source: Tensors, bucket: torch.Tensor) -> torch.Tensor:
        data = self._in_place(message, source, lambda t: (t.source_local, t.source_box))
        if data is not None:
            return data
        for transfer, space in self._spaces(message, bucket):
            box = view(source[transfer.source_local], transfer.source_box)
            space.view(box.shape).copy_(box)
        return bucket[: message.nbytes]

    def _in_place(
        self, message: Message, tensors: Tensors, where: Callable[[Transfer], tuple[str, Box]]
    ) -> torch.Tensor | None:
        """The bytes of a lone box where it lies, if they can travel from or land there as they are."""
        if len(message.transfers) > 1:
            return None
        name, box = where(message.transfers[0])
        data = view(tensors[name], box)
        if data.dtype != self._wire_dtype or not data.is_contiguous():
            return None
        return data.view(-1).view(torch.uint8)

    def _spaces(self, message: Message, bucket: torch.Tensor) -> Iterator[tuple[Transfer, torch.Tensor]]:
        for transfer, offset in zip(message.transfers, message.offsets, strict=True):
            nbytes = transfer.box.numel * self._wire_dtype.itemsize
            yield transfer, bucket[offset : offset + nbytes].view(self._wire_dtype)

    def _buckets(self, rounds: Sequence[Round]) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = (
            max((r.outgoing.nbytes for r in rounds if r.outgoing is not None), default=0),
            max((r.incoming.nbytes for r in rounds if r.incoming is not None), default=0),
        )
        send, receive = (torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes)
        return send, receive
