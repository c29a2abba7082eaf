"""Transfer of rows and whole tensors between ranks, of one role or of two.

Data on the host, such as tokens, go from host to host. Results that were computed on a
device go from device to device (`JobContext.rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megaverl.data.batch_fields import FIELDS, field_of
from megaverl.distributed.channels import Channel, PendingSends, send_json
from megaverl.distributed.job_context import JobContext
from megaverl.distributed.ragged import (
    RaggedBatch,
    merge,
    num_bytes,
    num_bytes_on_device,
    pack_tensors,
    unpack_tensors,
)
from megaverl.errors import DataError
from megaverl.sharding.rows import Move, Rows, plan_moves

_LENGTHS = {"S": "prompt_lengths", "R": "response_lengths"}


class NamedTensors(Protocol):
    """Tensors that are looked up by name: a RolloutBatch or a dictionary."""

    def __getitem__(self, name: str, /) -> Tensor: ...


@dataclass(frozen=True)
class Moving:
    """One transfer of the step's flow for one batch: what this rank holds and wants, and its messages.

    Attributes:
        name: name of what moves. Messages of different names do not mix, so transfers may run from different threads
            (gloo).
        held: rows that this rank holds, in this order.
        wanted: rows that this rank wants, in this order.
        moves: messages that this rank sends or receives.
        receives: whether this rank is a receiver, even if it wants no rows this time.
    """

    name: str
    held: tuple[int, ...]
    wanted: tuple[int, ...]
    moves: tuple[Move, ...]
    receives: bool

    @classmethod
    def plan(cls, context: JobContext, name: str, source: Rows, dest: Rows) -> Moving:
        """Return this rank's part of a transfer. Arguments must be equal on every rank.

        A rank of `dest` that wants no rows and holds none still gets one header, from
        which it builds an empty batch.

        Args:
            source: rows that each rank holds.
            dest: rows that each rank wants.

        Raises:
            DataError: a wanted row is held by no rank.
        """
        # Computed alike on all ranks, from rows that all of them know.
        rank = context.rank
        moves = plan_moves(rank, source, dest, context.placement.node_of)
        # Without rows to receive, a header still says which tensors an empty batch has.
        if source:
            sender = min(source)
            for receiver, rows in dest.items():
                has_nothing = not rows and receiver not in source
                if has_nothing and rank in (sender, receiver):
                    moves.append(Move(sender, receiver, ()))
        held = tuple(source.get(rank, ()))
        wanted = tuple(dest.get(rank, ()))
        return cls(name, held, wanted, tuple(moves), receives=rank in dest)


def as_ragged(
    tensors: Mapping[str, Tensor],
    batch: NamedTensors,
    columns: Mapping[str, Sequence[object]] | None = None,
) -> RaggedBatch:
    """Return fields of a batch without their padding."""
    axes = {}
    for name in tensors:
        axis = field_of(name).axes
        if axis in _LENGTHS:
            axes[name] = axis
    # Sorted, so that all ranks pack the lengths in the same order.
    lengths = {axis: batch[_LENGTHS[axis]] for axis in sorted(set(axes.values()))}
    return RaggedBatch(tensors, axes, lengths, _fills(), columns or {})


def _fills() -> dict[str, float | bool]:
    """Return the padding value of every field."""
    return {name: field.fill for name, field in FIELDS.items()}


class Heard(NamedTuple):
    """Message of rows from a rank: header, host data, and a buffer for device data, if any follows."""

    header: bytes
    payload: Tensor
    on_device: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of the rows."""
        parts = (self.payload, self.on_device)
        return sum(part.numel() for part in parts if part is not None)

    def unpack(self) -> RaggedBatch:
        """Return the rows. Their device data must have been received."""
        return RaggedBatch.unpack(self.header, self.payload, _fills(), self.on_device)


def move_ragged(
    context: JobContext, moving: Moving, ragged: RaggedBatch | None
) -> RaggedBatch | None:
    """Move rows of any tensors, like `move_batch`."""
    _check_held(moving, ragged)
    # All host messages are sent before any is awaited, so two ranks that send to each
    # other do not deadlock.
    sent, device_data = _send_from_host(context, moving, ragged)
    received = _hear(context, moving)
    if context.rows is not None:
        buffers = {
            source: heard.on_device
            for source, heard in received.items()
            if heard.on_device is not None
        }
        Channel(context, moving.name).exchange(context.rows, device_data, buffers)
    # After the receives: a sender's memory is free once the message is taken.
    sent.wait()
    return _merged(context, moving, ragged, received)


