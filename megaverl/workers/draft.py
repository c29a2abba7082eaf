"""Draft model or head of speculative decoding, trained on the policy's own responses."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.models.packing import MicroBatch
from megaverl.workers.head_model import HeadModel
from megaverl.workers.hidden_states import observe
from megaverl.workers.micro_batches import (
    ModelWorker,
    Preparation,
    Weighting,
    run_updates,
    share,
)
from megaverl.workers.model import TrainingModel
from megaverl.workers.trainable import TrainableModel

# Weight of a step of a head, relative to the step before (EAGLE's published training
# code): a late draft counts only if all earlier ones are accepted.
DECAY = 0.8


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

    # Adds what the model reads besides tokens.
    _prepare: Preparation | None = None

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
            prepare=self._prepare,
        )

    def _loss(
        self, output: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        log_probs, _ = self.model.log_probs(output, micro, temperature=self.temperature)
        loss = -(micro.fields["weights"] * log_probs).sum()
        return loss, {"loss": share(loss)}


class HeadTrainer(DraftTrainer):
    """Head that learns to predict tokens from the policy's hidden states (arXiv 2503.01840, 2412.19437).

    As many steps are trained as the engine runs, each on the head's own state of the step before (training-time test).
    The loss is the mean over the steps of the loss of a draft model, step k with the weight 0.8^k. The policy's states
    are those of its newest weights, which the engine receives together with the head, and no gradient reaches them.

    Args:
        trainable: a `HeadModel`.
        actor: the policy, on a grid with the head's data- and tensor-parallel ranks.
    """

    def __init__(
        self,
        trainable: TrainableModel,
        algorithm: AlgorithmConfig,
        *,
        actor: TrainingModel,
        temperature: float,
        micro_batch_tokens: int,
        seed: int,
    ) -> None:
        super().__init__(
            trainable,
            algorithm,
            temperature=temperature,
            micro_batch_tokens=micro_batch_tokens,
            seed=seed,
        )
        assert isinstance(self.model, HeadModel)
        self.actor, layers = actor, self.model.head.aux_layers
        # Both models read the same rows.
        self.model.token_multiple = math.lcm(
            self.model.token_multiple, actor.token_multiple
        )
        self._prepare = lambda micro_batches: observe(actor, micro_batches, layers)

    def update(self, batch: RolloutBatch, *, step: int) -> dict[str, float]:
        assert isinstance(self.model, HeadModel)
        with self.model.output_of(self.actor):
            return super().update(batch, step=step)

    def _loss(
        self, output: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        weights, loss = micro.fields["weights"], output.new_zeros((), dtype=torch.float)
        scale = sum(DECAY**step for step in range(len(output)))
        for step, states in enumerate(output):
            # Step k at position i predicts token i + k + 2. Move its states to where a
            # language model predicts that token: position i + k + 1.
            log_probs, _ = self.model.log_probs(
                states.roll(1 + step, dims=1), micro, temperature=self.temperature
            )
            # The engine's first draft follows the first response token, and step k
            # predicts the token k later.
            learned = (weights * log_probs)[:, 1 + step :].sum()
            loss = loss - DECAY**step / scale * learned
        return loss, {"loss": share(loss)}
