"""Moving rows from the ranks of one role to those of the next, point to point, from host memory to host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaverl.data.batch import RolloutBatch
from megaverl.data.batch_fields import FIELDS, field_of
from megaverl.distributed.p2p import Channel, PendingSends
from megaverl.distributed.ragged import RaggedBatch, merge
from megaverl.distributed.worlds import Fabric
from megaverl.errors import DataError
from megaverl.sharding.rows import Move, Rows, plan_moves

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


def move_ragged(fabric: Fabric, moving: Moving, ragged: RaggedBatch | None) -> RaggedBatch | None:
    """As `move_batch`, of any rows."""
    _check_held(moving, ragged)
    sent, out = _announce(fabric, moving, ragged)
    headers, into = _hear(fabric, moving)
    Channel(fabric, moving.name).exchange(fabric.control, out, into)
    sent.wait()
    return _merged(fabric, moving, ragged, headers, into)


def send_rows(fabric: Fabric, moving: Moving, ragged: RaggedBatch | None) -> PendingSends:
    """The half of a move that a rank has which receives nothing: its messages are on their way when this returns."""
    _check_held(moving, ragged)
    sent, out = _announce(fabric, moving, ragged)
    sent.add(Channel(fabric, moving.name).send(fabric.control, out))
    return sent


def receive_rows(fabric: Fabric, moving: Moving) -> RaggedBatch | None:
    """The half of a move that a rank has which sends nothing: its rows, when they are here."""
    headers, into = _hear(fabric, moving)
    Channel(fabric, moving.name).receive(fabric.control, into)
    return _merged(fabric, moving, None, headers, into)


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
    headers: Mapping[int, bytes],
    payloads: Mapping[int, Tensor],
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
            one = RaggedBatch.unpack(headers[move.source], payloads[move.source], _fills())
            parts.append(([to[row] for row in move.rows], one, range(len(move.rows))))
    if parts and any(here for here, _, _ in parts):  # what brings no rows must not widen those that do
        parts = [part for part in parts if part[0]]
    return merge(len(moving.wanted), parts) if parts else None


def _announce(fabric: Fabric, moving: Moving, ragged: RaggedBatch | None) -> tuple[PendingSends, dict[int, Tensor]]:
    """Sizes and headers, to every receiver; and the bytes that are to follow."""
    place = {row: number for number, row in enumerate(moving.held)}
    call, sent, out = Channel(fabric, moving.name), PendingSends(), {}
    for move in moving.moves:
        if move.source == fabric.rank and ragged is not None:
            header, payload = ragged.pack([place[row] for row in move.rows])
            data = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            sent.add(call.send(fabric.control, {move.dest: torch.tensor([_MAGIC, data.numel(), payload.numel()])}))
            sent.add(call.send(fabric.control, {move.dest: data}))
            out[move.dest] = payload.cpu()
    return sent, out


def _hear(fabric: Fabric, moving: Moving) -> tuple[dict[int, bytes], dict[int, Tensor]]:
    """Every sender's header, and room for its bytes."""
    sources = [move.source for move in moving.moves if move.dest == fabric.rank]
    call = Channel(fabric, moving.name)
    sizes = {source: torch.zeros(3, dtype=torch.int64) for source in sources}
    call.receive(fabric.control, sizes)
    for source, found in sizes.items():
        if int(found[0]) != _MAGIC or int(found.min()) < 0:
            raise DataError(f"{moving.name}: {fabric.describe(source)} sent something else than rows")
    headers = {source: torch.empty(int(found[1]), dtype=torch.uint8) for source, found in sizes.items()}
    call.receive(fabric.control, headers)
    payloads = {source: torch.empty(int(found[2]), dtype=torch.uint8) for source, found in sizes.items()}
    fabric.traffic.received += sum(payload.numel() for payload in payloads.values())
    return {source: bytes(header.numpy()) for source, header in headers.items()}, payloads
