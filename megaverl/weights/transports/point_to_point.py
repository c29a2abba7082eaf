"""The point-to-point transport: sends and receives over the process group, gloo or NCCL, through bounded buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist

from megaverl.distributed.failures import record_event, wait, wait_for_event
from megaverl.errors import ReshardError
from megaverl.platform import platform
from megaverl.sharding.plan import Transfer
from megaverl.weights.transports import Message, Moved, TransferJob, copy_boxes, messages

# Parts of a bucket, per direction, that are packed, on their way or being unpacked at the same time.
SLOTS = 4
# Rounds on their way at the same time, with those that need no bucket on either side of this rank.
DEPTH = 16


class Round(NamedTuple):
    """One message out and one in, either of which may be missing."""

    to: int
    outgoing: Message | None
    from_: int
    incoming: Message | None

    def describe(self, message: Message | None) -> tuple[int, str]:
        """The rank at the other end, and what is done with it."""
        if message is not None and message is self.incoming:
            return self.from_, f"receiving {message} ({message.nbytes} bytes) from rank {self.from_}"
        return self.to, f"sending {message} to rank {self.to}"


class Pending(NamedTuple):
    """A round that is on its way, the bytes where its message lands (None: in place), whether it has a slot."""

    round: Round
    messages: list[Message]
    works: list[dist.Work]
    landing: torch.Tensor | None
    has_slot: bool


class PointToPoint:
    """Takes all that must go from rank to rank and that no faster way was found for.

    In shift s, rank r sends to r + s and receives from r - s. All ranks walk through the shifts in this order,
    a message each way in every round, with several rounds begun at a time: the earliest round that is not over has
    been begun by both its ends, so no order of messages can lock up. A bucket for sending and one for receiving, of
    SLOTS parts each, are all the memory that it takes; boxes that are contiguous and of the dtype that travels are
    sent from and land in their place, up to DEPTH rounds of them at a time.
    """

    def __init__(
        self, job: TransferJob, sends: Mapping[int, Sequence[Transfer]], receives: Mapping[int, Sequence[Transfer]]
    ) -> None:
        self._job = job
        self._rounds = make_rounds(job, sends, receives)
        self._num_messages = sum((r.outgoing is not None) + (r.incoming is not None) for r in self._rounds)
        self._sent = sum(r.outgoing.nbytes for r in self._rounds if r.outgoing is not None)
        self._received = sum(r.incoming.nbytes for r in self._rounds if r.incoming is not None)
        self._begun = 0
        self._pending: deque[Pending] = deque()
        self._on_device: list[tuple[torch.cuda.Event, Pending]] = []

    @classmethod
    def take(cls, job: TransferJob) -> PointToPoint | None:
        if platform.is_cuda and job.plan.world > 1:  # NCCL wants a collective of all before the first of these
            dist.all_reduce(torch.zeros(1, device=platform.device), group=job.group)
        sends, receives = job.take_peers(lambda peer: True)
        return cls(job, sends, receives) if sends or receives else None

    def start(self, version: int) -> None:
        """Send off the first rounds."""
        self._version, self._begun, self._slots_given = version, 0, 0
        self._pending.clear()
        self._on_device.clear()
        self._needed = [self._needs(round_) for round_ in self._rounds]
        self._buckets = self._make_buckets()
        while self._may_begin():
            self._begin()

    def finish(self) -> Moved:
        while self._pending:
            self._end()
            while self._may_begin():
                self._begin()
        self._wait_for_device()
        del self._buckets
        return Moved(sent=self._sent, received=self._received, messages=self._num_messages)

    def _may_begin(self) -> bool:
        """Whether there is a next round, and a slot for it if it needs one: rounds end in order, and so do slots."""
        if self._begun == len(self._rounds) or len(self._pending) == DEPTH:
            return False
        needs_slot = any(self._needed[self._begun].values())
        return not needs_slot or sum(pending.has_slot for pending in self._pending) < SLOTS

    def _begin(self) -> None:
        round_, slot = self._rounds[self._begun], self._slots_given % SLOTS
        has_slot = any(self._needed[self._begun].values())
        self._begun += 1
        self._slots_given += has_slot
        job = self._job
        ops, carried, landing = [], [], None
        if message := round_.incoming:
            data = self._in_place(message, job.targets)
            if data is None:
                data = landing = self._buckets["in"][slot][: message.nbytes]
            ops.append(dist.P2POp(dist.irecv, data, group=job.group, group_peer=round_.from_))
            carried.append(message)
        if message := round_.outgoing:
            data = self._in_place(message, job.origins)
            if data is None:
                data = self._buckets["out"][slot][: message.nbytes]
                boxes = job.origins(message.transfers)
                parts = self._parts(message, data)
                copy_boxes([part.view(box.shape) for part, box in zip(parts, boxes, strict=True)], boxes)
            ops.append(dist.P2POp(dist.isend, data, group=job.group, group_peer=round_.to))
            carried.append(message)
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise job.failures.blame(self._version, *round_.describe(carried[0]), error) from error
        self._pending.append(Pending(round_, carried, works, landing, has_slot))

    def _end(self) -> None:
        """Wait for the earliest round, and unpack what it brought."""
        pending = self._pending.popleft()
        for index, work in enumerate(pending.works):
            try:
                wait(work, self._job.options.timeout)
            except RuntimeError as error:
                raise self._blame(pending, index, error) from error
        if pending.landing is not None and (message := pending.round.incoming):
            copy_boxes(self._job.targets(message.transfers), self._parts(message, pending.landing))
        if (event := record_event()) is not None:
            self._on_device.append((event, pending))

    def _wait_for_device(self) -> None:
        for event, pending in self._on_device:
            try:
                wait_for_event(event, self._job.options.timeout)
            except TimeoutError as error:
                raise self._blame(pending, 0, error) from error
        self._on_device.clear()

    def _blame(self, pending: Pending, index: int, error: Exception) -> ReshardError:
        return self._job.failures.blame(self._version, *pending.round.describe(pending.messages[index]), error)

    def _make_buckets(self) -> dict[str, list[torch.Tensor]]:
        """Memory for the slots, none for messages that need no packing on this side."""
        needed = {"in": [0] * SLOTS, "out": [0] * SLOTS}
        number = 0
        for needs in self._needed:
            for side, nbytes in needs.items():
                needed[side][number % SLOTS] = max(needed[side][number % SLOTS], nbytes)
            number += any(needs.values())
        return {
            side: [torch.empty(size, dtype=torch.uint8, device=platform.device) for size in sizes]
            for side, sizes in needed.items()
        }

    def _needs(self, round_: Round) -> dict[str, int]:
        """Bytes of a slot that a round takes on this side: none where its boxes travel from and to their place."""
        sides = (("in", round_.incoming, self._job.targets), ("out", round_.outgoing, self._job.origins))
        return {
            side: message.nbytes if message and self._in_place(message, boxes_of) is None else 0
            for side, message, boxes_of in sides
        }

    def _in_place(
        self, message: Message, boxes_of: Callable[[Sequence[Transfer]], list[torch.Tensor]]
    ) -> torch.Tensor | None:
        """The bytes of a lone box where it lies, if they can travel from or land there as they are."""
        if len(message.transfers) > 1:
            return None
        (data,) = boxes_of(message.transfers)
        if data.dtype != self._job.wire_of(message.transfers[0]) or not data.is_contiguous():
            return None
        if data.device.type != platform.device.type:  # an FSDP2 shard in host memory
            return None
        return data.view(-1).view(torch.uint8)

    def _parts(self, message: Message, space: torch.Tensor) -> list[torch.Tensor]:
        """The elements of each box of a message, in its bytes."""
        dtypes = [self._job.wire_of(transfer) for transfer in message.transfers]
        ends = (*message.offsets[1:], message.nbytes)
        return [space[a:b].view(dtype) for a, b, dtype in zip(message.offsets, ends, dtypes, strict=True)]


def make_rounds(
    job: TransferJob, sends: Mapping[int, Sequence[Transfer]], receives: Mapping[int, Sequence[Transfer]]
) -> list[Round]:
    """The messages of these boxes, in the order in which they go."""
    rank, world, size = job.plan.rank, job.plan.world, max(1, job.options.bucket_bytes // SLOTS)
    rounds: list[Round] = []
    for shift in range(1, world):
        to, from_ = (rank + shift) % world, (rank - shift) % world
        outgoing = messages(sends.get(to, ()), job.wire_of, size)
        incoming = messages(receives.get(from_, ()), job.wire_of, size)
        rounds += [Round(to, out, from_, in_) for out, in_ in zip_longest(outgoing, incoming)]
    return rounds
