"""The critic: the value of every response token, and its update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from megaverl.algorithms import LossOutput, value_losses
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.sharing import Outline
from megaverl.roles.megatron_model import MegatronModel, MicroBatch
from megaverl.roles.micro_batches import micro_batches_for, of_each_rank, plan_for
from megaverl.roles.trainable import TrainableModel
from megaverl.roles.updates import Weighting, run_updates, share


class Critic:
    """A backbone with a value head, trained towards the returns."""

    def __init__(
        self, trainable: TrainableModel, algorithm: AlgorithmConfig, *, micro_batch_tokens: int, seed: int
    ) -> None:
        self.trainable, self.model, self.algorithm = trainable, trainable.model, algorithm
        self.micro_batch_tokens, self.seed = micro_batch_tokens, seed
        self._value_loss = value_loss(algorithm)

    def values(self, batch: RolloutBatch) -> torch.Tensor:
        """[B, R] float32: the value before each response token, the same on every rank."""
        micro = micro_batches_for(self.model, batch, self.micro_batch_tokens, heads_of(batch, self.model))
        return self.model.score(micro, self.model.values, batch.response_shape)

    def rows(self, outline: Outline) -> list[Sequence[int]]:
        """The samples that each rank of the model's grid reads for their values."""
        return of_each_rank(self.model, plan_for(self.model, outline, self.micro_batch_tokens))

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
        result = self._value_loss({**micro.fields, "values": self.model.values(output, micro)})
        loss = self.algorithm.value_loss_coef * result.loss
        return loss, {**result.metrics, "loss": share(loss)}


def value_loss(algorithm: AlgorithmConfig) -> Callable[[Mapping[str, torch.Tensor]], LossOutput]:
    """The loss that the configuration names, with its options.

    Raises:
        ConfigError: there is none of this name, or it does not have these options.
    """
    loss = value_losses.get(algorithm.value_loss)
    own = {"clip_range": algorithm.value_clip_range} if "clip_range" in loss.options else {}
    options = {**own, **algorithm.value_loss_options}
    loss.check_options(options)
    return partial(loss, **options)


def heads_of(batch: RolloutBatch, model: MegatronModel) -> dict[str, torch.Tensor]:
    """Where each agent has a value head of its own: which one is a sample's, [B, 1]."""
    return {"heads": batch.agent_ids.unsqueeze(1)} if model.value_head > 1 else {}
