"""Batches whose samples are spread over ranks: moved, assigned to the ranks that work on them, and gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import groups_of_ranks
from megaverl.data.held_rows import HeldRows
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.data.row_transfer import Moving, as_ragged, move_ragged
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.distributed.job_context import JobContext
from megaverl.sharding.rows import Rows, join_rows


def move_batch(
    context: JobContext, moving: Moving, batch: RolloutBatch | None
) -> RolloutBatch | None:
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
    moved = move_ragged(context, moving, ragged)
    return None if moved is None else RolloutBatch(moved.tensors, moved.columns)


def whole_on(batch: RolloutBatch, rank: int) -> RolloutBatch:
    """Return all samples of a step on one rank of the job, and `batch` unchanged on the others.

    Collective over the role group, unless every rank holds all samples.
    """
    held = batch.held
    if held is None:
        return batch
    all_on_rank = {rank: range(len(held.lengths))}
    moving = Moving.plan(held.context, "whole batch", held.groups_by_rank, all_on_rank)
    whole = move_batch(held.context, moving, batch.select(held.own))
    return batch if whole is None else whole


@dataclass(frozen=True)
class RowSelection:
    """Assignment of a batch's samples to the ranks of a role group.

    Attributes:
        context: communication of the job.
        rows: lengths of all samples -> samples that each rank of the group works on.
    """

    context: JobContext
    rows: Callable[[SequenceLengths], Rows]

    def held(self, lengths: SequenceLengths, group_ids: Sequence[int]) -> HeldRows:
        """Return what each rank holds of a batch: the samples that it works on, and the groups that it reports for."""
        ranks = self.context.role_group.ranks
        groups = dict(zip(ranks, groups_of_ranks(group_ids, len(ranks)), strict=True))
        return HeldRows(
            self.context,
            lengths,
            group_ids,
            join_rows([groups, self.rows(lengths)]),
            groups,
        )

    def select(self, batch: RolloutBatch) -> RolloutBatch:
        """Return this rank's samples of a batch that every rank has. With several agents, all samples."""
        if "agent_ids" in batch:
            return batch
        groups = (
            batch.group_ids.tolist()
            if "group_ids" in batch
            else list(range(len(batch)))
        )
        held = self.held(sequence_lengths(batch), groups)
        return as_held(batch.select(held.rows), held)


def as_held(batch: RolloutBatch, held: HeldRows) -> RolloutBatch:
    """Return a batch of this rank's samples, padded to the widths of the whole batch.

    If every rank holds all samples, the result is an ordinary batch.
    """
    lengths = held.lengths
    # All ranks pad to the same widths, as results of all ranks are joined column by
    # column.
    longest_prompt = max(lengths.prompt_lengths, default=0)
    longest_response = max(lengths.response_lengths, default=0)
    wide = batch.trim().pad_to(prompt=longest_prompt, response=longest_response)
    if all(len(rows) == len(lengths) for rows in held.by_rank.values()):
        return wide
    return RolloutBatch(wide.tensors, wide.columns, held=held)


def gather_samples(batch: RolloutBatch, values: Tensor) -> Tensor:
    """Gather values of all samples of a step on every rank: [n, ...] of a batch's samples -> [B, ...]."""
    return values if batch.held is None else batch.held.gather_samples(values)


def select_samples(batch: RolloutBatch, values: Tensor) -> Tensor:
    """Select the samples in this batch: [B, ...] of all samples of a step -> [n, ...]."""
    return values if batch.held is None else batch.held.pick(values)
