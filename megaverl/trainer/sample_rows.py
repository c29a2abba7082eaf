"""Rows of a step's samples for roles on separate ranks, as values of a program and in transit.

    rollout ranks                      controller                         actor ranks
    generate() -> SampleRows  ------>  SampleFacts: lengths, groups  ---->  assign(): rows of each rank
                                       rows by rank                  <----
    send(move)  ----------------------- rows, rank to rank ------------->  receive(move)  -> SampleRows -> RolloutBatch

Values computed from samples (log-probs, values, advantages) are rows, too. They move to
the ranks that work on the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from megaverl.controller.messages import RowTransfer
from megaverl.data.batch import RolloutBatch
from megaverl.data.batch_fields import FIELDS
from megaverl.data.distributed_batch import RowSelection, as_held
from megaverl.data.held_rows import HeldRows
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.data.prefix_tree import PrefixTree, limits_of
from megaverl.data.row_transfer import as_ragged
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.dataflow.value_mover import ValueMover
from megaverl.distributed.job_context import JobContext
from megaverl.distributed.ragged import RaggedBatch, merge
from megaverl.sharding.rows import Rows
from megaverl.workers.reward import Scores

# Fields of a batch by name, such as `old_log_probs` [B, R]. None if the step does not
# need the field.
Fields = dict[str, Tensor | None]
# Batches whose assignment a rank remembers. It exceeds the number of batches in use at
# the same time.
KEPT_ASSIGNMENTS = 8


class SampleFacts(msgspec.Struct, frozen=True):
    """Facts about the samples of a step that the program needs to assign them.

    Attributes:
        prompt_lengths, response_lengths: number of tokens of each sample.
        prompts: number of each sample, equal for samples that are planned together (`SequenceLengths.prompts`).
        group_ids: group of each sample.
        tree_order, tree_equal: tree of the tokens that samples share (`PrefixTree`); empty if they share equal prompts
            alone.
    """

    prompt_lengths: list[int]
    response_lengths: list[int]
    prompts: list[int]
    group_ids: list[int]
    tree_order: list[int] = []
    tree_equal: list[int] = []

    @classmethod
    def of(cls, batch: RolloutBatch) -> SampleFacts:
        """Return the facts of a batch with all samples of a step."""
        lengths = sequence_lengths(batch)
        has_groups = "group_ids" in batch
        groups = batch.group_ids.tolist() if has_groups else list(range(len(batch)))
        tree = lengths.tree_of_tokens
        return cls(
            list(lengths.prompt_lengths),
            list(lengths.response_lengths),
            list(lengths.prompts),
            groups,
            [] if tree is None else tree.order,
            [] if tree is None else tree.equal,
        )

    @property
    def lengths(self) -> SequenceLengths:
        """Return the lengths in the form that the roles take."""
        tree = None
        if self.tree_order:
            limits = limits_of(self.prompt_lengths)
            tree = PrefixTree(self.tree_order, self.tree_equal, limits)
        return SequenceLengths(
            self.prompt_lengths, self.response_lengths, self.prompts, tree
        )


class SampleRows:
    """Rows of a step's samples, or of values computed from them, on one rank.

    Args:
        parts: row numbers with the rows. Each row is in exactly one part.
        value: id of the value as which other ranks sent the rows, or 0 if the rows were computed on this rank.
        facts: facts about all samples, or None for computed values.
        num_bytes: bytes that came from other ranks and have not been counted yet.
        batch: batch of these rows; None: it is created from them on first use.
    """

    def __init__(
        self,
        parts: Sequence[tuple[tuple[int, ...], RaggedBatch]],
        value: int = 0,
        facts: SampleFacts | None = None,
        num_bytes: int = 0,
        batch: RolloutBatch | None = None,
    ) -> None:
        self._parts = list(parts)
        self.value, self.facts, self.num_bytes = value, facts, num_bytes
        self.batch = batch
        self.rows = tuple(sorted(row for rows, _ in parts for row in rows))

    def held_rows(self) -> tuple[int, ...]:
        """Return the row numbers in ascending order."""
        return self.rows

    def describe(self) -> SampleFacts | None:
        """Return the facts for the program, or None for computed values."""
        return self.facts

    @property
    def ragged(self) -> RaggedBatch:
        """Return all rows in the order of their numbers."""
        rows, first = self._parts[0]
        if len(self._parts) > 1 or rows != self.rows:
            # Rows of several senders are merged once and then kept in their order.
            place = {row: number for number, row in enumerate(self.rows)}
            parts = [
                ([place[row] for row in rows], part, range(len(rows)))
                for rows, part in self._parts
            ]
            self._parts = [(self.rows, merge(len(self.rows), parts))]
        return self._parts[0][1]

    def with_part(
        self, rows: tuple[int, ...], part: RaggedBatch, value: int, num_bytes: int
    ) -> SampleRows:
        """Return these rows together with further rows, which other ranks sent as the value with this id."""
        return SampleRows(
            [*self._parts, (rows, part)], value, num_bytes=self.num_bytes + num_bytes
        )

    def places_of(self, rows: Sequence[int]) -> list[int]:
        """Return the positions of rows in `ragged`."""
        place = {row: number for number, row in enumerate(self.rows)}
        return [place[row] for row in rows]


SampleValue = RolloutBatch | SampleRows


class SampleStore:
    """Converter between batches, with which workers compute, and values of a program, which move between ranks.

    Args:
        context: this rank's place in the job. None: roles share all ranks, nothing moves, and values are the batches
            and fields themselves.
        selection: decides which rows each rank of this role group works on. None: every rank works on all rows.
    """

    def __init__(
        self, context: JobContext | None = None, selection: RowSelection | None = None
    ) -> None:
        self._context, self._selection = context, selection
        self._held: dict[int, HeldRows] = {}

    def assign(self, value: int, facts: SampleFacts) -> dict[int, list[int]]:
        """Decide which rows of a value each rank of this role group works on. Every rank makes the same decision.

        A rank without work receives the first sample, because it needs a batch to take
        part in collectives.
        """
        context = self._context
        assert context is not None, (
            "where roles share all ranks, every rank has what it works on"
        )
        lengths = facts.lengths
        everything = range(len(lengths))
        if self._selection is None:
            return {rank: list(everything) for rank in context.role_group.ranks}
        held = self._selection.held(lengths, facts.group_ids)
        # Each island of the actor is a role group of its own, which assigns rows only
        # to its own ranks.
        rows: Rows = {
            rank: sorted(held.by_rank.get(rank, ())) or [0]
            for rank in context.role_group.ranks
        }
        self._held[value] = HeldRows(
            context, lengths, facts.group_ids, rows, held.groups_by_rank
        )
        # Dictionaries keep the order of insertion, so the first entry is the oldest.
        while len(self._held) > KEPT_ASSIGNMENTS:
            del self._held[next(iter(self._held))]
        return {rank: list(numbers) for rank, numbers in rows.items()}

    def _count(self, samples: SampleRows) -> None:
        """Count the received bytes of samples when they are used. The step in which they arrive depends on timing."""
        if self._context is not None:
            self._context.traffic.received += samples.num_bytes
            samples.num_bytes = 0

    def give(self, batch: RolloutBatch) -> SampleValue:
        """Convert a batch that every rank of this role group holds to a value of the program."""
        if self._context is None:
            return batch
        ragged = as_ragged(batch.tensors, batch, batch.columns)
        return SampleRows(
            [(tuple(range(len(batch))), ragged)],
            facts=SampleFacts.of(batch),
            batch=batch,
        )

    def batch(self, samples: SampleValue) -> RolloutBatch:
        """Convert a value to a batch."""
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
        """Convert fields computed from a batch to a value of the program."""
        known = {name: tensor for name, tensor in fields.items() if tensor is not None}
        # Fields without one row for each sample, such as a value per group, stay as
        # they are.
        are_rows = all(
            name in FIELDS and len(tensor) == len(batch)
            for name, tensor in known.items()
        )
        if self._context is None or not known or not are_rows:
            return fields
        rows = tuple(range(len(batch))) if batch.held is None else batch.held.rows
        return SampleRows([(rows, as_ragged(known, batch))])

    def fields(self, fields: Fields | SampleRows, batch: RolloutBatch) -> Fields:
        """Convert a value to fields, each tensor padded to the width of the batch."""
        if not isinstance(fields, SampleRows):
            return fields
        self._count(fields)
        widened: Fields = {}
        for name, tensor in fields.ragged.tensors.items():
            widened[name] = _widen(name, tensor, batch)
        return widened


def _widen(name: str, tensor: Tensor, batch: RolloutBatch) -> Tensor:
    # Only fields over response tokens are padded to the widest sample of a batch.
    if FIELDS[name].axes != "R":
        return tensor
    width = batch.generated_ids.shape[1]
    missing = width - tensor.shape[1]
    return (
        tensor
        if not missing
        else torch.nn.functional.pad(tensor, (0, missing), value=FIELDS[name].fill)
    )


class RowMover(ValueMover):
    """Mover that transfers rows of samples, and whole values: plain values, tensors or scores."""

    def __init__(self, context: JobContext) -> None:
        super().__init__(context, (Scores,))

    async def send(self, move: RowTransfer, value: object) -> None:
        """Start to send the rows of a value that the move requests."""
        if not isinstance(value, SampleRows):
            await super().send(move, value)
            return
        assert move.rows is not None, "rows of samples move by their numbers"
        self._sent.forget_done()
        self._send_rows(move, value.ragged, value.places_of(move.rows))

    async def receive(self, move: RowTransfer, present: object | None) -> object:
        """Receive the rows of a move. Return them together with the rows that are already present."""
        if move.rows is None:
            traffic = self._context.traffic
            received = traffic.received
            value = await super().receive(move, present)
            if isinstance(value, Scores):
                # Scores may arrive early, in a step that depends on timing. They are
                # not counted.
                traffic.received = received
            return value
        part, num_bytes = self._receive_rows(move)
        if isinstance(present, SampleRows):
            return present.with_part(move.rows, part, move.value, num_bytes)
        return SampleRows([(move.rows, part)], move.value, num_bytes=num_bytes)
