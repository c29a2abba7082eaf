"""From a batch to the micro-batches of this data-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import plan_micro_batches
from megaverl.roles.megatron_model import MegatronModel, MicroBatch

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
        max_tokens: rows x longest row of a micro-batch never exceed it.
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
    lengths = batch.sequence_lengths
    if unit > 1:  # a unit costs as much as its rows, all as long as the longest
        lengths = lengths.view(-1, unit).amax(dim=1) * unit
    plan = plan_micro_batches(
        lengths.tolist(),
        shape.dp * part[1],
        max_tokens,
        indices=samples,
        multiple_of=multiple_of * unit,
        # an interleaved pipeline takes micro-batches in groups of its stages
        count_multiple_of=shape.pp if shape.vpp else 1,
        least=least,
        key=f"{model.role}.micro_batch_tokens",
    )
    bare = RolloutBatch(
        {
            name: batch[name]
            for name in ("input_ids", "prompt_lengths", "generated_ids", "response_lengths", "response_mask")
        }
    )
    # how each sample was drawn: its log-probs are of that distribution
    given = {**(fields or {}), **{name: batch[name].unsqueeze(1) for name in DRAWING if name in batch}}
    place = part[0] * shape.dp + model.grid.coords.dp
    mine = [[number * unit + i for number in units for i in range(unit)] for units in plan[place]]
    return [_micro_batch(bare, rows, given, multiple_of, unit) for rows in mine]


def _micro_batch(
    batch: RolloutBatch, rows: list[int], fields: Mapping[str, torch.Tensor], multiple_of: int, unit: int
) -> MicroBatch:
    if not rows:
        # A rank that has no samples left still takes part: a row (or a unit) without a response, of no weight.
        batch = batch.select([]).pad_to(samples=unit)
        index = torch.zeros(unit, dtype=torch.int64)
    else:
        batch = batch.select(rows)
        index = torch.tensor(rows, dtype=torch.int64)
    width = int(batch.response_lengths.max())
    return MicroBatch(
        rows=index,
        tokens=batch.joined(multiple_of=multiple_of).token_ids,
        prompt_lengths=batch.prompt_lengths,
        response_lengths=batch.response_lengths,
        fields={name: tensor[index, :width] for name, tensor in fields.items()},
    )
