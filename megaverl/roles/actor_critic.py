"""An actor that is its own critic: one backbone, one forward pass for logits and values, one optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaverl.data.batch import RolloutBatch
from megaverl.roles.critic import heads_of, value_loss
from megaverl.roles.megatron_model import MicroBatch
from megaverl.roles.micro_batches import micro_batches_for
from megaverl.roles.policy import Actor
from megaverl.roles.updates import Selection, Weighting, share

VALUES = "critic/"  # in front of the value loss's metrics


class ActorCritic(Actor):
    """The policy and its values, trained on the policy loss + `value_loss_coef` x the value loss.

    Of the metrics `loss` is the policy's part, and `critic/loss` the other.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._value_loss = value_loss(self.algorithm)
        self._value_weighting = Weighting("token_mean")

    def values(self, batch: RolloutBatch) -> torch.Tensor:
        """[B, R] float32: the value before each response token, the same on every rank."""
        micro = micro_batches_for(self.model, batch, self.micro_batch_tokens, heads_of(batch, self.model))
        return self.model.score(micro, self.model.values, batch.response_shape)

    def log_probs_and_values(self, batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """`log_probs` and `values` out of one forward pass."""

        def score(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            log_probs, _ = self.model.log_probs(logits, micro, temperature=self.temperature)
            return torch.stack([log_probs, self.model.values(logits, micro)], dim=-1)

        micro = micro_batches_for(self.model, batch, self.micro_batch_tokens, heads_of(batch, self.model))
        both = self.model.score(micro, score, (*batch.response_shape, 2))
        return both[..., 0].contiguous(), both[..., 1].contiguous()

    def _fields(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        own = {"old_values": batch.values, "returns": batch.returns, **heads_of(batch, self.model)}
        return super()._fields(batch) | own

    def _selection(self, batch: RolloutBatch) -> Selection:
        of_policy = super()._selection(batch)

        def select(mask: torch.Tensor, which: tuple[int, int, int]) -> Mapping[str, torch.Tensor]:
            chosen = of_policy(mask, which) if of_policy else {}
            return {**chosen, "value_weights": self._value_weighting.weights(mask)}

        return select

    def _loss(self, logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        policy, metrics = super()._loss(logits, micro)
        given = {**micro.fields, "weights": micro.fields["value_weights"], "values": self.model.values(logits, micro)}
        result = self._value_loss(given)
        loss = self.algorithm.value_loss_coef * result.loss
        of_values = {f"{VALUES}{name}": value for name, value in result.metrics.items()}
        return policy + loss, {**metrics, **of_values, f"{VALUES}loss": share(loss)}
