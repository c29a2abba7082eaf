"""An actor that is its own critic: one backbone, one forward pass for logits and values, one optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaverl.data.batch import RolloutBatch
from megaverl.workers.critic import fields_of_values, heads_of, last_and_values, value_loss, values_of
from megaverl.workers.megatron_model import MicroBatch
from megaverl.workers.micro_batches import micro_batches_for
from megaverl.workers.policy import Actor
from megaverl.workers.updates import Selection, Weighting, share

VALUES = "critic/"  # in front of the value loss's metrics


class ActorCritic(Actor):
    """The policy and its values, trained on the policy loss + `value_loss_coef` x the value loss.

    Of the metrics `loss` is the policy's part, and `critic/loss` the other.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._value_loss = value_loss(self.algorithm)
        self._value_weighting = Weighting("token_mean")

    def values(self, batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """As a critic's, out of one forward pass."""
        return values_of(self, batch)

    def log_probs_and_values(self, batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`log_probs`, and both of `values`, out of one forward pass."""

        def score(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            log_probs, _ = self.model.log_probs(logits, micro, temperature=self.temperature)
            padded = torch.nn.functional.pad(log_probs, (1, 0))
            return torch.stack([padded, last_and_values(self.model, logits, micro)], dim=-1)

        micro = micro_batches_for(self.model, batch, self.micro_batch_tokens, fields_of_values(batch, self))
        rows, columns = batch.response_shape
        both = self.model.score(micro, score, (rows, 1 + columns, 2))
        return both[:, 1:, 0].contiguous(), both[:, 1:, 1].contiguous(), both[:, 0, 1].contiguous()

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
        values, _ = self.model.values(logits, micro)
        result = self._value_loss({**micro.fields, "weights": micro.fields["value_weights"], "values": values})
        loss = self.algorithm.value_loss_coef * result.loss
        of_values = {f"{VALUES}{name}": value for name, value in result.metrics.items()}
        return policy + loss, {**metrics, **of_values, f"{VALUES}loss": share(loss)}
