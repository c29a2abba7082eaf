"""All optimizer steps that one batch gets: epochs over it, mini-batches in each."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megaverl.algorithms import MetricSums, add_metrics, aggregations, count_denominators, finalize
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import mini_batches
from megaverl.roles.megatron_model import Loss
from megaverl.roles.micro_batches import micro_batches_for
from megaverl.roles.trainable import TrainableModel, UpdateReport


def run_updates(
    trainable: TrainableModel,
    batch: RolloutBatch,
    loss: Loss,
    *,
    algorithm: AlgorithmConfig,
    aggregation: str,
    fields: Mapping[str, torch.Tensor],
    micro_batch_tokens: int,
    seed: int,
    step: int,
) -> dict[str, float]:
    """Update on every mini-batch of every epoch; every rank takes part.

    Args:
        loss: gets `fields` and `weights` (see `loss_weights`) of its micro-batch, and returns its share of the
            global loss. A metric called `loss` is a share too.

    Returns:
        Means over all of the updates: the loss's metrics, `loss`, `grad_norm`, `lr`, `num_updates`.
    """
    reports: list[UpdateReport] = []
    sums = MetricSums()
    for epoch in range(algorithm.num_epochs):
        for samples in mini_batches(len(batch), algorithm.num_mini_batches, seed=seed, step=step, epoch=epoch):
            weights = loss_weights(batch.response_mask, samples, aggregation)
            micro = micro_batches_for(
                trainable.model, batch, micro_batch_tokens, {**fields, "weights": weights}, samples
            )
            reports.append(trainable.update(micro, loss))
            sums = add_metrics(sums, reports[-1].sums)
    shares = sums.pop("loss")
    return {
        **finalize(sums),
        "loss": float(shares[1]) / len(reports),
        "grad_norm": sum(report.grad_norm for report in reports) / len(reports),
        "lr": reports[-1].learning_rate,
        "num_updates": float(len(reports)),
    }


def loss_weights(response_mask: torch.Tensor, samples: list[int], aggregation: str) -> torch.Tensor:
    """[B, R] weights of every token in the loss of the mini-batch `samples`, over its global denominators."""
    mask = torch.zeros_like(response_mask)
    mask[samples] = response_mask[samples]
    return aggregations.get(aggregation).function(mask, count_denominators(mask))


def share(loss: torch.Tensor) -> torch.Tensor:
    """A loss as a metric whose sum is the global loss: [1, loss, loss^2]."""
    value = loss.detach().double()
    return torch.stack([torch.ones_like(value), value, value.square()])
