"""Critic workers: values of response tokens and their update, with a separate critic or one shared with the actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from megaverl.algorithms import LossOutput, value_losses
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.models.packing import MicroBatch
from megaverl.workers.micro_batches import (
    MiniBatch,
    ModelWorker,
    Selection,
    Weighting,
    run_updates,
    share,
)
from megaverl.workers.policy import Actor
from megaverl.workers.trainable import TrainableModel


class ValueWorker(ModelWorker):
    """Base of workers that compute values: a critic, or an actor with a value head."""

    algorithm: AlgorithmConfig

    def values(self, batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the values that advantages are based on, identical on every rank.

        Returns:
            [B, R] float32 values before each response token, and [B] float32 values after each truncated response
            (`cut_off`), 0 after the others.
        """
        # [B, 1 + R]: column 0 is the value after a truncated response, so that both
        # results need one forward pass.
        rows, columns = batch.response_shape
        both = self.score(
            batch,
            self._last_and_values,
            (rows, 1 + columns),
            self._fields_of_values(batch),
        )
        return both[:, 1:].contiguous(), both[:, 0].contiguous()

    def _fields_of_values(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        """Return the fields that `_last_and_values` reads."""
        # Fields of micro-batches are tensors, so `cut_off` travels as float32 [B, 1].
        cut = (
            cut_off(batch)
            if self.algorithm.bootstrap_truncated
            else torch.zeros(len(batch))
        )
        return {**self._heads(batch), "cut_off": cut.float().unsqueeze(1)}

    def _heads(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        """Return the value head of each sample, [B, 1], if every agent has its own head."""
        return (
            {"heads": batch.agent_ids.unsqueeze(1)} if self.model.value_head > 1 else {}
        )

    def _last_and_values(self, output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """Return [n, 1 + r]: the value after each truncated response, then the values before each token.

        The first is 0 for responses that were not truncated.
        """
        values, after = self.model.values(output, micro)
        # Padding rows repeat row 0 of the batch, which may be truncated.
        # A padding row has no response.
        cut = micro.fields["cut_off"].sum(dim=1) * (micro.response_lengths > 0)
        return torch.cat([after.where(cut > 0, 0.0).unsqueeze(1), values], dim=1)


class Critic(ValueWorker):
    """Backbone with a value head, trained towards the returns."""

    def __init__(
        self,
        trainable: TrainableModel,
        algorithm: AlgorithmConfig,
        *,
        micro_batch_tokens: int,
        seed: int,
    ) -> None:
        super().__init__(trainable.model, micro_batch_tokens=micro_batch_tokens)
        self.trainable, self.algorithm, self.seed = trainable, algorithm, seed
        self._value_loss = value_loss(algorithm)

    def update(self, batch: RolloutBatch, *, step: int) -> dict[str, float]:
        """Take all updates of one step towards `returns`, with `values` as the old values, and return metrics."""
        fields = {
            "old_values": batch.values,
            "returns": batch.returns,
            **self._heads(batch),
        }
        return run_updates(
            self,
            batch,
            self._loss,
            weighting=Weighting("token_mean"),
            fields=fields,
            step=step,
        )

    def _loss(
        self, output: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        values, _ = self.model.values(output, micro)
        # The loss reads everything from one mapping: old values, returns, weights and
        # the new values.
        result = self._value_loss({**micro.fields, "values": values})
        loss = self.algorithm.value_loss_coef * result.loss
        return loss, {**result.metrics, "loss": share(loss)}


def value_loss(
    algorithm: AlgorithmConfig,
) -> Callable[[Mapping[str, torch.Tensor]], LossOutput]:
    """Return the configured value loss with its options bound.

    Raises:
        ConfigError: no loss has this name, or the loss does not have these options.
    """
    loss = value_losses.get(algorithm.value_loss)
    clip_option = (
        {"clip_range": algorithm.value_clip_range}
        if "clip_range" in loss.options
        else {}
    )
    options = {**clip_option, **algorithm.value_loss_options}
    loss.check_options(options)
    return partial(loss, **options)


def cut_off(batch: RolloutBatch) -> torch.Tensor:
    """Return a [B] bool mask of the responses that ended at the length limit.

    Such an episode is not over, so the critic's value of the state after its last token
    stands for the missing rest (partial-episode bootstrapping, arXiv 1712.00378). A
    response with an unknown `finish_reason` counts as finished.
    """
    reasons = batch.columns.get("finish_reason", [None] * len(batch))
    return torch.tensor([reason == "length" for reason in reasons], dtype=torch.bool)


VALUES = "critic/"  # prefix of the value loss's metrics


class ActorCritic(Actor, ValueWorker):
    """Policy with a value head, trained on policy loss + `value_loss_coef` x value loss.

    The metric `loss` is the policy's part; `critic/loss` is the value part.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._value_loss = value_loss(self.algorithm)
        self._value_weighting = Weighting("token_mean")

    def log_probs_and_values(
        self, batch: RolloutBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `log_probs` and both results of `values`, from one forward pass."""

        def score(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            log_probs, _ = self.model.log_probs(
                logits, micro, temperature=self.temperature
            )
            # Log-probs get a leading column, so that both results have the same shape
            # [b, 1 + r].
            padded = torch.nn.functional.pad(log_probs, (1, 0))
            return torch.stack([padded, self._last_and_values(logits, micro)], dim=-1)

        rows, columns = batch.response_shape
        both = self.score(
            batch, score, (rows, 1 + columns, 2), self._fields_of_values(batch)
        )
        return (
            both[:, 1:, 0].contiguous(),
            both[:, 1:, 1].contiguous(),
            both[:, 0, 1].contiguous(),
        )

    def _fields(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        value_fields = {
            "old_values": batch.values,
            "returns": batch.returns,
            **self._heads(batch),
        }
        return super()._fields(batch) | value_fields

    def _selection(self, batch: RolloutBatch) -> Selection:
        of_policy = super()._selection(batch)

        def select(mini: MiniBatch) -> Mapping[str, torch.Tensor]:
            chosen = of_policy(mini) if of_policy else {}
            return {
                # The policy may aggregate differently, so the value loss has token
                # weights of its own.
                **chosen,
                "value_weights": self._value_weighting.weights(
                    mini.mask, mini.denominators
                ),
            }

        return select

    def _loss(
        self, logits: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        policy, metrics = super()._loss(logits, micro)
        values, _ = self.model.values(logits, micro)
        result = self._value_loss(
            {**micro.fields, "weights": micro.fields["value_weights"], "values": values}
        )
        loss = self.algorithm.value_loss_coef * result.loss
        of_values = {f"{VALUES}{name}": value for name, value in result.metrics.items()}
        return policy + loss, {**metrics, **of_values, f"{VALUES}loss": share(loss)}
