"""Distributed batches: each rank holds the samples that it works on, and a few numbers about all others.

A rank's samples follow from the lengths of all samples, by arithmetic that every rank repeats. Results that one rank
computes go row by row to the other ranks with the same samples. Sums over all samples are sums of what each rank
contributes for its own groups. So a rank's traffic and work grow with its samples and not with the number of ranks.

Rows move between ranks, of one role or of two: data on the host, such as tokens, from host to host, and results that
were computed on a device from device to device (`Fabric.rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.data.batch import RolloutBatch
from megaverl.data.batch_fields import FIELDS, field_of
from megaverl.data.batching import groups_of_ranks
from megaverl.data.prefix_packing import SequenceLengths, sequence_lengths
from megaverl.distributed.collectives import device_of, gather_host_rows
from megaverl.distributed.ragged import (
    RaggedBatch,
    beside,
    merge,
    num_bytes,
    num_bytes_on_device,
    pack_tensors,
    unpack_tensors,
)
from megaverl.distributed.worlds import Channel, Fabric, PendingSends, default_group, send_json
from megaverl.errors import DataError
from megaverl.sharding.rows import Move, Rows, join_rows, plan_moves

_LENGTHS = {"S": "prompt_lengths", "R": "response_lengths"}


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


def move_batch(fabric: Fabric, moving: Moving, batch: RolloutBatch | None) -> RolloutBatch | None:
    """Move rows of a batch to the ranks that want them. Results are padded to the widest sender.

    Every rank with a message must call it. Other ranks may skip the call.

    Args:
        batch: batch of the rows `moving.held`, in that order. None on a rank that holds none.

    Returns:
        The rows `moving.wanted`, in that order, or None on a rank that is no receiver.

    Raises:
        DataError: the batch does not have the rows, or a column holds what JSON cannot.
        TrainingStopped: a rank did not send or receive in time. Names its number and role.
    """
    ragged = None if batch is None else as_ragged(batch.tensors, batch, batch.columns)
    moved = move_ragged(fabric, moving, ragged)
    return None if moved is None else RolloutBatch(moved.tensors, moved.columns)


def as_ragged(
    tensors: Mapping[str, Tensor], batch: RolloutBatch, columns: Mapping[str, Sequence[object]] | None = None
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


@dataclass(frozen=True)
class HeldRows:
    """Samples of a step's batch that this rank holds, and what every rank of its role group knows about all samples.

    Attributes:
        fabric: communication of the job.
        lengths: lengths of all samples.
        group_ids: group of every sample.
        by_rank: rank of the job -> numbers of its samples, ascending. Equal on every rank.
        groups_by_rank: rank -> samples that it reports for. Each sample and each group has exactly one such rank.
    """

    fabric: Fabric
    lengths: SequenceLengths
    group_ids: Sequence[int]
    by_rank: Rows
    groups_by_rank: Mapping[int, range]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Numbers of this rank's samples, in the order of its batch."""
        return tuple(self.by_rank[self.fabric.rank])

    @cached_property
    def place(self) -> dict[int, int]:
        """Index in this rank's batch of each of its samples, by number."""
        return {row: place for place, row in enumerate(self.rows)}

    @cached_property
    def own(self) -> Tensor:
        """Indices of the samples that this rank reports for, [k] int64."""
        return torch.tensor([self.place[row] for row in self.groups_by_rank[self.fabric.rank]], dtype=torch.int64)

    def places_of(self, samples: Sequence[int]) -> list[int]:
        """Return the indices in this rank's batch of those `samples` that it holds."""
        return [self.place[row] for row in samples if row in self.place]

    def pick(self, values: Tensor) -> Tensor:
        """Select this rank's samples: [B, ...] of all samples -> [n, ...]."""
        return values[torch.tensor(self.rows, dtype=torch.int64)]

    def of_all(self, values: Tensor) -> Tensor:
        """Gather values of all samples on every host: [n, ...] of this rank's samples -> [B, ...].

        Meant for a few numbers per sample.
        """
        return gather_host_rows(values.cpu()[self.own], default_group())

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, on each of them."""
        total = values.to(device_of(), copy=True)
        dist.all_reduce(total, group=default_group())
        return total.to(values.device)

    def whole_on(self, rank: int, batch: RolloutBatch) -> RolloutBatch:
        """Return all samples on one rank of the job, and `batch` unchanged on the others.

        Collective over the role group.
        """
        everything = {rank: range(len(self.lengths))}
        moving = Moving.plan(self.fabric, "whole batch", self.groups_by_rank, everything)
        whole = move_batch(self.fabric, moving, batch.select(self.own))
        return batch if whole is None else whole

    def spread(self, name: str, tensors: Mapping[str, Tensor], source: Rows) -> dict[str, Tensor]:
        """Send results from the ranks that computed them to all ranks that hold the samples.

        Collective over the role group.

        Args:
            tensors: [n, ...] each, with zeros after a response, for the n samples of this rank's batch.
            source: rank -> samples whose results it has. Each sample has one such rank.

        Returns:
            Results of all of this rank's samples, by name, on the device of the inputs.
        """
        source = {rank: source.get(rank, ()) for rank in self.fabric.world.ranks}
        mine = torch.tensor([self.place[row] for row in source[self.fabric.rank]], dtype=torch.int64)
        rows = {key: tensor[beside(tensor, mine)] for key, tensor in tensors.items()}
        # A response has one value per token, or one more.
        longest = max(self.lengths.response_lengths, default=0)
        beyond = {key: tensor.shape[1] - longest for key, tensor in rows.items() if tensor.dim() > 1}
        axes = {key: f"{more} more" for key, more in beyond.items() if more in (0, 1)}
        sizes = torch.tensor([self.lengths.response_lengths[row] for row in source[self.fabric.rank]])
        lengths = {axes[key]: sizes.long() + beyond[key] for key in axes}
        moving = Moving.plan(self.fabric, name, source, self.by_rank)
        moved = move_ragged(self.fabric, moving, RaggedBatch(rows, axes, lengths))
        assert moved is not None
        return dict(moved.tensors)


@dataclass(frozen=True)
class Readers:
    """Assignment of a batch's samples to the ranks of a role group.

    Attributes:
        fabric: communication of the job.
        rows: lengths of all samples -> samples that each rank of the group works on.
    """

    fabric: Fabric
    rows: Callable[[SequenceLengths], Rows]

    def held(self, lengths: SequenceLengths, group_ids: Sequence[int]) -> HeldRows:
        """Return what each rank holds of a batch: the samples that it works on, and the groups that it reports for."""
        ranks = self.fabric.world.ranks
        groups = dict(zip(ranks, groups_of_ranks(group_ids, len(ranks)), strict=True))
        return HeldRows(self.fabric, lengths, group_ids, join_rows([groups, self.rows(lengths)]), groups)

    def of_whole(self, batch: RolloutBatch) -> RolloutBatch:
        """Return this rank's samples of a batch that every rank has. With several agents, all samples."""
        if "agent_ids" in batch:
            return batch
        groups = batch.group_ids.tolist() if "group_ids" in batch else list(range(len(batch)))
        found = self.held(sequence_lengths(batch), groups)
        return as_held(batch.select(found.rows), found)


def as_held(batch: RolloutBatch, held: HeldRows) -> RolloutBatch:
    """Return a batch of this rank's samples, padded to the widths of the whole batch.

    If every rank holds all samples, the result is an ordinary batch.
    """
    lengths = held.lengths
    wide = batch.trim().pad_to(
        prompt=max(lengths.prompt_lengths, default=0), response=max(lengths.response_lengths, default=0)
    )
    if all(len(rows) == len(lengths) for rows in held.by_rank.values()):
        return wide
    return RolloutBatch(wide.tensors, wide.columns, held=held)


def of_all(batch: RolloutBatch, values: Tensor) -> Tensor:
    """Gather values of all samples of a step on every rank: [n, ...] of a batch's samples -> [B, ...]."""
    return values if batch.held is None else batch.held.of_all(values)


def of_held(batch: RolloutBatch, values: Tensor) -> Tensor:
    """Select the samples in this batch: [B, ...] of all samples of a step -> [n, ...]."""
    return values if batch.held is None else batch.held.pick(values)
