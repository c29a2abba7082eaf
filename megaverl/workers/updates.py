"""All optimizer steps that one batch gets: epochs over it, mini-batches in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

from megaverl.algorithms import Entry, MetricSums, add_metrics, aggregations, count_denominators, finalize
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import mini_batches
from megaverl.data.prefix_packing import SequenceLengths, sequence_lengths
from megaverl.models.packing import MicroBatch
from megaverl.workers.megatron_model import Loss, MegatronModel
from megaverl.workers.micro_batches import MicroBatchPlan, micro_batches_of, of_each_rank, plan_for
from megaverl.workers.trainable import TrainableModel, UpdateReport

# (mask of a mini-batch [B, R], (step, epoch, number of the mini-batch)) -> further fields of its loss
Selection = Callable[[torch.Tensor, tuple[int, int, int]], Mapping[str, torch.Tensor]]
# the micro-batches of a mini-batch, before they are trained on
Preparation = Callable[[list[MicroBatch]], list[MicroBatch]]


class Updated(Protocol):
    """A role that is trained: the actor, a critic."""

    trainable: TrainableModel
    algorithm: AlgorithmConfig
    micro_batch_tokens: int
    seed: int


def run_updates(
    role: Updated,
    batch: RolloutBatch,
    loss: Loss,
    *,
    weighting: Weighting,
    fields: Mapping[str, torch.Tensor],
    step: int,
    select: Selection | None = None,
    prepare: Preparation | None = None,
) -> dict[str, float]:
    """Update on every mini-batch of every epoch; every rank takes part.

    Args:
        loss: gets `fields` and `weights` of its micro-batch, and returns its share of the global loss. A metric
            called `loss`, or `.../loss`, is a share too.
        weighting: of every token in the loss of its mini-batch.
        select: makes fields that depend on the whole mini-batch.
        prepare: adds what another model has to say of the micro-batches.

    Returns:
        Means over all of the updates: the loss's metrics, `loss`, `grad_norm`, `lr`, `num_updates`.
    """
    reports: list[UpdateReport] = []
    sums, outline, trainable = MetricSums(), sequence_lengths(batch), role.trainable
    with trainable.updating():
        for planned in plan_updates(role, outline, step):
            mask = mini_batch_mask(batch.response_mask, planned.samples)
            extra = select(mask, planned.number) if select else {}
            given = {**fields, **extra, "weights": weighting.weights(mask)}
            part = trainable.part[0]
            micro = micro_batches_of(trainable.model, batch, outline, planned.micro_batches, given, part=part)
            micro = prepare(micro) if prepare else micro
            reports.append(trainable.update(micro, loss, float(mask.sum())))
            sums = add_metrics(sums, reports[-1].sums)
    shares = {name: sums.pop(name) for name in list(sums) if name.rpartition("/")[2] == "loss"}
    return {
        **finalize(sums),
        **{name: float(value[1]) / len(reports) for name, value in shares.items()},
        "grad_norm": sum(report.grad_norm for report in reports) / len(reports),
        "lr": reports[-1].learning_rate,
        "num_updates": float(len(reports)),
    }


class PlannedUpdate(NamedTuple):
    """One optimizer step: its number as (step, epoch, mini-batch), its samples, and who works on which."""

    number: tuple[int, int, int]
    samples: list[int]
    micro_batches: MicroBatchPlan


def plan_updates(role: Updated, outline: SequenceLengths, step: int) -> Iterator[PlannedUpdate]:
    """All updates of a step, the same on every rank, from what is known of all samples.

    Samples with the same prompt lie in the same mini-batch as far as its size allows: packed, they share its tokens.

    Raises:
        DataError: one sample alone is above the budget; fewer samples than mini-batches.
    """
    trainable, seed, count = role.trainable, role.seed, role.algorithm.num_mini_batches
    least, islands = trainable.gradient_accumulation, trainable.part[1]
    for epoch in range(role.algorithm.num_epochs):
        parts = mini_batches(len(outline), count, seed=seed, step=step, epoch=epoch, group_ids=outline.prompts)
        for number, samples in enumerate(parts):
            plan = plan_for(trainable.model, outline, role.micro_batch_tokens, samples, least=least, parts=islands)
            yield PlannedUpdate((step, epoch, number), samples, plan)


def rows_of_updates(role: Updated, outline: SequenceLengths, step: int, part: int) -> list[set[int]]:
    """The samples that each rank of the model's grid trains on in any update of a step.

    Args:
        part: which of the islands' models.
    """
    model = role.trainable.model
    found: list[set[int]] = [set() for _ in range(model.grid.shape.world_size)]
    for update in plan_updates(role, outline, step):
        for mine, rows in zip(found, of_each_rank(model, update.micro_batches, part), strict=True):
            mine.update(rows)
    return found


class Weighting:
    """A loss aggregation with its options."""

    def __init__(self, name: str, **options: int | None) -> None:
        self.aggregation: Entry[torch.Tensor] = aggregations.get(name)
        self.options = {key: value for key, value in options.items() if key in self.aggregation.options}

    def weights(self, mask: torch.Tensor) -> torch.Tensor:
        """[B, R] weights of every token under the `mask` of a mini-batch, over its global denominators."""
        inputs = {"response_mask": mask, "denominators": count_denominators(mask)}
        return self.aggregation(inputs, **self.options)


def mini_batch_mask(response_mask: torch.Tensor, samples: list[int]) -> torch.Tensor:
    """[B, R]: the response tokens of `samples` alone."""
    mask = torch.zeros_like(response_mask)
    mask[samples] = response_mask[samples]
    return mask


def cross_entropy(model: MegatronModel) -> Loss:
    """The loss -log p of every token, times the field `weights`."""

    def loss(logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        log_probs, _ = model.log_probs(logits, micro)
        value = -(micro.fields["weights"] * log_probs).sum()
        return value, {"loss": share(value)}

    return loss


def share(loss: torch.Tensor) -> torch.Tensor:
    """A loss as a metric whose sum is the global loss: [1, loss, loss^2]."""
    value = loss.detach().double()
    return torch.stack([torch.ones_like(value), value, value.square()])
