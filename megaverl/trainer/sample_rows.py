"""Rows of a step's samples, where roles have ranks of their own: as values of a program, and on their way.

    rollout ranks                      controller                         actor ranks
    generate() -> SampleRows  ------>  SampleFacts: lengths, groups  ---->  assign(): who works on which rows
                                       rows by rank                  <----
    send(move)  ----------------------- rows, rank to rank ------------->  receive(move)  -> SampleRows -> RolloutBatch

What is computed of samples (log-probs, values, advantages) is rows too, and moves to whoever works on the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from megaverl.controller.messages import RowTransfer
from megaverl.data.batch import RolloutBatch
from megaverl.data.batch_fields import FIELDS
from megaverl.data.held_rows import HeldRows, Readers, as_held, as_ragged
from megaverl.data.prefix_packing import SequenceLengths, sequence_lengths
from megaverl.dataflow.value_mover import ValueMover
from megaverl.distributed.ragged import RaggedBatch, merge
from megaverl.distributed.worlds import Fabric
from megaverl.sharding.rows import Rows
from megaverl.workers.reward import Scores

# Fields of a batch by name, such as `old_log_probs` [B, R]; None where the step does without.
Fields = dict[str, Tensor | None]
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

    def places_of(self, rows: Sequence[int]) -> list[int]:
        """Return where rows stand in `ragged`."""
        place = {row: number for number, row in enumerate(self.rows)}
        return [place[row] for row in rows]


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
        # Islands of the actor are worlds of their own, which decide for their own ranks.
        rows: Rows = {rank: sorted(held.by_rank.get(rank, ())) or [0] for rank in fabric.world.ranks}
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


class RowMover(ValueMover):
    """Transfers rows of samples, or whole values that are plain, tensors or scores."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric, (Scores,))

    async def send(self, move: RowTransfer, value: object) -> None:
        """Begin to send the move's rows of a value."""
        if not isinstance(value, SampleRows):
            await super().send(move, value)
            return
        assert move.rows is not None, "rows of samples move by their numbers"
        self._sent.forget_done()
        self._send_rows(move, value.ragged, value.places_of(move.rows))

    async def receive(self, move: RowTransfer, present: object | None) -> object:
        """Return the value with the rows that the move brings."""
        if move.rows is None:
            traffic = self._fabric.traffic
            received = traffic.received
            value = await super().receive(move, present)
            if isinstance(value, Scores):
                traffic.received = received  # in which step they arrive depends on time where they are delivered early
            return value
        part, num_bytes = self._receive_rows(move)
        if isinstance(present, SampleRows):
            return present.with_part(move.rows, part, move.value, num_bytes)
        return SampleRows([(move.rows, part)], move.value, num_bytes=num_bytes)
