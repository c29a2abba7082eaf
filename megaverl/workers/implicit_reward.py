"""PRIME's reward model: a language model that is trained on outcomes, and whose log-probs are rewards of tokens.

arXiv 2502.01456: r_t = beta log(phi(y_t) / reference(y_t)), phi trained online by cross-entropy of sigmoid(sum r_t) on
whether the response is right.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megaverl.algorithms import implicit_rewards, outcome_cross_entropy
from megaverl.data.batch import RolloutBatch
from megaverl.workers.megatron_model import MicroBatch
from megaverl.workers.micro_batches import micro_batches_for
from megaverl.workers.pairs import as_metrics, column
from megaverl.workers.policy import Policy
from megaverl.workers.trainable import TrainableModel
from megaverl.workers.updates import share


class ImplicitRewardModel(Policy):
    """phi, which begins as the policy does.

    Args:
        beta: of the rewards.
    """

    def __init__(self, trainable: TrainableModel, *, temperature: float, micro_batch_tokens: int, beta: float) -> None:
        super().__init__(trainable.model, temperature=temperature, micro_batch_tokens=micro_batch_tokens)
        self.trainable, self.beta = trainable, beta

    def rewards(self, batch: RolloutBatch, ref_log_probs: torch.Tensor) -> torch.Tensor:
        """[B, R] float32: the reward of every response token, the same on every rank."""
        return implicit_rewards(self.log_probs(batch), ref_log_probs, beta=self.beta)

    def update(self, batch: RolloutBatch, ref_log_probs: torch.Tensor, correct: torch.Tensor) -> dict[str, float]:
        """One optimizer step on all responses; every rank takes part.

        Args: ref_log_probs: [B, R]. correct: [B] bool.
        """
        weights = torch.full((len(batch), 1), 1.0 / max(len(batch), 1))
        fields = {
            "ref_log_probs": ref_log_probs,
            "own": batch.response_mask,
            "correct": correct.float().unsqueeze(1),
            "weights": weights,
        }
        micro = micro_batches_for(self.model, batch, self.micro_batch_tokens, fields)
        return as_metrics(self.trainable.update(micro, self._loss))

    def _loss(self, logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        log_probs, _ = self.model.log_probs(logits, micro, temperature=self.temperature)
        result = outcome_cross_entropy(
            log_probs,
            micro.fields["ref_log_probs"],
            column(micro, "correct"),
            micro.fields["own"],
            column(micro, "weights"),
            beta=self.beta,
        )
        return result.loss, {**result.metrics, "loss": share(result.loss)}
