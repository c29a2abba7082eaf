"""The policy: log-probs of responses, and its update by a policy loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from megaverl.algorithms import (
    Correction,
    Entry,
    LossOutput,
    combine,
    corrections,
    distillation_loss,
    entropy_sum,
    kl_loss,
    policy_losses,
    score_norms,
    token_selectors,
)
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.prefix_packing import SequenceLengths
from megaverl.rollout.seeds import sample_seed
from megaverl.workers.log_prob_difference import LogProbDifference
from megaverl.workers.megatron_model import MegatronModel, MicroBatch
from megaverl.workers.micro_batches import micro_batches_for, of_each_rank, plan_for
from megaverl.workers.teacher import Teacher
from megaverl.workers.trainable import TrainableModel
from megaverl.workers.updates import Selection, Weighting, run_updates, share


class Policy:
    """A language model that scores responses: the reference, and what the actor builds on.

    Args:
        temperature: of the rollout; log-probs are of the distribution that was sampled from.
        micro_batch_tokens: the cap of a micro-batch.
        with_adapters: False: what the model's own weights say, though it has adapters that are trained.
    """

    def __init__(
        self, model: MegatronModel, *, temperature: float, micro_batch_tokens: int, with_adapters: bool = True
    ) -> None:
        self.model, self.temperature, self.micro_batch_tokens = model, temperature, micro_batch_tokens
        self._with_adapters = with_adapters

    def log_probs(self, batch: RolloutBatch) -> torch.Tensor:
        """[B, R] float32 log-probs of the response tokens, the same on every rank."""

        def score(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            return self.model.log_probs(logits, micro, temperature=self.temperature)[0]

        micro = micro_batches_for(self.model, batch, self.micro_batch_tokens)
        with nullcontext() if self._with_adapters else self.model.without_adapters():
            return self.model.score(micro, score, batch.response_shape)

    def rows(self, outline: SequenceLengths) -> list[Sequence[int]]:
        """The samples that each rank of the model's grid reads to score a batch."""
        return of_each_rank(self.model, plan_for(self.model, outline, self.micro_batch_tokens))

    def untempered(self) -> Policy:
        """The same model, whose log-probs are of its own distribution: at temperature 1."""
        cap, adapters = self.micro_batch_tokens, self._with_adapters
        return Policy(self.model, temperature=1.0, micro_batch_tokens=cap, with_adapters=adapters)

    def score_norms(self, batch: RolloutBatch) -> torch.Tensor:
        """[B, R] float32: the squared gradient of each response token's log-prob by its logits, on every rank."""

        def score(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            norms = score_norms(*self.model.squared_probs(logits, micro, temperature=self.temperature))
            return norms.masked_fill(~micro.response_mask, 0.0)

        micro = micro_batches_for(self.model, batch, self.micro_batch_tokens)
        return self.model.score(micro, score, batch.response_shape)


class Actor(Policy):
    """The policy that is trained.

    Attributes:
        teacher: whose distributions it learns as well, if `algorithm.distillation` says so.
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
        super().__init__(trainable.model, temperature=temperature, micro_batch_tokens=micro_batch_tokens)
        self.trainable, self.algorithm, self.seed = trainable, algorithm, seed
        self._policy_loss = policy_losses.get(algorithm.policy_loss_name)
        selects = "selected" in self._policy_loss.inputs
        self._selector = token_selectors.get(algorithm.token_selector_name) if selects else None
        self._weighting = Weighting(algorithm.aggregation_name, max_tokens=algorithm.loss_length)
        self._correction = rollout_correction(algorithm)
        self.teacher: Teacher | None = None
        self._kl_coef = 0.0
        self._differences = LogProbDifference()

    @property
    def is_on_policy(self) -> bool:
        """One optimizer step per batch: the policy being updated is the one that the old log-probs are of."""
        return self.algorithm.num_epochs == 1 and self.algorithm.num_mini_batches == 1

    def update(self, batch: RolloutBatch, *, step: int, kl_coef: float = 0.0) -> dict[str, float]:
        """Take all updates of one step; every rank takes part.

        Args:
            batch: holds `advantages` and `rollout_log_probs`, and `ref_log_probs` for a KL loss. Without
                `old_log_probs` the update must be on-policy; they are then this forward pass's own.
            kl_coef: of the KL loss, if there is one.

        Returns:
            Metrics; without old log-probs those of `DifferenceStats` among them.
        """
        self._kl_coef, self._differences = kl_coef, LogProbDifference()
        with self.teacher.model.resident if self.teacher else nullcontext():
            metrics = run_updates(
                self.trainable,
                batch,
                self._loss,
                algorithm=self.algorithm,
                weighting=self._weighting,
                fields=self._fields(batch),
                micro_batch_tokens=self.micro_batch_tokens,
                seed=self.seed,
                step=step,
                select=self._selection(batch),
                prepare=self.teacher.attend if self.teacher else None,
            )
        if "old_log_probs" not in batch:
            metrics |= self._differences.over_ranks(self.model.grid.world).stats().metrics()
        return metrics

    def _fields(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        """What the loss needs of a sample."""
        names = ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs")
        return {name: batch[name] for name in names if name in batch}

    def _selection(self, batch: RolloutBatch) -> Selection | None:
        """What the loss needs of a whole mini-batch."""
        return partial(self._select, batch) if self._selector else None

    def _select(
        self, batch: RolloutBatch, mask: torch.Tensor, which: tuple[int, int, int]
    ) -> Mapping[str, torch.Tensor]:
        """The tokens that the loss treats apart, out of a whole mini-batch; the same on every rank."""
        assert self._selector is not None
        step, epoch, number = which
        seed = sample_seed(self.seed, step, epoch * self.algorithm.num_mini_batches + number, "token_selector")
        inputs = {
            "log_probs": batch.tensors.get("old_log_probs", batch.rollout_log_probs),
            "advantages": batch.advantages,
            "response_mask": mask,
            "draws": torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)),
        }
        own = {name: v for name, v in self.algorithm.policy_loss_options.items() if name in self._selector.options}
        return {"selected": self._selector(inputs, **own)}

    def _loss(self, logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        algorithm, fields = self.algorithm, micro.fields
        with_entropy = algorithm.entropy_coef > 0
        log_probs, entropies = self.model.log_probs(
            logits, micro, temperature=self.temperature, with_entropy=with_entropy
        )
        weights = fields["weights"]
        inputs = {"old_log_probs": log_probs.detach(), **fields, "log_probs": log_probs}
        corrected: Mapping[str, torch.Tensor] = {}
        if self._correction is not None:
            entry, limits = self._correction
            factors, corrected = entry({**inputs, "response_mask": weights != 0}, **limits)
            inputs["advantages"] = inputs["advantages"] * factors
        policy = self._policy_loss(inputs, **policy_loss_options(self._policy_loss, algorithm))
        terms: list[tuple[float, LossOutput]] = [(1.0, policy)]
        if algorithm.kl.place == "loss":
            kl = algorithm.kl
            reference = fields["ref_log_probs"]
            penalty = kl_loss(log_probs, reference, weights, kind=kl.kind_name, straight_through=kl.straight_through)
            terms.append((self._kl_coef, penalty))
        if with_entropy:
            terms.append((-algorithm.entropy_coef, entropy_sum(entropies, weights)))
        if self.teacher is not None:
            apart = self.teacher.divergence(self.model, logits, micro)
            terms.append((algorithm.distillation.coef, distillation_loss(apart, weights)))
        total = combine(*terms)
        metrics = {**total.metrics, **corrected, "loss": share(total.loss)}
        if "old_log_probs" not in fields and self.model.reports:  # each sample's once, on last stages alone
            self._differences.add(log_probs, fields["rollout_log_probs"], weights != 0)
        return total.loss, metrics


def policy_loss_options(loss: Entry[LossOutput], algorithm: AlgorithmConfig) -> dict[str, Any]:
    """What the configuration sets of the loss's options; what it leaves out keeps the function's default."""
    options: dict[str, Any] = dict(algorithm.preset_loss_options)
    if algorithm.clip_range is not None:
        options |= {"clip_low": algorithm.clip_range, "clip_high": algorithm.clip_range}
    if algorithm.clip_range_high is not None:
        options["clip_high"] = algorithm.clip_range_high
    given = algorithm.policy_loss_options.items()
    return options | {name: value for name, value in given if name in loss.options}


def rollout_correction(algorithm: AlgorithmConfig) -> tuple[Entry[Correction], dict[str, float]] | None:
    """The correction that the configuration names, with its limits; None without one."""
    given = algorithm.correction
    if given.kind == "none":
        return None
    limits = {"low": given.low, "high": given.high}
    return corrections.get(given.kind), {name: limit for name, limit in limits.items() if limit is not None}
