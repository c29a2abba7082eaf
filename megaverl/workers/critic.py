"""The critic: the value of every response token, and its update; and an actor that is its own critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from megaverl.algorithms import LossOutput, value_losses
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.models.packing import MicroBatch
from megaverl.workers.micro_batches import MiniBatch, ModelWorker, Selection, Weighting, run_updates, share
from megaverl.workers.policy import Actor
from megaverl.workers.trainable import TrainableModel


class ValueWorker(ModelWorker):
    """A critic, or an actor that is its own."""

    algorithm: AlgorithmConfig

    def values(self, batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The values that advantages are made of, the same on every rank.

        Returns: [B, R] float32, before each response token; [B] float32, after each response that was cut off
            (`cut_off`), 0 after the others.
        """
        rows, columns = batch.response_shape
        both = self.score(batch, self._last_and_values, (rows, 1 + columns), self._fields_of_values(batch))
        return both[:, 1:].contiguous(), both[:, 0].contiguous()

    def _fields_of_values(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        """What `_last_and_values` reads of the samples."""
        cut = cut_off(batch) if self.algorithm.bootstrap_truncated else torch.zeros(len(batch))
        return {**self._heads(batch), "cut_off": cut.float().unsqueeze(1)}

    def _heads(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        """Where each agent has a value head of its own: which one is a sample's, [B, 1]."""
        return {"heads": batch.agent_ids.unsqueeze(1)} if self.model.value_head > 1 else {}

    def _last_and_values(self, output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """[n, 1 + r]: the value after each response that was cut off, 0 after others; then those before each token."""
        values, after = self.model.values(output, micro)
        # a row that only fills up has no response
        cut = micro.fields["cut_off"].sum(dim=1) * (micro.response_lengths > 0)
        return torch.cat([after.where(cut > 0, 0.0).unsqueeze(1), values], dim=1)


class Critic(ValueWorker):
    """A backbone with a value head, trained towards the returns."""

    def __init__(
        self, trainable: TrainableModel, algorithm: AlgorithmConfig, *, micro_batch_tokens: int, seed: int
    ) -> None:
        super().__init__(trainable.model, micro_batch_tokens=micro_batch_tokens)
        self.trainable, self.algorithm, self.seed = trainable, algorithm, seed
        self._value_loss = value_loss(algorithm)

    def update(self, batch: RolloutBatch, *, step: int) -> dict[str, float]:
        """Take all updates of one step towards `returns`; `values` are the old ones. Returns metrics."""
        fields = {"old_values": batch.values, "returns": batch.returns, **self._heads(batch)}
        return run_updates(self, batch, self._loss, weighting=Weighting("token_mean"), fields=fields, step=step)

    def _loss(self, output: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        values, _ = self.model.values(output, micro)
        result = self._value_loss({**micro.fields, "values": values})
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


def cut_off(batch: RolloutBatch) -> torch.Tensor:
    """[B] bool: the responses that the length limit ended. One whose `finish_reason` is not known here has ended.

    Their episodes are not over: what would have followed is worth what the critic says of the state after their last
    token (partial-episode bootstrapping, arXiv 1712.00378).
    """
    reasons = batch.columns.get("finish_reason", [None] * len(batch))
    return torch.tensor([reason == "length" for reason in reasons], dtype=torch.bool)


VALUES = "critic/"  # in front of the value loss's metrics


class ActorCritic(Actor, ValueWorker):
    """The policy and its values, trained on the policy loss + `value_loss_coef` x the value loss.

    Of the metrics `loss` is the policy's part, and `critic/loss` the other.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._value_loss = value_loss(self.algorithm)
        self._value_weighting = Weighting("token_mean")

    def log_probs_and_values(self, batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`log_probs`, and both of `values`, out of one forward pass."""

        def score(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            log_probs, _ = self.model.log_probs(logits, micro, temperature=self.temperature)
            padded = torch.nn.functional.pad(log_probs, (1, 0))
            return torch.stack([padded, self._last_and_values(logits, micro)], dim=-1)

        rows, columns = batch.response_shape
        both = self.score(batch, score, (rows, 1 + columns, 2), self._fields_of_values(batch))
        return both[:, 1:, 0].contiguous(), both[:, 1:, 1].contiguous(), both[:, 0, 1].contiguous()

    def _fields(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        own = {"old_values": batch.values, "returns": batch.returns, **self._heads(batch)}
        return super()._fields(batch) | own

    def _selection(self, batch: RolloutBatch) -> Selection:
        of_policy = super()._selection(batch)

        def select(mini: MiniBatch) -> Mapping[str, torch.Tensor]:
            chosen = of_policy(mini) if of_policy else {}
            return {**chosen, "value_weights": self._value_weighting.weights(mini.mask, mini.denominators)}

        return select

    def _loss(self, logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        policy, metrics = super()._loss(logits, micro)
        values, _ = self.model.values(logits, micro)
        result = self._value_loss({**micro.fields, "weights": micro.fields["value_weights"], "values": values})
        loss = self.algorithm.value_loss_coef * result.loss
        of_values = {f"{VALUES}{name}": value for name, value in result.metrics.items()}
        return policy + loss, {**metrics, **of_values, f"{VALUES}loss": share(loss)}
