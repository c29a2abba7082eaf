"""The critic: the value of every response token, and its update."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megaverl.algorithms import value_losses
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.roles.megatron_model import MegatronModel, MicroBatch
from megaverl.roles.micro_batches import micro_batches_for
from megaverl.roles.trainable import TrainableModel
from megaverl.roles.updates import Weighting, run_updates, share


class Critic:
    """A backbone with a value head, trained towards the returns."""

    def __init__(
        self, trainable: TrainableModel, algorithm: AlgorithmConfig, *, micro_batch_tokens: int, seed: int
    ) -> None:
        self.trainable, self.model, self.algorithm = trainable, trainable.model, algorithm
        self.micro_batch_tokens, self.seed = micro_batch_tokens, seed
        self._value_loss = value_losses.get("clipped")

    def values(self, batch: RolloutBatch) -> torch.Tensor:
        """[B, R] float32: the value before each response token, the same on every rank."""
        micro = micro_batches_for(self.model, batch, self.micro_batch_tokens, heads_of(batch, self.model))
        return self.model.score(micro, self.model.values, batch.response_shape)

    def update(self, batch: RolloutBatch, *, step: int) -> dict[str, float]:
        """Take all updates of one step towards `returns`; `values` are the old ones. Returns metrics."""
        return run_updates(
            self.trainable,
            batch,
            self._loss,
            algorithm=self.algorithm,
            weighting=Weighting("token_mean"),
            fields={"old_values": batch.values, "returns": batch.returns, **heads_of(batch, self.model)},
            micro_batch_tokens=self.micro_batch_tokens,
            seed=self.seed,
            step=step,
        )

    def _loss(self, output: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        result = self._value_loss(
            {"values": self.model.values(output, micro), **micro.fields}, clip_range=self.algorithm.value_clip_range
        )
        loss = self.algorithm.value_loss_coef * result.loss
        return loss, {**result.metrics, "loss": share(loss)}


def heads_of(batch: RolloutBatch, model: MegatronModel) -> dict[str, torch.Tensor]:
    """Where each agent has a value head of its own: which one is a sample's, [B, 1]."""
    return {"heads": batch.agent_ids.unsqueeze(1)} if model.value_head > 1 else {}
