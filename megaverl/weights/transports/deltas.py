"""Messages that have only the elements which changed since the last version (`reshard.delta`).

A sender keeps a copy of what it last sent, and compares. Both ends must know the size
of a message before it is sent, so the messages of each hop are announced first:

    sender                                              receiver
    compare a hop's messages with the copies
    announce encoding, count and bytes of each  ----->  expect so many bytes
    send positions and values                   ----->  write the values into place
    after the run: copy what changed

A rank of a fan-out that forwards weights has no copy. It keeps the positions that it
received until it has forwarded them, and reads the values from its own weights. These
are the bytes that it received, cut as the next hop needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from megaverl.errors import ReshardError
from megaverl.sharding.boxes import Box, BoxIndex, intersect
from megaverl.sharding.plan import Transfer
from megaverl.weights.transports.changes import (
    Changes,
    Encoding,
    as_bits,
    decode,
    differ,
    indices_at,
)
from megaverl.weights.transports.changes import encode as encode_changes
from megaverl.weights.transports.sent_weights import SentWeights, within
from megaverl.weights.transports.transport import Message, copy_boxes

NUMBERS_EACH = 3  # encoding, count and bytes of a message

BoxesOf = Callable[[Sequence[Transfer]], list[torch.Tensor]]


class MessageSizes(NamedTuple):
    """Message that says how the messages of one hop from one rank to another are encoded."""

    messages: tuple[Message, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of this message: int64 numbers, the first one the version."""
        return 8 * (1 + NUMBERS_EACH * len(self.messages))

    def __str__(self) -> str:
        return f"the sizes of {len(self.messages)} messages from {self.messages[0]}"


class Outgoing(NamedTuple):
    """A message that a rank sends, as far as deltas depend on it: boxes of the source, or boxes that it forwards."""

    message: Message
    forwards: bool


class Announced(NamedTuple):
    """Encoding, number of changed elements and bytes of a message that will be received."""

    encoding: Encoding
    num_changed: int
    nbytes: int


class Arrived(NamedTuple):
    """A box of the destination that was received and will be forwarded.

    Attributes:
        positions: places of the changed elements in the box; None: any element may have changed.
    """

    local: str
    box: Box
    positions: torch.Tensor | None


