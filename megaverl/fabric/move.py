"""Moving rows from the ranks of one role to those of the next, point to point."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.data.batch import RolloutBatch
from megaverl.data.batch_fields import FIELDS, field_of
from megaverl.errors import DataError, TrainingStopped
from megaverl.fabric.rows import Move, Rows, plan_moves
from megaverl.fabric.wire import Table, merge, pack, unpack
from megaverl.fabric.worlds import Fabric
from megaverl.platform import platform

_MAGIC = 0x6D6F7665
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
        moves = plan_moves(source, dest, fabric.placement.node_of)
        for rank, rows in dest.items():
            if not rows and rank not in source and source:
                moves.append(Move(min(source), rank, ()))
        mine = tuple(move for move in moves if fabric.rank in (move.source, move.dest))
        return cls(
            name, tuple(source.get(fabric.rank, ())), tuple(dest.get(fabric.rank, ())), mine, fabric.rank in dest
        )


def move_batch(
    fabric: Fabric, moving: Moving, batch: RolloutBatch | None, *, names: Iterable[str] | None = None
) -> RolloutBatch | None:
    """Every rank's rows of a batch, padded to the longest of its senders' widths.

    Every rank that has a move takes part; one that has none may leave the call out.

    Args:
        batch: with the rows `moving.held`, in their order; None on a rank that holds none.
        names: the tensors that travel, besides those that every batch has; None: all. Columns travel all.

    Returns: the rows `moving.wanted`, in their order; None on a rank that is none of the receivers.

    Raises:
        DataError: a batch that does not have the rows, or a column that JSON cannot hold.
        TrainingStopped: a rank that did not send or take its rows in time, by number and role.
    """
    table = None
    if batch is not None:
        keep = None if names is None else {*names, "input_ids", "prompt_lengths", "generated_ids", "response_mask"}
        keep = None if keep is None else keep | {"response_lengths"}
        tensors = {name: tensor for name, tensor in batch.tensors.items() if keep is None or name in keep}
        table = _table(tensors, batch, batch.columns)
    moved = _move(fabric, moving, table)
    if moved is None:
        return None
    return RolloutBatch(moved.tensors, moved.columns)


def move_tensors(
    fabric: Fabric, moving: Moving, tensors: Mapping[str, Tensor] | None, batch: RolloutBatch | None
) -> dict[str, Tensor] | None:
    """Results alone (values, log-probs), for rows of a batch that the receivers have already.

    Args:
        tensors: fields of a batch, with the rows `moving.held`; None on a rank that holds none.
        batch: that they belong to: its lengths say what of each row travels.

    Returns: by name, the rows `moving.wanted`; None on a rank that is none of the receivers.
    """
    table = None
    if tensors is not None:
        if batch is None:
            raise DataError(f"{', '.join(tensors)}: the batch that they belong to is missing; its lengths are needed")
        table = _table(tensors, batch, {})
    moved = _move(fabric, moving, table)
    return None if moved is None else dict(moved.tensors)


def _table(tensors: Mapping[str, Tensor], batch: RolloutBatch, columns: Mapping[str, Sequence[object]]) -> Table:
    axes = {name: axis for name in tensors if (axis := field_of(name).axes) in _LENGTHS}
    lengths = {axis: batch[_LENGTHS[axis]] for axis in sorted(set(axes.values()))}
    return Table(tensors, axes, lengths, _fills(), columns)


def _fills() -> dict[str, float | bool]:
    return {name: field.fill for name, field in FIELDS.items()}


def _move(fabric: Fabric, moving: Moving, table: Table | None) -> Table | None:
    place = {row: number for number, row in enumerate(moving.held)}
    if place and table is None:
        raise DataError(f"{moving.name}: this rank holds {len(place)} rows, and gave none")
    if table is not None and (wrong := {len(tensor) for tensor in table.tensors.values()} - {len(place)}):
        raise DataError(
            f"{moving.name}: tensors of {sorted(wrong)} rows for the {len(place)} rows that this rank holds"
        )
    out = {m.dest: pack(table, [place[row] for row in m.rows]) for m in _sends(fabric, moving) if table is not None}
    received = _exchange(fabric, moving, out)
    to = {row: number for number, row in enumerate(moving.wanted)}
    if not moving.receives:
        return None
    parts: list[tuple[Sequence[int], Table, Sequence[int]]] = []
    if table is not None:
        kept = [row for row in moving.wanted if row in place]
        parts.append(([to[row] for row in kept], table, [place[row] for row in kept]))
    for move in moving.moves:
        if move.dest == fabric.rank:
            one = unpack(*received[move.source], _fills())
            parts.append(([to[row] for row in move.rows], one, range(len(move.rows))))
    if parts and any(here for here, _, _ in parts):  # what brings no rows must not widen those that do
        parts = [part for part in parts if part[0]]
    return merge(len(moving.wanted), parts) if parts else None


def _sends(fabric: Fabric, moving: Moving) -> list[Move]:
    return [move for move in moving.moves if move.source == fabric.rank]


def _exchange(
    fabric: Fabric, moving: Moving, out: Mapping[int, tuple[bytes, Tensor]]
) -> dict[int, tuple[bytes, Tensor]]:
    """Send and receive everything at once: sizes, then headers (both over the control group), then the bytes."""
    sources = [move.source for move in moving.moves if move.dest == fabric.rank]
    call = _Call(fabric, moving.name)
    sizes = {source: torch.zeros(3, dtype=torch.int64) for source in sources}
    headers_out = {dest: _bytes(header) for dest, (header, _) in out.items()}
    numbers = {
        dest: torch.tensor([_MAGIC, headers_out[dest].numel(), payload.numel()]) for dest, (_, payload) in out.items()
    }
    call.run(fabric.control, numbers, sizes)
    for source, found in sizes.items():
        if int(found[0]) != _MAGIC or int(found.min()) < 0:
            raise DataError(f"{moving.name}: {fabric.describe(source)} sent something else than rows")
    headers = {source: torch.empty(int(found[1]), dtype=torch.uint8) for source, found in sizes.items()}
    call.run(fabric.control, headers_out, headers)
    payloads = {
        source: torch.empty(int(found[2]), dtype=torch.uint8, device=platform.device) for source, found in sizes.items()
    }
    call.run(fabric.group, {dest: payload.to(platform.device) for dest, (_, payload) in out.items()}, payloads)
    return {source: (bytes(headers[source].numpy()), payloads[source]) for source in sources}


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@dataclass(frozen=True)
class _Call:
    """Sends and receives under one name, with a deadline."""

    fabric: Fabric
    name: str

    def run(self, group: dist.ProcessGroup, out: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
        """`out` by receiver, `into` by sender; what is empty does not travel."""
        tag = zlib.crc32(self.name.encode()) & 0x7FFFFFFF
        peers = [peer for peer, tensor in into.items() if tensor.numel()]
        operations = [dist.P2POp(dist.irecv, into[peer], group=group, group_peer=peer, tag=tag) for peer in peers]
        for peer, tensor in out.items():
            if tensor.numel():
                peers.append(peer)
                operations.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=peer, tag=tag))
        if not peers:
            return
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self._blame(peers[0], error) from error
        # NCCL gives one work for all; gloo one for each
        for work, peer in zip(works, peers, strict=False):
            try:
                _wait(work, self.fabric.timeout)
            except RuntimeError as error:
                raise self._blame(peer, error) from error

    def _blame(self, peer: int, error: Exception) -> TrainingStopped:
        return TrainingStopped(
            f"{self.name}: {self.fabric.describe(peer)} died or stalled: nothing went between it and rank "
            f"{self.fabric.rank} within {self.fabric.timeout.total_seconds():g} s "
            f"({str(error).splitlines()[0][:200]})"
        )


def _wait(work: dist.Work, timeout: timedelta) -> None:
    if platform.is_cuda:
        work.wait()
        torch.cuda.current_stream().synchronize()
    else:
        work.wait(timeout)
