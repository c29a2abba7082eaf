"""Point-to-point transport: sends and receives over the process group (gloo or NCCL), through bounded buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import device_of
from megaverl.distributed.failures import record_event, wait, wait_for_event
from megaverl.errors import ReshardError
from megaverl.sharding.plan import Hop, Transfer
from megaverl.weights.transports import (
    Message,
    Moved,
    TransferJob,
    copy_boxes,
    messages,
)

TransfersByPeer = Mapping[int, Sequence[Transfer]]
BoxesOf = Callable[[Sequence[Transfer]], list[torch.Tensor]]

# Slots of a bucket in each direction: messages that are packed, in flight or being
# unpacked at the same time.
SLOTS = 4
# Limit of rounds in flight, including those that need no slot on this rank.
DEPTH = 16


class Round(NamedTuple):
    """One outgoing and one incoming message; either may be missing.

    Attributes:
        hop: number of the hop among `Plan.hops`.
        after: number of the hop whose messages must have arrived before `outgoing` can be forwarded. None: `outgoing`
            has weights of the source.
    """

    to: int
    outgoing: Message | None
    from_: int
    incoming: Message | None
    hop: int = 0
    after: int | None = None

    def describe(self, message: Message | None) -> tuple[int, str]:
        """Return the rank at the other end, and a description of the message for errors."""
        if message is not None and message is self.incoming:
            return (
                self.from_,
                f"receiving {message} ({message.nbytes} bytes) from rank {self.from_}",
            )
        return self.to, f"sending {message} to rank {self.to}"


class Pending(NamedTuple):
    """A round in flight.

    `landing` has the received bytes (None: received in place). `has_slot` says whether
    the round uses a slot.
    """

    round: Round
    messages: list[Message]
    works: list[dist.Work]
    landing: torch.Tensor | None
    has_slot: bool


class PointToPoint:
    """Takes everything that must go from rank to rank and that no faster transport has taken.

    In shift s, rank r sends to r + s and receives from r - s. All ranks go through the
    shifts in this order, with one message each way in every round, and several rounds
    in flight. The earliest unfinished round has been started by both its ends, so no
    order of messages can deadlock. Memory use is one bucket for sending and one for
    receiving, of SLOTS parts each. Contiguous boxes in the dtype that is sent need no
    bucket: they are sent and received in place, up to DEPTH rounds at a time.

        world of 4, rank 0:   shift 1: to 1, from 3    shift 2: to 2, from 2    shift 3: to 3, from 1

    The hops of a fan-out follow one after another, each in shifts like these. A rank
    forwards a box from the destination's tensors, so relaying takes no memory but the
    bucket. It waits until the hop that brings the box has arrived. That is an earlier
    hop, so the earliest unfinished round still never waits.
    """

    def __init__(
        self,
        job: TransferJob,
        sends: TransfersByPeer,
        receives: TransfersByPeer,
        relays: Sequence[Hop] = (),
    ) -> None:
        self._job = job
        self._device = device_of(job.group)
        self._rounds = make_rounds(job, sends, receives, relays)
        self._num_messages = sum(
            (r.outgoing is not None) + (r.incoming is not None) for r in self._rounds
        )
        self._sent = sum(
            r.outgoing.nbytes for r in self._rounds if r.outgoing is not None
        )
        self._received = sum(
            r.incoming.nbytes for r in self._rounds if r.incoming is not None
        )
        self._begun = 0
        self._pending: deque[Pending] = deque()
        self._on_device: list[tuple[torch.cuda.Event, Pending]] = []

    @classmethod
    def take(cls, job: TransferJob) -> PointToPoint | None:
        # NCCL requires a collective of all ranks before the first batch of
        # point-to-point operations.
        if job.plan.world > 1 and (device := device_of(job.group)).type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device), group=job.group)
        sends, receives = job.take_peers(lambda peer: True)
        made = cls(job, sends, receives, job.take_relays())
        return made if made._rounds else None

    def start(self, version: int) -> None:
        """Start the first rounds."""
        self._version, self._begun, self._slots_given = version, 0, 0
        self._pending.clear()
        self._on_device.clear()
        # This is decided in each version: offloading between them can move a box to
        # host memory, which is not sent in place.
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
        # Between reshards the memory belongs to activations or the KV cache.
        del self._buckets
        return Moved(
            sent=self._sent, received=self._received, messages=self._num_messages
        )

    def _may_begin(self) -> bool:
        """Return whether there is a next round that has what it forwards, and a slot if
        it needs one. Rounds and slots are released in order.
        """
        if self._begun == len(self._rounds) or len(self._pending) == DEPTH:
            return False
        if self._waits_for_arrivals(self._rounds[self._begun]):
            return False
        needs_slot = any(self._needed[self._begun].values())
        return (
            not needs_slot or sum(pending.has_slot for pending in self._pending) < SLOTS
        )

    def _waits_for_arrivals(self, round_: Round) -> bool:
        """Return whether a round forwards weights that may still be on their way to this rank."""
        if round_.outgoing is None or round_.after is None:
            return False
        return any(
            pending.round.incoming is not None and pending.round.hop <= round_.after
            for pending in self._pending
        )

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
            ops.append(
                dist.P2POp(dist.irecv, data, group=job.group, group_peer=round_.from_)
            )
            carried.append(message)
        if message := round_.outgoing:
            boxes_of = self._origins_of(round_)
            data = self._in_place(message, boxes_of)
            if data is None:
                data = self._buckets["out"][slot][: message.nbytes]
                boxes = boxes_of(message.transfers)
                parts = self._parts(message, data)
                copy_boxes(
                    [
                        part.view(box.shape)
                        for part, box in zip(parts, boxes, strict=True)
                    ],
                    boxes,
                )
            ops.append(
                dist.P2POp(dist.isend, data, group=job.group, group_peer=round_.to)
            )
            carried.append(message)
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise job.failures.blame(
                self._version, *round_.describe(carried[0]), error
            ) from error
        self._pending.append(Pending(round_, carried, works, landing, has_slot))

    def _end(self) -> None:
        """Wait for the earliest round and unpack its message."""
        pending = self._pending.popleft()
        for index, work in enumerate(pending.works):
            try:
                wait(work, self._job.options.timeout)
            except RuntimeError as error:
                raise self._blame(pending, index, error) from error
        if pending.landing is not None and (message := pending.round.incoming):
            copy_boxes(
                self._job.targets(message.transfers),
                self._parts(message, pending.landing),
            )
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
        return self._job.failures.blame(
            self._version, *pending.round.describe(pending.messages[index]), error
        )

    def _make_buckets(self) -> dict[str, list[torch.Tensor]]:
        """Allocate the slots, only as large as the messages that need packing on this rank."""
        # Rounds take the slots in turn, so each slot is as large as the largest message
        # that will use it.
        needed = {"in": [0] * SLOTS, "out": [0] * SLOTS}
        number = 0
        for needs in self._needed:
            for side, nbytes in needs.items():
                needed[side][number % SLOTS] = max(needed[side][number % SLOTS], nbytes)
            number += any(needs.values())
        return {
            side: [
                torch.empty(size, dtype=torch.uint8, device=self._device)
                for size in sizes
            ]
            for side, sizes in needed.items()
        }

    def _needs(self, round_: Round) -> dict[str, int]:
        """Return the bytes of a slot that a round needs on each side; none for a
        message that is sent or received in place.
        """
        origins_of = self._origins_of(round_)
        sides = (
            ("in", round_.incoming, self._job.targets),
            ("out", round_.outgoing, origins_of),
        )
        return {
            side: message.nbytes
            if message and self._in_place(message, boxes_of) is None
            else 0
            for side, message, boxes_of in sides
        }

    def _origins_of(self, round_: Round) -> BoxesOf:
        """Return the function from transfers to the boxes that a round's outgoing message has."""
        return self._job.origins if round_.after is None else self._job.forwarded

    def _in_place(self, message: Message, boxes_of: BoxesOf) -> torch.Tensor | None:
        """Return the bytes of a message's single box if it can be sent or received in place, else None."""
        if len(message.transfers) > 1:
            return None
        (data,) = boxes_of(message.transfers)
        if (
            data.dtype != self._job.wire_of(message.transfers[0])
            or not data.is_contiguous()
        ):
            return None
        # An offloaded FSDP2 shard is in host memory, which the group's backend may not
        # support.
        if data.device.type != self._device.type:
            return None
        return data.view(-1).view(torch.uint8)

    def _parts(self, message: Message, space: torch.Tensor) -> list[torch.Tensor]:
        """Return the elements of each box of a message, as views of its bytes."""
        dtypes = [self._job.wire_of(transfer) for transfer in message.transfers]
        ends = (*message.offsets[1:], message.nbytes)
        return [
            space[a:b].view(dtype)
            for a, b, dtype in zip(message.offsets, ends, dtypes, strict=True)
        ]


