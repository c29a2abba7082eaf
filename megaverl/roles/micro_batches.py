"""From a batch to the micro-batches of this data-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import plan_micro_batches
from megaverl.data.sharing import plan_packed_micro_batches, prompt_numbers, shared_tokens
from megaverl.models.packing import pack
from megaverl.roles.megatron_model import MegatronModel, MicroBatch

READ = ("input_ids", "prompt_lengths", "generated_ids", "response_lengths", "response_mask")
DRAWING = ("temperatures", "top_ks")


def micro_batches_for(
    model: MegatronModel,
    batch: RolloutBatch,
    max_tokens: int,
    fields: Mapping[str, torch.Tensor] | None = None,
    samples: Sequence[int] | None = None,
    *,
    least: int = 1,
    unit: int = 1,
    part: tuple[int, int] = (0, 1),
) -> list[MicroBatch]:
    """This rank's share of `batch`, cut under the token budget; every data-parallel rank gets as many.

    The batch is the same on all ranks, so each computes the same plan and takes its own part.

    Args:
        max_tokens: rows x longest row of a micro-batch never exceed it; where the model packs, the row's tokens.
        fields: [B, R] tensors that the loss needs.
        samples: the samples of this mini-batch; all if not given.
        least: micro-batches at least, where there are as many samples.
        part: (which, of how many): this model's share, where others elsewhere work on the rest.
        unit: so many neighbours are never split: 2 for pairs. `samples` are then numbers of units.

    Raises:
        DataError: one sample alone is above the budget.
    """
    shape = model.grid.shape
    multiple_of = shape.tp if model.config.sequence_parallel else 1
    given: dict[str, Any] = {
        # an interleaved pipeline takes micro-batches in groups of its stages
        "count_multiple_of": shape.pp if shape.vpp else 1,
        "least": least,
        "key": f"{model.role}.micro_batch_tokens",
    }
    units = range(len(batch) // unit) if samples is None else samples
    whole = [[number * unit + i for i in range(unit)] for number in units]
    lengths, num_ranks = batch.sequence_lengths, shape.dp * part[1]
    prompts: list[int] = []
    if model.packs:
        prompts, shared = prompt_numbers(batch), shared_tokens(batch.prompt_lengths.tolist())
        plan = plan_packed_micro_batches(
            whole, lengths.tolist(), shared, prompts, num_ranks, max_tokens, multiple_of=multiple_of, **given
        )
    else:
        # a unit costs as much as its rows, all as long as the longest
        costs = (lengths.view(-1, unit).amax(dim=1) * unit).tolist()
        plan = [
            [[number * unit + i for number in micro for i in range(unit)] for micro in mine]
            for mine in plan_micro_batches(
                costs, num_ranks, max_tokens, indices=units, multiple_of=multiple_of * unit, **given
            )
        ]
    bare = RolloutBatch({name: batch[name] for name in READ})
    # how each sample was drawn: its log-probs are of that distribution
    fields = {**(fields or {}), **{name: batch[name].unsqueeze(1) for name in DRAWING if name in batch}}
    mine = plan[part[0] * shape.dp + model.grid.coords.dp]
    if model.packs:
        return [_packed(bare, rows, fields, prompts, multiple_of, unit) for rows in mine]
    return [_padded(bare, rows, fields, multiple_of, unit) for rows in mine]


def _padded(
    batch: RolloutBatch, rows: list[int], fields: Mapping[str, torch.Tensor], multiple_of: int, unit: int
) -> MicroBatch:
    batch, index = _chosen(batch, rows, unit)
    return MicroBatch(
        samples=index,
        tokens=batch.joined(multiple_of=multiple_of).token_ids,
        prompt_lengths=batch.prompt_lengths,
        response_lengths=batch.response_lengths,
        fields=_columns(fields, batch, index),
    )


def _packed(
    batch: RolloutBatch,
    rows: list[int],
    fields: Mapping[str, torch.Tensor],
    prompts: list[int],
    multiple_of: int,
    unit: int,
) -> MicroBatch:
    batch, index = _chosen(batch, rows, unit)
    padded = batch.joined().token_ids
    packing = pack(
        batch.sequence_lengths.tolist(),
        shared_tokens(batch.prompt_lengths.tolist()),
        [prompts[row] for row in rows] or list(range(unit)),
        width=padded.shape[1],
        multiple_of=multiple_of,
    )
    return MicroBatch(
        samples=index,
        tokens=padded.flatten()[packing.source].unsqueeze(0),
        prompt_lengths=batch.prompt_lengths,
        response_lengths=batch.response_lengths,
        fields=_columns(fields, batch, index),
        packing=packing,
    )


def _chosen(batch: RolloutBatch, rows: list[int], unit: int) -> tuple[RolloutBatch, torch.Tensor]:
    if rows:
        return batch.select(rows), torch.tensor(rows, dtype=torch.int64)
    # A rank that has no samples left still takes part: a row (or a unit) without a response, of no weight.
    return batch.select([]).pad_to(samples=unit), torch.zeros(unit, dtype=torch.int64)


def _columns(fields: Mapping[str, torch.Tensor], batch: RolloutBatch, index: torch.Tensor) -> dict[str, torch.Tensor]:
    width = int(batch.response_lengths.max())
    return {name: tensor[index, :width] for name, tensor in fields.items()}
