"""A rank's own samples of a step: it has the tokens and results of those that it works on, and of all others a few
numbers; and rows on their way from the ranks of one role to those of the next: from host to host what lies there, such
as an engine's tokens, and from device to device what was computed there (`Fabric.rows`).

Who has which follows from the lengths of all, by arithmetic that every rank does alone. What one rank works out goes to
the others that have the same samples, row by row; sums over all samples are sums of what each rank says of its own
groups. So a rank's bytes and work grow with its samples and not with the number of ranks.
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
    """One edge of the flow, for one batch: what this rank holds and wants, and the messages of all ranks.

    Attributes:
        name: of what moves; messages of different names do not mix, so edges may run from different threads (gloo).
        receives: whether this rank is one that wants rows, be it none of them this time.
        moves: those that this rank sends or receives.
    """

    name: str
    held: tuple[int, ...]
    wanted: tuple[int, ...]
    moves: tuple[Move, ...]
    receives: bool

    @classmethod
    def plan(cls, fabric: Fabric, name: str, source: Rows, dest: Rows) -> Moving:
        """For this rank, from who holds and who wants which rows; the same arguments on every rank.

        A rank of `dest` that gets no rows and holds none hears of the tensors all the same, to make an empty batch.

        Raises:
            DataError: rows that are wanted and not there.
        """
        rank = fabric.rank
        moves = plan_moves(rank, source, dest, fabric.placement.node_of)
        empty = [
            Move(min(source), other, ()) for other, rows in dest.items() if source and not (rows or other in source)
        ]
        moves += [move for move in empty if rank in (move.source, move.dest)]
        return cls(name, tuple(source.get(rank, ())), tuple(dest.get(rank, ())), tuple(moves), rank in dest)


def move_batch(fabric: Fabric, moving: Moving, batch: RolloutBatch | None) -> RolloutBatch | None:
    """Every rank's rows of a batch, padded to the longest of its senders' widths.

    Every rank that has a move takes part; one that has none may leave the call out.

    Args:
        batch: with the rows `moving.held`, in their order; None on a rank that holds none.

    Returns: the rows `moving.wanted`, in their order; None on a rank that is none of the receivers.

    Raises:
        DataError: a batch that does not have the rows, or a column that JSON cannot hold.
        TrainingStopped: a rank that did not send or take its rows in time, by number and role.
    """
    ragged = None if batch is None else as_ragged(batch.tensors, batch, batch.columns)
    moved = move_ragged(fabric, moving, ragged)
    return None if moved is None else RolloutBatch(moved.tensors, moved.columns)


def move_tensors(
    fabric: Fabric, moving: Moving, tensors: Mapping[str, Tensor] | None, batch: RolloutBatch | None
) -> dict[str, Tensor] | None:
    """Results alone (values, log-probs), for rows of a batch that the receivers have already.

    Args:
        tensors: fields of a batch, with the rows `moving.held`; None on a rank that holds none.
        batch: that they belong to: its lengths say what of each row travels.

    Returns: by name, the rows `moving.wanted`; None on a rank that is none of the receivers.
    """
    ragged = None
    if tensors is not None:
        if batch is None:
            raise DataError(f"{', '.join(tensors)}: the batch that they belong to is missing; its lengths are needed")
        ragged = as_ragged(tensors, batch)
    moved = move_ragged(fabric, moving, ragged)
    return None if moved is None else dict(moved.tensors)


def as_ragged(
    tensors: Mapping[str, Tensor], batch: RolloutBatch, columns: Mapping[str, Sequence[object]] | None = None
) -> RaggedBatch:
    """Fields of a batch, ragged by its lengths."""
    axes = {name: axis for name in tensors if (axis := field_of(name).axes) in _LENGTHS}
    lengths = {axis: batch[_LENGTHS[axis]] for axis in sorted(set(axes.values()))}
    return RaggedBatch(tensors, axes, lengths, _fills(), columns or {})


def _fills() -> dict[str, float | bool]:
    return {name: field.fill for name, field in FIELDS.items()}


class Heard(NamedTuple):
    """What has come from a rank to this one's host."""

    header: bytes
    payload: Tensor