def make_rounds(
    job: TransferJob,
    sends: TransfersByPeer,
    receives: TransfersByPeer,
    relays: Sequence[Hop] = (),
) -> list[Round]:
    """Return the messages of these boxes in the order in which they are sent: hop by hop, and by shifts in each.

    Args:
        sends, receives: hop 0, what goes directly from the source to the destination.
        relays: the hops of a fan-out, numbered from 1.
    """
    rank, world, size = (
        job.plan.rank,
        job.plan.world,
        max(1, job.options.bucket_bytes // SLOTS),
    )
    rounds: list[Round] = []
    hops: list[tuple[TransfersByPeer, TransfersByPeer, int | None]] = [
        (sends, receives, None),
        *relays,
    ]
    for number, (sent, received, after_relay) in enumerate(hops):
        after = None if after_relay is None else after_relay + 1
        # A fan-out has dozens of hops, in each of which a rank meets a few of a
        # thousand peers.
        shifts = {(to - rank) % world for to in sent} | {
            (rank - from_) % world for from_ in received
        }
        for shift in sorted(shifts):
            to, from_ = (rank + shift) % world, (rank - shift) % world
            outgoing = messages(sent.get(to, ()), job.wire_of, size)
            incoming = messages(received.get(from_, ()), job.wire_of, size)
            rounds += [
                Round(to, out, from_, in_, number, after)
                for out, in_ in zip_longest(outgoing, incoming)
            ]
    return rounds
