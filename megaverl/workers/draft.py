"""Draft model of speculative decoding, trained on the policy's own responses."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.models.packing import MicroBatch
from megaverl.workers.micro_batches import ModelWorker, Weighting, run_updates, share
from megaverl.workers.trainable import TrainableModel


class DraftTrainer(ModelWorker):
    """Small language model that learns to predict the tokens which the policy generates.

    The loss is the mean of -log q(y_t | x, y_<t) over the generated tokens. They are drawn from
    the policy p, so the gradient is that of the mean KL(p || q) in expectation: distillation on
    the policy's own samples, without a second forward pass of the policy. The engine accepts
    the draft token of q with probability min(1, p / q) (arXiv 2211.17192), which grows as q
    approaches p.

    Args:
        temperature: of the rollout. The policy's tokens are drawn at this temperature, at which q is compared.
        micro_batch_tokens: token limit of a micro-batch.
        seed: of the division into mini-batches.

    Attributes:
        algorithm: number of epochs and mini-batches, which are the actor's.
    """

    def __init__(
        self,
        trainable: TrainableModel,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        micro_batch_tokens: int,
        seed: int,
    ) -> None:
        super().__init__(trainable.model, micro_batch_tokens=micro_batch_tokens)
        self.trainable, self.algorithm, self.seed = trainable, algorithm, seed
        self.temperature = temperature

    def update(self, batch: RolloutBatch, *, step: int) -> dict[str, float]:
        """Take all updates of one step on the generated tokens. Collective over the role's ranks.

        Returns:
            `loss`, the mean cross-entropy in nats per token before each update, and the metrics of `run_updates`.
        """
        return run_updates(
            self,
            batch,
            self._loss,
            weighting=Weighting("token_mean"),
            fields={},
            step=step,
        )

    def _loss(
        self, logits: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        log_probs, _ = self.model.log_probs(logits, micro, temperature=self.temperature)
        loss = -(micro.fields["weights"] * log_probs).sum()
        return loss, {"loss": share(loss)}
