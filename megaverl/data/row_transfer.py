"""Transfer of rows and whole tensors between ranks, of one role or of two.

Data on the host, such as tokens, go from host to host. Results that were computed on a device go from device to device
(`Fabric.rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megaverl.data.batch_fields import FIELDS, field_of
from megaverl.distributed.ragged import (
    RaggedBatch,
    merge,
    num_bytes,
    num_bytes_on_device,
    pack_tensors,
    unpack_tensors,
)
from megaverl.distributed.worlds import Channel, Fabric, PendingSends, send_json
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
    def plan(cls, fabric: Fabric, name: str, source: Rows, dest: Rows) -> Moving:
        """Return this rank's part of a transfer. Arguments must be equal on every rank.

        A rank of `dest` that wants no rows and holds none still gets one header, from which it builds an empty batch.

        Args:
            source: rows that each rank holds.
            dest: rows that each rank wants.

        Raises:
            DataError: a wanted row is held by no rank.
        """
        rank = fabric.rank
        moves = plan_moves(rank, source, dest, fabric.placement.node_of)
        empty = [
            Move(min(source), other, ()) for other, rows in dest.items() if source and not (rows or other in source)
        ]
        moves += [move for move in empty if rank in (move.source, move.dest)]
        return cls(name, tuple(source.get(rank, ())), tuple(dest.get(rank, ())), tuple(moves), rank in dest)


def as_ragged(
    tensors: Mapping[str, Tensor], batch: NamedTensors, columns: Mapping[str, Sequence[object]] | None = None
) -> RaggedBatch:
    """Return fields of a batch without their padding."""
    axes = {name: axis for name in tensors if (axis := field_of(name).axes) in _LENGTHS}
    lengths = {axis: batch[_LENGTHS[axis]] for axis in sorted(set(axes.values()))}
    return RaggedBatch(tensors, axes, lengths, _fills(), columns or {})


def _fills() -> dict[str, float | bool]:
    """Return the padding value of every field."""
    return {name: field.fill for name, field in FIELDS.items()}


class Heard(NamedTuple):
    """Message received from a rank on the host."""

    header: bytes
    payload: Tensor


def move_ragged(fabric: Fabric, moving: Moving, ragged: RaggedBatch | None) -> RaggedBatch | None:
    """Move rows of any tensors, like `move_batch`."""
    _check_held(moving, ragged)
    sent, out = _send_from_host(fabric, moving, ragged)
    heard, into = _hear(fabric, moving)
    if fabric.rows is not None:
        Channel(fabric, moving.name).exchange(fabric.rows, out, into)
    sent.wait()
    return _merged(fabric, moving, ragged, heard, into)


def send_whole(
    fabric: Fabric, name: str, dest: Sequence[int], head: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> PendingSends:
    """Start sending whole tensors to several ranks, after a JSON header.

    Tensors on the host go from host to host, others from device to device, as rows do.
    """
    sent, channel, by_device = PendingSends(), Channel(fabric, name), dict[torch.device | None, list[int]]()
    for rank in dest:
        by_device.setdefault(fabric.device_between(fabric.rank, rank), []).append(rank)
    for device, ranks in by_device.items():
        stays = {key: tensor for key, tensor in tensors.items() if tensor.device == device}
        parts, payload = pack_tensors({key: each.cpu() for key, each in tensors.items() if key not in stays})
        on_device, there = pack_tensors(stays)
        for rank in ranks:
            sent.add(send_json(fabric, name, rank, {**head, "parts": parts, "on_device": on_device}))
        sent.add(channel.send_to(ranks, payload))
        if fabric.rows is not None:
            sent.add(channel.send(fabric.rows, dict.fromkeys(ranks, there)))
    return sent


def receive_whole(fabric: Fabric, name: str, source: int, head: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that `send_whole` sent with this header, on the host or device where they were."""
    channel, entries = Channel(fabric, name), head["on_device"]
    (data,) = channel.receive_from(source)
    fabric.traffic.received += data.numel()
    found = unpack_tensors(head["parts"], data)
    if entries and fabric.rows is not None:
        device = fabric.device_between(source, fabric.rank)
        data = torch.empty(num_bytes(entries), dtype=torch.uint8, device=device)
        channel.receive(fabric.rows, {source: data})
        fabric.traffic.received += data.numel()
        found |= unpack_tensors(entries, data)
    return found