class DeltaMessages:
    """Encodes and decodes the messages of one transport.

    Args:
        sent: copies of the source's weights.
        boxes: functions from transfers to the boxes to read from the source, to forward, and to write.
        dtype_of: dtype in which a transfer is sent.
        outgoing: messages that this rank announces and sends, in order.
        incoming: all messages that this rank receives, announced or not.
        budget: most bytes of encoded messages that are kept between announcing and sending them. Messages beyond it
            are encoded twice.
    """

    def __init__(
        self,
        sent: SentWeights,
        boxes: tuple[BoxesOf, BoxesOf, BoxesOf],
        dtype_of: Callable[[Transfer], torch.dtype],
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Message],
        budget: int,
    ) -> None:
        self._sent, self._dtype_of, self._budget = sent, dtype_of, budget
        self._origins, self._forwarded, self._targets = boxes
        # Messages with equal boxes of the source, for several replicas, are encoded
        # once.
        contents: dict[tuple[tuple[str, Box], ...], int] = {}
        self._content: dict[int, int] = {}
        self._links: dict[int, Outgoing] = {}
        for link in outgoing:
            transfers = link.message.transfers
            key = tuple((part.source_local, part.source_box) for part in transfers)
            self._links[id(link.message)] = link
            if link.forwards:
                self._content[id(link.message)] = -1 - len(self._content)
            else:
                sent.add(transfers, dtype_of(transfers[0]))
                number = contents.setdefault(key, len(contents))
                self._content[id(link.message)] = number
        self._origins_of = _find_forwarded(outgoing, incoming)
        self.begin(0)

    def begin(self, version: int) -> None:
        """Begin a version."""
        self._version = version
        self._encoded: dict[int, Changes] = {}
        self._kept = 0
        self._left: dict[int, int] = {}
        for content in self._content.values():
            self._left[content] = self._left.get(content, 0) + 1
        self._announced: dict[int, Announced] = {}
        self._arrived: dict[int, list[Arrived]] = {}
        self._uses: dict[int, int] = {}
        for messages in self._origins_of.values():
            for number in messages:
                self._uses[number] = self._uses.get(number, 0) + 1
        self.changed = self.compared = 0

    def announce(self, sizes: MessageSizes) -> list[int]:
        """Compare messages with the last version; return what their receiver must know."""
        numbers = [self._version]
        for message in sizes.messages:
            content = self._content[id(message)]
            if content not in self._encoded:
                changes = self._encode(message)
                payload_bytes = 0 if changes.payload is None else changes.nbytes
                if self._kept + payload_bytes > self._budget:
                    changes = changes._replace(payload=None)
                else:
                    self._kept += payload_bytes
                self._encoded[content] = changes
            changes = self._encoded[content]
            numbers += [int(changes.encoding), changes.num_changed, changes.nbytes]
            if self._sent.compares and not self._links[id(message)].forwards:
                self.compared += self._numel(message)
                self.changed += changes.num_changed
                self._sent.count(changes.nbytes, message.nbytes)
        return numbers

    def expect(self, sizes: MessageSizes, numbers: Sequence[int]) -> None:
        """Take the sizes of messages that will arrive.

        Raises:
            ReshardError: the sender is at another version.
        """
        if numbers[0] != self._version:
            raise ReshardError(
                f"changes for version {numbers[0]} arrived while version {self._version} moves. Restart the run; "
                "reshard.delta=off sends whole weights."
            )
        for place, message in enumerate(sizes.messages):
            first = 1 + NUMBERS_EACH * place
            encoding, count, nbytes = numbers[first : first + NUMBERS_EACH]
            self._announced[id(message)] = Announced(Encoding(encoding), count, nbytes)

    def expects(self, message: Message) -> bool:
        """Return whether the size of a message is known."""
        return id(message) in self._announced

    def outgoing_bytes(self, message: Message) -> int | None:
        """Return the bytes of an encoded message; None: it is sent whole."""
        if id(message) not in self._content:
            return None
        changes = self._encoded[self._content[id(message)]]
        return None if changes.encoding is Encoding.WHOLE else changes.nbytes

    def incoming_bytes(self, message: Message) -> int | None:
        """Return the bytes of an encoded message that will arrive; None: it arrives whole."""
        announced = self._announced.get(id(message))
        if announced is None or announced.encoding is Encoding.WHOLE:
            return None
        return announced.nbytes

    def payload(self, message: Message) -> torch.Tensor:
        """Return the encoded bytes of a message."""
        changes = self._encoded[self._content[id(message)]]
        if changes.payload is None:
            changes = self._encode(message)
        assert changes.payload is not None, "the source changed while it was sent"
        return changes.payload

    def is_sent(self, message: Message) -> None:
        """Drop what only this message needed: its bytes, and positions of boxes that it forwards."""
        content = self._content.get(id(message))
        if content is None:
            return
        self._left[content] -= 1
        if not self._left[content]:
            changes = self._encoded.pop(content, None)
            if changes is not None and changes.payload is not None:
                self._kept -= changes.nbytes
        for number in self._origins_of.get(id(message), ()):
            self._uses[number] -= 1
            if not self._uses[number]:
                self._arrived.pop(number, None)

    def apply(self, message: Message, payload: torch.Tensor) -> None:
        """Write the changed elements of a message into place."""
        encoding, count, _ = self._announced[id(message)]
        dtype, numel = self._dtype_of(message.transfers[0]), self._numel(message)
        positions, values = decode(payload, encoding, count, numel, dtype)
        places = _by_box(message, positions)
        first = 0
        arrived = []
        for transfer, target, inside in zip(
            message.transfers, self._targets(message.transfers), places, strict=True
        ):
            part = values[first : first + len(inside)]
            first += len(inside)
            if len(inside):
                write_elements(target, inside, part)
            arrived.append(Arrived(transfer.dest_local, transfer.dest_box, inside))
        if self._uses.get(id(message)):
            self._arrived[id(message)] = arrived

    def arrived_whole(self, message: Message) -> None:
        """Take note of a message that arrived whole and may be forwarded."""
        if self._uses.get(id(message)):
            self._arrived[id(message)] = [
                Arrived(transfer.dest_local, transfer.dest_box, None)
                for transfer in message.transfers
            ]

    def _encode(self, message: Message) -> Changes:
        link = self._links[id(message)]
        if link.forwards:
            values = self._packed(message, self._forwarded)
            return encode_changes(values, self._forwarded_changes(message))
        if not self._sent.compares:
            return Changes(Encoding.WHOLE, 0, message.nbytes, None)
        values = self._packed(message, self._origins)
        before = self._packed(message, self._sent.boxes)
        return encode_changes(values, differ(values, before))

    def _packed(self, message: Message, boxes_of: BoxesOf) -> torch.Tensor:
        """Return all elements of a message after each other, in the dtype that is sent."""
        boxes = boxes_of(message.transfers)
        dtype = self._dtype_of(message.transfers[0])
        device = self._sent.device
        if len(boxes) == 1 and boxes[0].dtype == dtype and boxes[0].is_contiguous():
            return boxes[0].flatten().to(device)
        packed = torch.empty(self._numel(message), dtype=dtype, device=device)
        parts = packed.split([box.numel() for box in boxes])
        copy_boxes(
            [part.view(box.shape) for part, box in zip(parts, boxes, strict=True)],
            boxes,
        )
        return packed

    def _forwarded_changes(self, message: Message) -> torch.Tensor:
        """Return which elements of a message this rank has received as changed, bool."""
        arrived = [
            box
            for number in self._origins_of.get(id(message), ())
            for box in self._arrived[number]
        ]
        parts = []
        for transfer in message.transfers:
            box = transfer.source_box
            changed = torch.zeros(box.shape, dtype=torch.bool, device=self._sent.device)
            for local, arrived_box, positions in arrived:
                common = (
                    intersect(box, arrived_box)
                    if local == transfer.source_local
                    else None
                )
                if common is None:
                    continue
                place = within(common, box).slices
                if positions is None:
                    changed[place] = True
                    continue
                of_arrived = torch.zeros(
                    arrived_box.numel, dtype=torch.bool, device=self._sent.device
                )
                of_arrived[positions] = True
                source = within(common, arrived_box).slices
                changed[place] = of_arrived.view(arrived_box.shape)[source]
            parts.append(changed.flatten())
        return torch.cat(parts)

    def _numel(self, message: Message) -> int:
        return message.nbytes // self._dtype_of(message.transfers[0]).itemsize


