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
    messages_by_dtype,
)
from megaverl.weights.transports.deltas import (
    DeltaMessages,
    MessageSizes,
    Outgoing,
)
from megaverl.weights.transports.sent_weights import is_compared

TransfersByPeer = Mapping[int, Sequence[Transfer]]
BoxesOf = Callable[[Sequence[Transfer]], list[torch.Tensor]]

# Slots of a bucket in each direction: messages that are packed, in flight or being
# unpacked at the same time.
SLOTS = 4
# Limit of rounds in flight, including those that need no slot on this rank.
DEPTH = 16


class Round(NamedTuple):
    """One outgoing and one incoming message; either may be missing.

    In a version that moves as changes, some rounds carry the sizes of later messages.

    Attributes:
        hop: number of the hop among `Plan.hops`.
        after: number of the hop whose messages must have arrived before `outgoing` can be forwarded. None: `outgoing`
            has weights of the source.
    """

    to: int
    outgoing: Message | MessageSizes | None
    from_: int
    incoming: Message | MessageSizes | None
    hop: int = 0
    after: int | None = None

    def describe(self, message: Message | MessageSizes | None) -> tuple[int, str]:
        """Return the rank at the other end, and a description of the message for errors."""
        if message is not None and message is self.incoming:
            return (
                self.from_,
                f"receiving {message} ({message.nbytes} bytes) from rank {self.from_}",
            )
        return self.to, f"sending {message} to rank {self.to}"