def _check_held(moving: Moving, ragged: RaggedBatch | None) -> None:
    """Raise DataError if a rank gave other rows than it holds."""
    if moving.held and ragged is None:
        raise DataError(f"{moving.name}: this rank holds {len(moving.held)} rows, and gave none")
    if ragged is not None and (wrong := {len(tensor) for tensor in ragged.tensors.values()} - {len(moving.held)}):
        raise DataError(
            f"{moving.name}: tensors of {sorted(wrong)} rows for the {len(moving.held)} rows that this rank holds"
        )


def _merged(
    fabric: Fabric,
    moving: Moving,
    ragged: RaggedBatch | None,
    heard: Mapping[int, Heard],
    on_device: Mapping[int, Tensor],
) -> RaggedBatch | None:
    """Return this rank's rows from its own and all received ones."""
    place = {row: number for number, row in enumerate(moving.held)}
    to = {row: number for number, row in enumerate(moving.wanted)}
    if not moving.receives:
        return None
    parts: list[tuple[Sequence[int], RaggedBatch, Sequence[int]]] = []
    if ragged is not None:
        kept = [row for row in moving.wanted if row in place]
        parts.append(([to[row] for row in kept], ragged, [place[row] for row in kept]))
    for move in moving.moves:
        if move.dest == fabric.rank:
            one = RaggedBatch.unpack(*heard[move.source], _fills(), on_device.get(move.source))
            parts.append(([to[row] for row in move.rows], one, range(len(move.rows))))
    # Parts without rows must not widen the result.
    if parts and any(here for here, _, _ in parts):
        parts = [part for part in parts if part[0]]
    return merge(len(moving.wanted), parts) if parts else None


def _send_from_host(
    fabric: Fabric, moving: Moving, ragged: RaggedBatch | None
) -> tuple[PendingSends, dict[int, Tensor]]:
    """Send a header and host data to every receiver.

    Returns the pending messages, and the device data that must follow.
    """
    place = {row: number for number, row in enumerate(moving.held)}
    channel, sent, on_device = Channel(fabric, moving.name), PendingSends(), dict[int, Tensor]()
    on_host: RaggedBatch | None = None
    for move in moving.moves:
        if move.source == fabric.rank and ragged is not None:
            device = fabric.device_between(move.source, move.dest)
            if device is None and on_host is None:
                # Copy from the device once, not for every message.
                on_host = ragged.on_host()
            rows = ragged if on_host is None or device is not None else on_host
            header, payload, on_device[move.dest] = rows.pack([place[row] for row in move.rows], device)
            sent.add(channel.send_to([move.dest], header, payload))
    return sent, on_device


def _hear(fabric: Fabric, moving: Moving) -> tuple[dict[int, Heard], dict[int, Tensor]]:
    """Receive headers and host data from every sender. Returns them, and buffers for the device data that follows."""
    channel, heard, on_device = Channel(fabric, moving.name), dict[int, Heard](), dict[int, Tensor]()
    for source in (move.source for move in moving.moves if move.dest == fabric.rank):
        parts = channel.receive_from(source)
        if len(parts) != 2:
            raise DataError(f"{moving.name}: {fabric.describe(source)} sent data that are not rows")
        heard[source] = Heard(parts[0].numpy().tobytes(), parts[1])
        if (size := num_bytes_on_device(heard[source].header)) is not None:
            device = fabric.device_between(source, fabric.rank)
            on_device[source] = torch.empty(size, dtype=torch.uint8, device=device)
    fabric.traffic.received += sum(each.payload.numel() for each in heard.values())
    fabric.traffic.received += sum(each.numel() for each in on_device.values())
    return heard, on_device