def _by_box(message: Message, positions: torch.Tensor) -> list[torch.Tensor]:
    """Split positions in a message by its boxes, and count them from the start of each."""
    if len(message.transfers) == 1:
        return [positions]
    starts = [0]
    for transfer in message.transfers:
        starts.append(starts[-1] + transfer.box.numel)
    bounds = torch.tensor(starts, device=positions.device)
    cuts = torch.searchsorted(positions, bounds).tolist()
    return [
        positions[low:high] - start
        for low, high, start in zip(cuts, cuts[1:], starts, strict=False)
    ]


def write_elements(
    target: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
) -> None:
    """Write values to these places of a box, counted in its row-major order, wherever the box lies in memory."""
    values, positions = values.to(target.dtype), positions.to(target.device)
    values = as_bits(values).to(target.device)
    bits = as_bits(target.detach())
    if bits.is_contiguous():
        bits.view(-1).index_copy_(0, positions, values)
        return
    bits.index_put_(indices_at(positions, bits.shape), values)


def _find_forwarded(
    outgoing: Sequence[Outgoing], incoming: Sequence[Message]
) -> Mapping[int, list[int]]:
    """Return which incoming messages have boxes that each outgoing message forwards, by `id`."""
    boxes: dict[str, list[tuple[Box, int]]] = {}
    forwarding = [link.message for link in outgoing if link.forwards]
    if not forwarding:
        return {}
    for message in incoming:
        for transfer in message.transfers:
            of_local = boxes.setdefault(transfer.dest_local, [])
            of_local.append((transfer.dest_box, id(message)))
    indexes = {
        local: BoxIndex([box for box, _ in of_local])
        for local, of_local in boxes.items()
    }
    numbers_by_rank: dict[int, list[int]] = {}
    for message in forwarding:
        numbers: dict[int, None] = {}
        for transfer in message.transfers:
            local = transfer.source_local
            for place, _ in indexes[local].meeting(transfer.source_box):
                numbers[boxes[local][place][1]] = None
        numbers_by_rank[id(message)] = list(numbers)
    return numbers_by_rank