class Pending(NamedTuple):
    """A round in flight.

    `landing` has the received bytes (None: received in place), `sending` those that
    leave. `has_slot` says whether the round uses a slot.
    """

    round: Round
    messages: list[Message | MessageSizes]
    works: list[dist.Work]
    landing: torch.Tensor | None
    sending: torch.Tensor | None
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

    In a version that moves as changes (`deltas`), each hop begins with rounds that carry
    the sizes of its messages. A message waits until its size has arrived in an earlier
    round, so the same holds. Buffers are then as large as what is in flight, and encoded
    messages that wait take at most one more bucket.
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
        self._whole_rounds = self._rounds = make_rounds(job, sends, receives, relays)
        self._delta_rounds: list[Round] = []
        self._deltas: DeltaMessages | None = None
        if job.sent is not None:
            self._delta_rounds = make_rounds(
                job, sends, receives, relays, announced=True
            )
            self._deltas = self._make_deltas(self._delta_rounds)
        self._sends_changes = False
        self._buckets: dict[str, list[torch.Tensor]] = {}
        self._sent = self._received = self._unsent = self._num_messages = 0
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
        self._sent = self._received = self._unsent = self._num_messages = 0
        self._pending.clear()
        self._on_device.clear()
        sent = self._job.sent
        self._sends_changes = sent is not None and sent.due
        if self._sends_changes and self._deltas is not None:
            # The size of a message is known only shortly before it is sent, so its
            # buffer is allocated then.
            self._rounds = self._delta_rounds
            self._deltas.begin(version)
        else:
            # This is decided in each version: offloading between them can move a box
            # to host memory, which is not sent in place.
            self._rounds = self._whole_rounds
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
        self._buckets = {}
        moved = Moved(
            sent=self._sent,
            received=self._received,
            messages=self._num_messages,
            unsent=self._unsent,
        )
        if self._sends_changes and self._deltas is not None:
            compared, changed = self._deltas.compared, self._deltas.changed
            moved = moved._replace(compared=compared, changed=changed)
        return moved

    def _may_begin(self) -> bool:
        """Return whether there is a next round that has what it forwards, and a slot if
        it needs one. Rounds and slots are released in order.
        """
        if self._begun == len(self._rounds) or len(self._pending) == DEPTH:
            return False
        round_ = self._rounds[self._begun]
        if self._waits_for_arrivals(round_) or self._waits_for_size(round_):
            return False
        needs_slot = self._takes_slot(round_)
        return (
            not needs_slot or sum(pending.has_slot for pending in self._pending) < SLOTS
        )

    def _takes_slot(self, round_: Round) -> bool:
        """Return whether the next round needs a slot."""
        if self._sends_changes:
            return any(self._needs(round_).values())
        return any(self._needed[self._begun].values())

    def _waits_for_size(self, round_: Round) -> bool:
        """Return whether the size of the round's incoming message may still be on its way."""
        if not self._sends_changes or not isinstance(round_.incoming, Message):
            return False
        return any(
            isinstance(pending.round.incoming, MessageSizes)
            and pending.round.hop == round_.hop
            and pending.round.from_ == round_.from_
            for pending in self._pending
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
        has_slot = self._takes_slot(round_)
        self._begun += 1
        self._slots_given += has_slot
        job = self._job
        ops: list[dist.P2POp] = []
        carried: list[Message | MessageSizes] = []
        landing = sending = None
        if message := round_.incoming:
            data = self._space_for(message)
            if data is None:
                nbytes = self._incoming_bytes(message)
                data = landing = self._buffer("in", slot, nbytes)
            # Both ends leave out a message without changes.
            if data.numel():
                ops.append(
                    dist.P2POp(
                        dist.irecv, data, group=job.group, group_peer=round_.from_
                    )
                )
                carried.append(message)
            self._received += data.numel()
        if message := round_.outgoing:
            sending = self._data_of(round_, message, slot)
            if sending.numel():
                ops.append(
                    dist.P2POp(
                        dist.isend, sending, group=job.group, group_peer=round_.to
                    )
                )
                carried.append(message)
            self._sent += sending.numel()
            if isinstance(message, Message):
                self._unsent += message.nbytes - sending.numel()
        self._num_messages += len(ops)
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise job.failures.blame(
                self._version, *round_.describe(carried[0]), error
            ) from error
        self._pending.append(
            Pending(round_, carried, works, landing, sending, has_slot)
        )

    def _space_for(self, message: Message | MessageSizes) -> torch.Tensor | None:
        """Return where a message is received in place, or None if it needs a buffer."""
        if isinstance(message, MessageSizes) or self._arrives_encoded(message):
            return None
        return self._in_place(message, self._job.targets)

    def _data_of(
        self, round_: Round, message: Message | MessageSizes, slot: int
    ) -> torch.Tensor:
        """Return the bytes of a round's outgoing message."""
        if isinstance(message, MessageSizes):
            assert self._deltas is not None
            numbers = torch.tensor(self._deltas.announce(message))
            return numbers.to(self._device).view(torch.uint8)
        deltas = self._deltas if self._sends_changes else None
        if deltas is not None and deltas.outgoing_bytes(message) is not None:
            data = deltas.payload(message)
        else:
            data = self._whole_data(round_, message, slot)
        if deltas is not None:
            deltas.is_sent(message)
        return data

    def _whole_data(self, round_: Round, message: Message, slot: int) -> torch.Tensor:
        """Return all elements of a message: in place, or packed into a buffer."""
        boxes_of = self._origins_of(round_)
        in_place = self._in_place(message, boxes_of)
        if in_place is not None:
            return in_place
        data = self._buffer("out", slot, message.nbytes)
        boxes = boxes_of(message.transfers)
        parts = self._parts(message, data)
        copy_boxes(
            [part.view(box.shape) for part, box in zip(parts, boxes, strict=True)],
            boxes,
        )
        return data

    def _buffer(self, side: str, slot: int, nbytes: int) -> torch.Tensor:
        """Return a buffer of this size: a slot of the bucket, or memory of its own."""
        if self._sends_changes:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._buckets[side][slot][:nbytes]

    def _arrives_encoded(self, message: Message) -> bool:
        """Return whether a message that is received has changes only."""
        if not self._sends_changes or self._deltas is None:
            return False
        return self._deltas.incoming_bytes(message) is not None

    def _incoming_bytes(self, message: Message | MessageSizes) -> int:
        """Return the bytes that will be received for a message."""
        if isinstance(message, MessageSizes) or not self._arrives_encoded(message):
            return message.nbytes
        assert self._deltas is not None
        return self._deltas.incoming_bytes(message) or 0

    def _end(self) -> None:
        """Wait for the earliest round and unpack its message."""
        pending = self._pending.popleft()
        for index, work in enumerate(pending.works):
            try:
                wait(work, self._job.options.timeout)
            except RuntimeError as error:
                raise self._blame(pending, index, error) from error
        message, landing = pending.round.incoming, pending.landing
        if self._sends_changes and message is not None:
            self._take_changes(pending, message, landing)
        elif landing is not None and isinstance(message, Message):
            self._unpack(message, landing)
        if (event := record_event()) is not None:
            self._on_device.append((event, pending))

    def _unpack(self, message: Message, landing: torch.Tensor) -> None:
        """Write a whole message into place."""
        copy_boxes(self._job.targets(message.transfers), self._parts(message, landing))

    def _take_changes(
        self,
        pending: Pending,
        message: Message | MessageSizes,
        landing: torch.Tensor | None,
    ) -> None:
        """Take a message of a version that moves as changes: sizes, changes, or whole boxes."""
        assert self._deltas is not None
        is_read_here = isinstance(message, MessageSizes) or self._arrives_encoded(
            message
        )
        if pending.works and is_read_here:
            # The host reads these bytes, so it waits for the device, with a time limit.
            try:
                wait_for_event(record_event(), self._job.options.timeout)
            except TimeoutError as error:
                raise self._blame(pending, 0, error) from error
        if isinstance(message, MessageSizes):
            assert landing is not None
            self._deltas.expect(message, landing.view(torch.int64).tolist())
        elif self._arrives_encoded(message):
            assert landing is not None
            self._deltas.apply(message, landing)
        else:
            if landing is not None:
                self._unpack(message, landing)
            self._deltas.arrived_whole(message)

    def _make_deltas(self, rounds: Sequence[Round]) -> DeltaMessages:
        """Return what encodes and decodes the announced messages of these rounds."""
        job = self._job
        assert job.sent is not None
        outgoing = [
            Outgoing(message, forwards=round_.after is not None)
            for round_ in rounds
            if isinstance(round_.outgoing, MessageSizes)
            for message in round_.outgoing.messages
        ]
        incoming = [
            round_.incoming for round_ in rounds if isinstance(round_.incoming, Message)
        ]
        boxes_of = job.origins, job.forwarded, job.targets
        return DeltaMessages(
            job.sent,
            boxes_of,
            job.wire_of,
            outgoing,
            incoming,
            job.options.bucket_bytes,
        )

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
        message that is sent or received in place, and for sizes, which are a few bytes.
        """
        needed = {"in": 0, "out": 0}
        incoming, outgoing = round_.incoming, round_.outgoing
        if isinstance(incoming, Message) and self._space_for(incoming) is None:
            needed["in"] = incoming.nbytes
        if isinstance(outgoing, Message):
            deltas = self._deltas if self._sends_changes else None
            is_encoded = deltas and deltas.outgoing_bytes(outgoing) is not None
            if is_encoded or not self._in_place_from(round_, outgoing):
                needed["out"] = outgoing.nbytes
        return needed

    def _in_place_from(self, round_: Round, message: Message) -> bool:
        """Return whether a round's whole outgoing message is sent in place."""
        return self._in_place(message, self._origins_of(round_)) is not None

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
    *,
    announced: bool = False,
) -> list[Round]:
    """Return the messages of these boxes in the order in which they are sent: hop by hop, and by shifts in each.

    Args:
        sends, receives: hop 0, what goes directly from the source to the destination.
        relays: the hops of a fan-out, numbered from 1.
        announced: begin each hop with rounds that carry the sizes of its compared messages.
    """
    rank, world = job.plan.rank, job.plan.world
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
        size_rounds: list[Round] = []
        data_rounds: list[Round] = []
        for shift in sorted(shifts):
            to, from_ = (rank + shift) % world, (rank - shift) % world
            outgoing = _messages(job, sent.get(to, ()), by_dtype=announced)
            incoming = _messages(job, received.get(from_, ()), by_dtype=announced)
            if announced:
                sizes_out = _sizes(job, outgoing, to)
                sizes_in = _sizes(job, incoming, from_)
                if sizes_out is not None or sizes_in is not None:
                    size_rounds.append(
                        Round(to, sizes_out, from_, sizes_in, number, after)
                    )
            data_rounds += [
                Round(to, out, from_, in_, number, after)
                for out, in_ in zip_longest(outgoing, incoming)
            ]
        rounds += [*size_rounds, *data_rounds]
    return rounds


def _messages(
    job: TransferJob, transfers: Sequence[Transfer], *, by_dtype: bool
) -> list[Message]:
    """Pack boxes into messages, with `by_dtype` of one dtype each."""
    size = max(1, job.options.bucket_bytes // SLOTS)
    pack = messages_by_dtype if by_dtype else messages
    return pack(transfers, job.wire_of, size)


def _sizes(
    job: TransferJob, of_peer: Sequence[Message], peer: int
) -> MessageSizes | None:
    """Return the announcement of the compared messages from or to a peer, or None if there are none."""
    same_node = job.options.same_node(job.plan.rank, peer)
    compared = [
        message
        for message in of_peer
        if is_compared(
            job.options.delta, job.wire_of(message.transfers[0]), same_node=same_node
        )
    ]
    return MessageSizes(tuple(compared)) if compared else None
