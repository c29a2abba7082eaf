"""Rows of a step's samples, where roles have ranks of their own: as values of a program, and on their way.

    rollout ranks                      controller                         actor ranks
    generate() -> SampleRows  ------>  SampleFacts: lengths, groups  ---->  assign(): who works on which rows
                                       rows by rank                  <----
    send(move)  ----------------------- rows, rank to rank ------------->  receive(move)  -> SampleRows -> RolloutBatch

What is computed of samples (log-probs, values, advantages) is rows too, and moves to whoever works on the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from megaverl.controller.messages import RowTransfer
from megaverl.data.batch import RolloutBatch
from megaverl.data.batch_fields import FIELDS
from megaverl.data.held_rows import HeldRows, Readers, as_held, as_ragged, receive_whole, send_whole
from megaverl.data.prefix_packing import SequenceLengths, sequence_lengths
from megaverl.distributed.ragged import RaggedBatch, flattened, merge, num_bytes_on_device, put_together
from megaverl.distributed.worlds import Channel, Fabric, PendingSends, receive_json
from megaverl.sharding.rows import Rows
from megaverl.workers.reward import Scores

# Fields of a batch by name, such as `old_log_probs` [B, R]; None where the step does without.
Fields = dict[str, Tensor | None]
_FILLS: dict[str, float | bool] = {name: field.fill for name, field in FIELDS.items()}
_KNOWN: dict[str, type] = {"Scores": Scores}
KEPT_ASSIGNMENTS = 8  # batches whose assignment a rank remembers: as many as can be in use at once


class SampleFacts(msgspec.Struct, frozen=True):
    """What the program knows of the samples of a step.

    Attributes:
        prompt_lengths, response_lengths: tokens of each sample.
        prompts: the same number for samples whose prompts are the same, token for token.
        group_ids: number of each sample's group.
    """

    prompt_lengths: list[int]
    response_lengths: list[int]
    prompts: list[int]
    group_ids: list[int]

    @property
    def lengths(self) -> SequenceLengths:
        return SequenceLengths(self.prompt_lengths, self.response_lengths, self.prompts)


class SampleRows:
    """Some samples of a step, or some of what was computed of them, on one rank.

    Args:
        parts: row numbers with the rows, each row in one part.
        value: number of the value that they came as from other ranks; 0: they were made here.
        facts: of all samples; None where the rows are results.
        num_bytes: that came from other ranks and were not counted yet.
    """

    def __init__(
        self,
        parts: Sequence[tuple[tuple[int, ...], RaggedBatch]],
        value: int = 0,
        facts: SampleFacts | None = None,
        num_bytes: int = 0,
    ) -> None:
        self._parts = list(parts)
        self.value = value
        self.facts = facts
        self.num_bytes = num_bytes
        self.rows = tuple(sorted(row for rows, _ in parts for row in rows))
        self.batch: RolloutBatch | None = None  # made of these rows, once it was asked for

    def held_rows(self) -> tuple[int, ...]:
        """Return the numbers of the rows, ascending."""
        return self.rows

    def describe(self) -> SampleFacts | None:
        return self.facts

    @property
    def ragged(self) -> RaggedBatch:
        """Return all rows, in the order of their numbers."""
        rows, first = self._parts[0]
        if len(self._parts) > 1 or rows != self.rows:
            place = {row: number for number, row in enumerate(self.rows)}
            parts = [([place[row] for row in rows], part, range(len(rows))) for rows, part in self._parts]
            self._parts = [(self.rows, merge(len(self.rows), parts))]
        return self._parts[0][1]

    def with_part(self, rows: tuple[int, ...], part: RaggedBatch, value: int, num_bytes: int) -> SampleRows:
        """Return these rows and further ones, which came as the value of this number."""
        return SampleRows([*self._parts, (rows, part)], value, num_bytes=self.num_bytes + num_bytes)

    def pack(self, rows: Sequence[int], device: torch.device | None) -> tuple[bytes, Tensor, Tensor]:
        """Return some of the rows as `RaggedBatch.pack` does."""
        place = {row: number for number, row in enumerate(self.rows)}
        ragged = self.ragged if device is not None else self.ragged.on_host()
        return ragged.pack([place[row] for row in rows], device)


SampleValue = RolloutBatch | SampleRows


class SampleStore:
    """SampleValue and results of this rank, as its workers compute with them and as the program moves them.

    Args:
        readers: decides which rows each rank of this world works on; None: every rank works on all.
        fabric: None: roles share all ranks, nothing moves, and values are batches and fields as they are.
    """

    def __init__(self, fabric: Fabric | None = None, readers: Readers | None = None) -> None:
        self._fabric, self._readers = fabric, readers
        self._held: dict[int, HeldRows] = {}

    @property
    def _moves(self) -> bool:
        return self._fabric is not None

    def assign(self, value: int, facts: SampleFacts) -> dict[int, list[int]]:
        """Decide which rows of a value each rank of this world works on; every rank comes to the same decision.

        A rank without work gets the first sample, so that it has a batch to take part with.
        """
        fabric = self._fabric
        assert fabric is not None, "where roles share all ranks, every rank has what it works on"
        lengths = facts.lengths
        everything = range(len(lengths))
        if self._readers is None:
            return {rank: list(everything) for rank in fabric.world.ranks}
        held = self._readers.held(lengths, facts.group_ids)
        rows: Rows = {rank: sorted(mine) or [0] for rank, mine in held.by_rank.items()}
        self._held[value] = HeldRows(fabric, lengths, facts.group_ids, rows, held.groups_by_rank)
        while len(self._held) > KEPT_ASSIGNMENTS:
            del self._held[next(iter(self._held))]
        return {rank: list(mine) for rank, mine in rows.items()}

    def _count(self, samples: SampleRows) -> None:
        """Count the bytes of samples when they are used: in which step they arrive depends on time."""
        if self._fabric is not None:
            self._fabric.traffic.received += samples.num_bytes
            samples.num_bytes = 0

    def give(self, batch: RolloutBatch) -> SampleValue:
        """Return a batch that every rank of this world has, as a value of the program."""
        if not self._moves:
            return batch
        lengths = sequence_lengths(batch)
        groups = batch.group_ids.tolist() if "group_ids" in batch else list(range(len(batch)))
        facts = SampleFacts(list(lengths.prompt_lengths), list(lengths.response_lengths), list(lengths.prompts), groups)
        ragged = as_ragged(batch.tensors, batch, batch.columns)
        samples = SampleRows([(tuple(range(len(batch))), ragged)], facts=facts)
        samples.batch = batch
        return samples

    def batch(self, samples: SampleValue) -> RolloutBatch:
        """Return the batch that samples are."""
        if isinstance(samples, RolloutBatch):
            return samples
        if samples.batch is None:
            self._count(samples)
            ragged = samples.ragged
            batch = RolloutBatch(ragged.tensors, ragged.columns)
            held = self._held.get(samples.value)
            samples.batch = batch if held is None else as_held(batch, held)
        return samples.batch

    def give_fields(self, fields: Fields, batch: RolloutBatch) -> Fields | SampleRows:
        """Return what was computed of a batch, as a value of the program."""
        known = {name: tensor for name, tensor in fields.items() if tensor is not None}
        are_rows = all(name in FIELDS and len(tensor) == len(batch) for name, tensor in known.items())
        if not self._moves or not known or not are_rows:
            return fields
        rows = tuple(range(len(batch))) if batch.held is None else batch.held.rows
        return SampleRows([(rows, as_ragged(known, batch))])

    def fields(self, fields: Fields | SampleRows, batch: RolloutBatch) -> Fields:
        """Return what was computed of a batch, each tensor as wide as the batch."""
        if not isinstance(fields, SampleRows):
            return fields
        self._count(fields)
        found: Fields = {}
        for name, tensor in fields.ragged.tensors.items():
            found[name] = _widen(name, tensor, batch)
        return found


def _widen(name: str, tensor: Tensor, batch: RolloutBatch) -> Tensor:
    if FIELDS[name].axes != "R":
        return tensor
    width = batch.generated_ids.shape[1]
    missing = width - tensor.shape[1]
    return tensor if not missing else torch.nn.functional.pad(tensor, (0, missing), value=FIELDS[name].fill)


class RowMover:
    """Transfers values between ranks: rows of samples, or whole values that are plain, tensors or scores.

    Tensors that lie on devices go from device to device where the fabric reaches both; else everything goes from host
    to host. A sender waits for nobody.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._sent = PendingSends()

    async def send(self, move: RowTransfer, value: object) -> None:
        """Begin to send the move's rows of a value."""
        fabric, name = self._fabric, _name_of(move)
        self._sent.forget_done()
        if not isinstance(value, SampleRows):
            tensors: dict[str, Tensor] = {}
            head: Mapping[str, Any] = {"value": flattened(value, tensors, _KNOWN)}
            self._sent.add(send_whole(fabric, name, [move.dest], head, tensors))
            return
        device = fabric.device_between(move.source, move.dest)
        assert move.rows is not None, "rows of samples move by their numbers"
        header, payload, on_device = value.pack(move.rows, device)
        channel = Channel(fabric, name)
        self._sent.add(channel.send_to([move.dest], header, payload))
        if fabric.rows is not None:
            self._sent.add(channel.send(fabric.rows, {move.dest: on_device}))

    async def receive(self, move: RowTransfer, present: object | None) -> object:
        """Return the value with the rows that the move brings."""
        fabric, name = self._fabric, _name_of(move)
        if move.rows is None:
            head = receive_json(fabric, name, move.source)
            received = fabric.traffic.received
            tensors = receive_whole(fabric, name, move.source, head)
            fabric.traffic.received = received  # small values are not counted
            return put_together(head["value"], tensors, _KNOWN)
        channel = Channel(fabric, name)
        header_bytes, payload = channel.receive_from(move.source)
        header = header_bytes.numpy().tobytes()
        num_bytes = payload.numel()
        on_device: Tensor | None = None
        size = num_bytes_on_device(header)
        if size is not None and fabric.rows is not None:
            on_device = torch.empty(size, dtype=torch.uint8, device=fabric.device_between(move.source, fabric.rank))
            channel.receive(fabric.rows, {move.source: on_device})
            num_bytes += size
        part = RaggedBatch.unpack(header, payload, _FILLS, on_device)
        if isinstance(present, SampleRows):
            return present.with_part(move.rows, part, move.value, num_bytes)
        return SampleRows([(move.rows, part)], move.value, num_bytes=num_bytes)

    def settle(self) -> None:
        """Wait until everything that was sent has been taken.

        Raises:
            TrainingStopped: a rank did not take its part in time.
        """
        self._sent.wait()


def _name_of(move: RowTransfer) -> str:
    return f"value {move.value}"