def move_ragged(fabric: Fabric, moving: Moving, ragged: RaggedBatch | None) -> RaggedBatch | None:
    """As `move_batch`, of any rows."""
    _check_held(moving, ragged)
    sent, out = _send_from_host(fabric, moving, ragged)
    heard, into = _hear(fabric, moving)
    if fabric.rows is not None:
        Channel(fabric, moving.name).exchange(fabric.rows, out, into)
    sent.wait()
    return _merged(fabric, moving, ragged, heard, into)


def send_rows(fabric: Fabric, moving: Moving, ragged: RaggedBatch | None) -> PendingSends:
    """The half of a move that a rank has which receives nothing: its messages are on their way when this returns."""
    _check_held(moving, ragged)
    sent, out = _send_from_host(fabric, moving, ragged)
    if fabric.rows is not None:
        sent.add(Channel(fabric, moving.name).send(fabric.rows, out))
    return sent


def receive_rows(fabric: Fabric, moving: Moving) -> RaggedBatch | None:
    """The half of a move that a rank has which sends nothing: its rows, when they are here."""
    heard, into = _hear(fabric, moving)
    if fabric.rows is not None:
        Channel(fabric, moving.name).receive(fabric.rows, into)
    return _merged(fabric, moving, None, heard, into)


def send_whole(
    fabric: Fabric, name: str, dest: Sequence[int], head: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> PendingSends:
    """The same tensors to each of these ranks, after a header of JSON: from host to host, and what lies on a device
    there as rows would."""
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
    """What `send_whole` has sent from there with this header, each where it lay."""
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
    if parts and any(here for here, _, _ in parts):  # what brings no rows must not widen those that do
        parts = [part for part in parts if part[0]]
    return merge(len(moving.wanted), parts) if parts else None


def _send_from_host(
    fabric: Fabric, moving: Moving, ragged: RaggedBatch | None
) -> tuple[PendingSends, dict[int, Tensor]]:
    """A header to every receiver, and the bytes that lie on the host; and by receiver those that are to follow, which
    stay on devices."""
    place = {row: number for number, row in enumerate(moving.held)}
    channel, sent, on_device = Channel(fabric, moving.name), PendingSends(), dict[int, Tensor]()
    on_host: RaggedBatch | None = None
    for move in moving.moves:
        if move.source == fabric.rank and ragged is not None:
            device = fabric.device_between(move.source, move.dest)
            if device is None and on_host is None:
                on_host = ragged.on_host()  # read from a device once, not by message
            rows = ragged if on_host is None or device is not None else on_host
            header, payload, on_device[move.dest] = rows.pack([place[row] for row in move.rows], device)
            sent.add(channel.send_to([move.dest], header, payload))
    return sent, on_device


def _hear(fabric: Fabric, moving: Moving) -> tuple[dict[int, Heard], dict[int, Tensor]]:
    """What every sender has sent from its host, and room for what comes to a device, as the headers say."""
    channel, heard, on_device = Channel(fabric, moving.name), dict[int, Heard](), dict[int, Tensor]()
    for source in (move.source for move in moving.moves if move.dest == fabric.rank):
        parts = channel.receive_from(source)
        if len(parts) != 2:
            raise DataError(f"{moving.name}: {fabric.describe(source)} sent something else than rows")
        heard[source] = Heard(parts[0].numpy().tobytes(), parts[1])
        if (size := num_bytes_on_device(heard[source].header)) is not None:
            device = fabric.device_between(source, fabric.rank)
            on_device[source] = torch.empty(size, dtype=torch.uint8, device=device)
    fabric.traffic.received += sum(each.payload.numel() for each in heard.values())
    fabric.traffic.received += sum(each.numel() for each in on_device.values())
    return heard, on_device


@dataclass(frozen=True)
class HeldRows:
    """Which samples of a step's batch this rank has, and what every rank of its world knows of all of them.

    Attributes:
        lengths, group_ids: of all samples.
        by_rank: rank of the job -> the numbers of its samples, ascending; the same on every rank.
        groups_by_rank: rank -> those of them that it speaks for: each sample has one such rank, and so has each group.
    """

    fabric: Fabric
    lengths: SequenceLengths
    group_ids: Sequence[int]
    by_rank: Rows
    groups_by_rank: Mapping[int, range]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The numbers of this rank's samples, in the order of its batch."""
        return tuple(self.by_rank[self.fabric.rank])

    @cached_property
    def place(self) -> dict[int, int]:
        """Where in this rank's batch a sample is, by its number."""
        return {row: place for place, row in enumerate(self.rows)}

    @cached_property
    def own(self) -> Tensor:
        """[k] int64: the places of the samples that this rank speaks for."""
        return torch.tensor([self.place[row] for row in self.groups_by_rank[self.fabric.rank]], dtype=torch.int64)

    def places_of(self, samples: Sequence[int]) -> list[int]:
        """The places of those of these samples that this rank has."""
        return [self.place[row] for row in samples if row in self.place]

    def pick(self, values: Tensor) -> Tensor:
        """[B, ...] of all samples -> [n, ...] of this rank's."""
        return values[torch.tensor(self.rows, dtype=torch.int64)]

    def of_all(self, values: Tensor) -> Tensor:
        """[n, ...] of this rank's samples -> [B, ...] of all, on every host; for a few numbers a sample."""
        return gather_host_rows(values.cpu()[self.own], default_group())

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on each of them."""
        total = values.to(device_of(), copy=True)
        dist.all_reduce(total, group=default_group())
        return total.to(values.device)

    def whole_on(self, rank: int, batch: RolloutBatch) -> RolloutBatch:
        """All samples, on one rank of the job; on the others `batch`, as it is. Every rank takes part."""
        everything = {rank: range(len(self.lengths))}
        moving = Moving.plan(self.fabric, "whole batch", self.groups_by_rank, everything)
        whole = move_batch(self.fabric, moving, batch.select(self.own))
        return batch if whole is None else whole

    def spread(self, name: str, tensors: Mapping[str, Tensor], source: Rows) -> dict[str, Tensor]:
        """Results from the rank that has worked them out to all that have the samples; every rank takes part.

        Args:
            tensors: [n, ...] each, with zeros beyond a response; n samples as in this rank's batch.
            source: rank -> the samples whose results it has; each is in one of them.

        Returns: by name, of all of this rank's samples, where results lie.
        """
        source = {rank: source.get(rank, ()) for rank in self.fabric.world.ranks}
        mine = torch.tensor([self.place[row] for row in source[self.fabric.rank]], dtype=torch.int64)
        rows = {key: tensor[beside(tensor, mine)] for key, tensor in tensors.items()}
        # of a response there is a value for each token, or one more
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
    """Who reads which samples of a batch, of the ranks of a world.

    Attributes:
        rows: lengths of all samples -> those that each rank of the world works on.
    """

    fabric: Fabric
    rows: Callable[[SequenceLengths], Rows]

    def held(self, lengths: SequenceLengths, group_ids: Sequence[int]) -> HeldRows:
        """What each rank has of a batch: what it works on, and the groups that it speaks for."""
        ranks = self.fabric.world.ranks
        groups = dict(zip(ranks, groups_of_ranks(group_ids, len(ranks)), strict=True))
        return HeldRows(self.fabric, lengths, group_ids, join_rows([groups, self.rows(lengths)]), groups)

    def of_whole(self, batch: RolloutBatch) -> RolloutBatch:
        """This rank's samples of a batch that every rank has; of several agents' samples all."""
        if "agent_ids" in batch:
            return batch
        groups = batch.group_ids.tolist() if "group_ids" in batch else list(range(len(batch)))
        found = self.held(sequence_lengths(batch), groups)
        return as_held(batch.select(found.rows), found)


def as_held(batch: RolloutBatch, held: HeldRows) -> RolloutBatch:
    """A batch of this rank's samples, as wide as one of all would be; where every rank has all of them, just that."""
    lengths = held.lengths
    wide = batch.trim().pad_to(
        prompt=max(lengths.prompt_lengths, default=0), response=max(lengths.response_lengths, default=0)
    )
    if all(len(rows) == len(lengths) for rows in held.by_rank.values()):
        return wide
    return RolloutBatch(wide.tensors, wide.columns, held=held)


def of_all(batch: RolloutBatch, values: Tensor) -> Tensor:
    """[n, ...] of a batch's samples -> [B, ...] of all samples of its step, on every rank."""
    return values if batch.held is None else batch.held.of_all(values)


def of_held(batch: RolloutBatch, values: Tensor) -> Tensor:
    """[B, ...] of all samples of a step -> [n, ...] of those in this batch."""
    return values if batch.held is None else batch.held.pick(values)