def send_whole(
    context: JobContext,
    name: str,
    dest: int,
    head: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> PendingSends:
    """Start sending whole tensors to a rank, after a JSON header.

    Tensors on the host go from host to host, others from device to device, as rows do.
    """
    channel = Channel(context, name)
    device = context.device_between(context.rank, dest)
    device_tensors = {}
    host_tensors = {}
    for key, tensor in tensors.items():
        if tensor.device == device:
            device_tensors[key] = tensor
        else:
            host_tensors[key] = tensor.cpu()
    parts, payload = pack_tensors(host_tensors)
    device_parts, device_payload = pack_tensors(device_tensors)
    # The header tells the receiver how many bytes follow, and where.
    header = {**head, "parts": parts, "on_device": device_parts}
    sent = send_json(context, name, dest, header)
    sent.add(channel.send_to([dest], payload))
    if context.rows is not None:
        sent.add(channel.send(context.rows, {dest: device_payload}))
    return sent


def receive_whole(
    context: JobContext, name: str, source: int, head: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the tensors that `send_whole` sent with this header, on the host or device where they were."""
    channel = Channel(context, name)
    (host_payload,) = channel.receive_from(source)
    context.traffic.received += host_payload.numel()
    tensors = unpack_tensors(head["parts"], host_payload)
    device_parts = head["on_device"]
    if device_parts and context.rows is not None:
        # Sizes are known from the header, so the buffer is ready before the device's
        # message.
        device = context.device_between(source, context.rank)
        device_payload = torch.empty(
            num_bytes(device_parts), dtype=torch.uint8, device=device
        )
        channel.receive(context.rows, {source: device_payload})
        context.traffic.received += device_payload.numel()
        tensors |= unpack_tensors(device_parts, device_payload)
    return tensors


def _check_held(moving: Moving, ragged: RaggedBatch | None) -> None:
    """Raise DataError if a rank gave other rows than it holds."""
    if moving.held and ragged is None:
        raise DataError(
            f"{moving.name}: this rank holds {len(moving.held)} rows, and gave none"
        )
    if ragged is None:
        return
    count = len(moving.held)
    other_counts = {len(tensor) for tensor in ragged.tensors.values()} - {count}
    if other_counts:
        raise DataError(
            f"{moving.name}: tensors of {sorted(other_counts)} rows for the {count} rows that this rank holds"
        )


def _merged(
    context: JobContext,
    moving: Moving,
    ragged: RaggedBatch | None,
    heard_by_source: Mapping[int, Heard],
) -> RaggedBatch | None:
    """Return this rank's rows from its own and all received ones."""
    if not moving.receives:
        return None
    place_held = {row: place for place, row in enumerate(moving.held)}
    place_wanted = {row: place for place, row in enumerate(moving.wanted)}
    # (places in the result, batch, places in that batch)
    parts: list[tuple[Sequence[int], RaggedBatch, Sequence[int]]] = []
    if ragged is not None:
        # Rows that stay on this rank are not sent.
        kept = [row for row in moving.wanted if row in place_held]
        parts.append(
            (
                [place_wanted[row] for row in kept],
                ragged,
                [place_held[row] for row in kept],
            )
        )
    for move in moving.moves:
        if move.dest == context.rank:
            parts.append(
                (
                    [place_wanted[row] for row in move.rows],
                    heard_by_source[move.source].unpack(),
                    range(len(move.rows)),
                )
            )
    if not parts:
        return None
    # Parts without rows must not widen the result. If all are empty, they still say
    # which tensors an empty batch has.
    parts_with_rows = [part for part in parts if part[0]]
    return merge(len(moving.wanted), parts_with_rows or parts)


def _send_from_host(
    context: JobContext, moving: Moving, ragged: RaggedBatch | None
) -> tuple[PendingSends, dict[int, Tensor]]:
    """Send a header and host data to every receiver.

    Returns the pending messages, and the device data that must follow.
    """
    sent = PendingSends()
    device_data: dict[int, Tensor] = {}
    if ragged is None:
        return sent, device_data
    channel = Channel(context, moving.name)
    place_held = {row: place for place, row in enumerate(moving.held)}
    on_host: RaggedBatch | None = None
    for move in moving.moves:
        if move.source != context.rank:
            continue
        device = context.device_between(move.source, move.dest)
        rows = ragged
        if device is None:
            # Copy from the device once, not for every message.
            on_host = ragged.on_host() if on_host is None else on_host
            rows = on_host
        places = [place_held[row] for row in move.rows]
        header, payload, device_data[move.dest] = rows.pack(places, device)
        sent.add(channel.send_to([move.dest], header, payload))
    return sent, device_data


def _hear(context: JobContext, moving: Moving) -> dict[int, Heard]:
    """Receive headers and host data from every sender, by sender."""
    received: dict[int, Heard] = {}
    for move in moving.moves:
        if move.dest == context.rank:
            heard = received[move.source] = hear(context, moving.name, move.source)
            context.traffic.received += heard.num_bytes
    return received


def hear(context: JobContext, name: str, source: int) -> Heard:
    """Receive header and host data of rows from a rank, and allocate a buffer for the device data that follows."""
    # Blocks until the sender's header and host data are here.
    parts = Channel(context, name).receive_from(source)
    if len(parts) != 2:
        raise DataError(
            f"{name}: {context.describe(source)} sent data that are not rows"
        )
    header, payload = parts[0].numpy().tobytes(), parts[1]
    size = num_bytes_on_device(header)
    # Without device data the header has no size for it, and no second receive follows.
    if size is None:
        return Heard(header, payload)
    device = context.device_between(source, context.rank)
    return Heard(header, payload, torch.empty(size, dtype=torch.uint8, device=device))
