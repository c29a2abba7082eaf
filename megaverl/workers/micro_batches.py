"""From a batch to the micro-batches of this data-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import plan_micro_batches
from megaverl.data.prefix_packing import SequenceLengths, plan_packed_micro_batches, sequence_lengths, shared_tokens
from megaverl.models.packing import MicroBatch, pack
from megaverl.workers.megatron_model import MegatronModel, Score

READ = ("input_ids", "prompt_lengths", "generated_ids", "response_lengths", "response_mask")
DRAWING = ("temperatures", "top_ks")


# for each data-parallel rank its micro-batches, as the numbers of samples
MicroBatchPlan = list[list[list[int]]]


def micro_batches_for(
    model: MegatronModel,
    batch: RolloutBatch,
    max_tokens: int,
    fields: Mapping[str, torch.Tensor] | None = None,
    *,
    unit: int = 1,
) -> list[MicroBatch]:
    """This rank's share of `batch`, cut under the token budget; every data-parallel rank gets as many.

    Args:
        batch: with the tokens of the samples that are this rank's, and the lengths of all.
        fields: [B, R] tensors that the loss needs.
        max_tokens, unit: see `plan_for`.

    Raises:
        DataError: one sample alone is above the budget.
    """
    outline = sequence_lengths(batch)
    return micro_batches_of(model, batch, outline, plan_for(model, outline, max_tokens, unit=unit), fields, unit=unit)


def plan_for(
    model: MegatronModel,
    outline: SequenceLengths,
    max_tokens: int,
    samples: Sequence[int] | None = None,
    *,
    least: int = 1,
    unit: int = 1,
    parts: int = 1,
) -> MicroBatchPlan:
    """Micro-batches of all data-parallel ranks, the same on every rank: it follows from the lengths.

    Args:
        max_tokens: rows x longest row of a micro-batch never exceed it; where the model packs, the row's tokens.
        samples: the samples of this mini-batch; all if not given.
        least: micro-batches at least, where there are as many samples.
        parts: models like this that share the work, each with data-parallel ranks of its own.
        unit: so many neighbours are never split: 2 for pairs. `samples` are then numbers of units.

    Returns: those of this model's ranks if there is one part; else of the first part's, then of the second's ...

    Raises:
        DataError: one sample alone is above the budget.
    """
    shape = model.grid.shape
    given: dict[str, Any] = {
        "multiple_of": _multiple_of(model),
        # an interleaved pipeline takes micro-batches in groups of its stages
        "count_multiple_of": shape.pp if shape.vpp else 1,
        "least": least,
        "key": f"{model.role}.micro_batch_tokens",
    }
    units = range(len(outline) // unit) if samples is None else samples
    whole = [[number * unit + i for i in range(unit)] for number in units]
    lengths, num_ranks = outline.lengths, shape.dp * parts
    if model.packs:
        shared = shared_tokens(outline.prompt_lengths)
        return plan_packed_micro_batches(whole, lengths, shared, outline.prompts, num_ranks, max_tokens, **given)
    # a unit costs as much as its rows, all as long as the longest
    costs = [unit * max(lengths[first : first + unit]) for first in range(0, len(outline) - unit + 1, unit)]
    given["multiple_of"] *= unit
    return [
        [[number * unit + i for number in micro for i in range(unit)] for micro in mine]
        for mine in plan_micro_batches(costs, num_ranks, max_tokens, indices=units, **given)
    ]


def of_each_rank(model: MegatronModel, plan: MicroBatchPlan, part: int = 0) -> list[Sequence[int]]:
    """The samples that each rank of the model's grid works on: those of its data-parallel rank."""
    shape = model.grid.shape
    parts = [[row for micro in mine for row in micro] for mine in plan[part * shape.dp : (part + 1) * shape.dp]]
    return [parts[shape.coords(rank).dp] for rank in range(shape.world_size)]


def micro_batches_of(
    model: MegatronModel,
    batch: RolloutBatch,
    outline: SequenceLengths,
    plan: MicroBatchPlan,
    fields: Mapping[str, torch.Tensor] | None = None,
    *,
    unit: int = 1,
    part: int = 0,
) -> list[MicroBatch]:
    """Those of a plan that are this rank's."""
    bare = RolloutBatch({name: batch[name] for name in READ})
    # how each sample was drawn: its log-probs are of that distribution
    fields = {**(fields or {}), **{name: batch[name].unsqueeze(1) for name in DRAWING if name in batch}}
    mine = plan[part * model.grid.shape.dp + model.grid.coords.dp]
    return [_micro_batch(model, bare, rows, fields, outline.prompts, unit) for rows in mine]


def _multiple_of(model: MegatronModel) -> int:
    return model.grid.shape.tp if model.config.sequence_parallel else 1


def _micro_batch(
    model: MegatronModel,
    batch: RolloutBatch,
    rows: list[int],
    fields: Mapping[str, torch.Tensor],
    prompts: list[int],
    unit: int,
) -> MicroBatch:
    if rows:
        batch, index = batch.select(rows), torch.tensor(rows, dtype=torch.int64)
    else:  # a rank without samples left still takes part: a row (or a unit) without a response, of no weight
        batch, index = batch.select([]).pad_to(samples=unit), torch.zeros(unit, dtype=torch.int64)
    packing = None
    if not model.packs:
        tokens = batch.joined(multiple_of=_multiple_of(model)).token_ids
    else:
        padded = batch.joined().token_ids
        packing = pack(
            batch.sequence_lengths.tolist(),
            shared_tokens(batch.prompt_lengths.tolist()),
            [prompts[row] for row in rows] or list(range(unit)),
            width=padded.shape[1],
            multiple_of=_multiple_of(model),
        )
        tokens = padded.flatten()[packing.source].unsqueeze(0)
    width = int(batch.response_lengths.max())
    return MicroBatch(
        samples=index,
        tokens=tokens,
        prompt_lengths=batch.prompt_lengths,
        response_lengths=batch.response_lengths,
        fields={name: tensor[index, :width] for name, tensor in fields.items()},
        packing=packing,
    )


class ModelWorker:
    """What goes over batches with a model, in micro-batches of at most `micro_batch_tokens`."""

    def __init__(self, model: MegatronModel, *, micro_batch_tokens: int) -> None:
        self.model, self.micro_batch_tokens = model, micro_batch_tokens

    def rows(self, outline: SequenceLengths) -> list[Sequence[int]]:
        """The samples that each rank of the model's grid reads to score a batch."""
        return of_each_rank(self.model, plan_for(self.model, outline, self.micro_batch_tokens))

    def score(
        self,
        batch: RolloutBatch,
        score: Score,
        shape: tuple[int, ...],
        fields: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """`MegatronModel.score` of a batch, the same on every rank; `score` reads `fields` [B, R]."""
        return self.model.score(micro_batches_for(self.model, batch, self.micro_batch_tokens, fields), score, shape)
