"""Policy workers: log-probs of responses, and the actor's update by a policy loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from megaverl.algorithms import (
    AdaptiveEntropy,
    Correction,
    Entry,
    LossOutput,
    combine,
    combined,
    corrections,
    distillation_loss,
    entropy_sum,
    highest_entropies,
    kl_loss,
    likelihood_sum,
    policy_losses,
    score_norms,
    token_selectors,
)
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.models.packing import MicroBatch
from megaverl.rollout import sample_seed
from megaverl.workers.log_prob_check import LogProbDifference
from megaverl.workers.micro_batches import (
    MiniBatch,
    ModelWorker,
    Selection,
    Weighting,
    run_updates,
    share,
)
from megaverl.workers.model import TrainingModel
from megaverl.workers.teacher import Teacher
from megaverl.workers.trainable import TrainableModel


class Policy(ModelWorker):
    """Language model that scores responses: the reference, and the base class of the actor.

    Args:
        temperature: of the rollout. Log-probs refer to the distribution that was sampled from.
        micro_batch_tokens: token limit of a micro-batch.
        with_adapters: False: compute with the model's own weights, without its trained adapters.
        replays: see `ModelWorker`.
    """

    def __init__(
        self,
        model: TrainingModel,
        *,
        temperature: float,
        micro_batch_tokens: int,
        with_adapters: bool = True,
        replays: bool = False,
    ) -> None:
        super().__init__(model, micro_batch_tokens=micro_batch_tokens, replays=replays)
        self.temperature, self._with_adapters = temperature, with_adapters

    def log_probs(self, batch: RolloutBatch) -> torch.Tensor:
        """Return log-probs of the response tokens, [B, R] float32, identical on every rank."""

        def score(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            return self.model.log_probs(logits, micro, temperature=self.temperature)[0]

        # Without adapters, the trained model computes as its own reference.
        with nullcontext() if self._with_adapters else self.model.without_adapters():
            return self.score(batch, score, batch.response_shape)

    def report(self) -> dict[str, float]:
        """Return metrics of the log-probs since the last call, identical on every rank."""
        return {}

    def untempered(self) -> Policy:
        """Return a policy of the same model at temperature 1."""
        cap, adapters = self.micro_batch_tokens, self._with_adapters
        return Policy(
            self.model, temperature=1.0, micro_batch_tokens=cap, with_adapters=adapters
        )

    def entropies(self, batch: RolloutBatch) -> torch.Tensor:
        """Return the entropy of the distribution of each response token, [B, R] float32, identical on every rank."""

        def score(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            return self.model.log_probs(
                logits, micro, temperature=self.temperature, with_entropy=True
            )[1]

        return self.score(batch, score, batch.response_shape)

    def score_norms(self, batch: RolloutBatch) -> torch.Tensor:
        """Return the squared gradient norm of each response token's log-prob with respect to its logits.

        The result is [B, R] float32, identical on every rank.
        """

        def score(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            norms = score_norms(
                *self.model.squared_probs(logits, micro, temperature=self.temperature)
            )
            return norms.masked_fill(~micro.response_mask, 0.0)

        return self.score(batch, score, batch.response_shape)


class Actor(Policy):
    """The policy being trained.

    Args:
        router_replay: the value of `actor.router_replay`.

    Attributes:
        teacher: model whose distributions the actor learns too, if `algorithm.distillation` is configured.
        entropy: controller of the entropy bonus weight, if `algorithm.entropy_target` is set.
    """

    def __init__(
        self,
        trainable: TrainableModel,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        micro_batch_tokens: int,
        seed: int,
        router_replay: str = "off",
    ) -> None:
        super().__init__(
            trainable.model,
            temperature=temperature,
            micro_batch_tokens=micro_batch_tokens,
            replays=router_replay != "off",
        )
        self._update_replays = router_replay == "update"
        self.trainable, self.algorithm, self.seed = trainable, algorithm, seed
        self._policy_loss = policy_losses.get(algorithm.policy_loss_name)
        selects = "selected" in self._policy_loss.inputs
        self._selector = (
            token_selectors.get(algorithm.token_selector_name) if selects else None
        )
        self._weighting = Weighting(
            algorithm.aggregation_name, max_tokens=algorithm.loss_length
        )
        self._corrections = rollout_corrections(algorithm)
        target, step = algorithm.entropy_target, algorithm.entropy_step
        self.entropy = (
            None
            if target is None
            else AdaptiveEntropy(algorithm.entropy_coef, target, step)
        )
        self.teacher: Teacher | None = None
        self._kl_coef = 0.0
        # [2, b, r] of each micro-batch: difference to the engine's log-prob, and 1.0
        # where there is a token.
        self._differences: list[torch.Tensor] = []

    @property
    def is_on_policy(self) -> bool:
        """Return whether a batch gets a single optimizer step.

        The updated policy is then the one that the old log-probs belong to.
        """
        return self.algorithm.num_epochs == 1 and self.algorithm.num_mini_batches == 1

    def update(
        self, batch: RolloutBatch, *, step: int, kl_coef: float = 0.0
    ) -> dict[str, float]:
        """Take all updates of one step. Collective over the role's ranks.

        Args:
            batch: holds `advantages` and `rollout_log_probs`, and `ref_log_probs` for a KL loss. Without
                `old_log_probs` the update must be on-policy, and the log-probs of its own forward pass are used.
            kl_coef: coefficient of the KL loss.

        Returns:
            Metrics. Without old log-probs they include those of `DifferenceStats`.
        """
        # Collected over the updates and read once at the end.
        self._kl_coef, self._differences = kl_coef, []
        # The teacher's forward passes run between the updates, so its weights stay on
        # the device for all of them.
        with self.teacher.model.on_device if self.teacher else nullcontext():
            metrics = run_updates(
                self,
                batch,
                self._loss,
                weighting=self._weighting,
                fields=self._fields(batch),
                step=step,
                select=self._selection(batch),
                prepare=self.teacher.attend if self.teacher else None,
                replays=self._update_replays,
            )
        if self.entropy is not None:
            metrics["entropy_coef"] = self.entropy.update(metrics["entropy"])
        metrics |= self.model.router_metrics()
        # An on-policy update has no separate pass for old log-probs, so the comparison
        # with the engine is made from its own.
        if "old_log_probs" not in batch:
            metrics |= (
                self._difference().over_ranks(self.model.grid.world).stats().metrics()
            )
        return metrics

    def _difference(self) -> LogProbDifference:
        """Return the difference to the engine's log-probs over this rank's samples.

        All micro-batches are copied from the device at once, after the last update, to
        avoid blocking copies in between.
        """
        # Cleared before the copy, so that the device memory is free for the next step.
        total, held, self._differences = LogProbDifference(), self._differences, []
        flat = (
            torch.cat([pair.flatten() for pair in held]).cpu()
            if held
            else torch.empty(0)
        )
        for pair, values in zip(
            held, flat.split([pair.numel() for pair in held]), strict=True
        ):
            difference, mask = values.view(pair.shape)
            total.add(difference, mask != 0)
        return total

    def _fields(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        """Return the fields that the loss needs of each sample."""
        names = ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs")
        return {name: batch[name] for name in names if name in batch}

    def _selection(self, batch: RolloutBatch) -> Selection | None:
        """Return the function that computes the loss's inputs of a whole mini-batch, or None if it needs none."""
        # One forward pass before the updates, over all samples of the step.
        if self.algorithm.top_entropy is not None:
            batch = batch.with_(entropies=self.entropies(batch).cpu())
        looks = (
            self._selector is not None
            or "entropies" in batch
            or self.algorithm.positive_coef > 0
        )
        return partial(self._select, batch) if looks else None

    def _select(
        self, batch: RolloutBatch, mini: MiniBatch
    ) -> Mapping[str, torch.Tensor]:
        """Return masks of the tokens that the loss treats specially in a mini-batch, identical on every rank."""
        selectors, algorithm = {}, self.algorithm
        if algorithm.top_entropy is not None:
            selectors["trains"] = highest_entropies(
                batch.entropies, mini.mask, fraction=algorithm.top_entropy
            )
        if algorithm.positive_coef:
            positive = mini.mask & batch.desirable.unsqueeze(1)
            # Normalised by its own count, so that the coefficient does not depend on
            # how many responses are right.
            selectors["positive"] = positive / positive.sum().clamp(min=1)
        if self._selector is None:
            return selectors
        (step, epoch, number), mask = mini.number, mini.mask
        # Every rank draws the same numbers, so all of them select the same tokens.
        seed = sample_seed(
            self.seed,
            step,
            epoch * self.algorithm.num_mini_batches + number,
            "token_selector",
        )
        inputs = {
            "log_probs": batch.tensors.get(
                "old_log_probs", batch.rollout_log_probs
            ).cpu(),
            "advantages": batch.advantages.cpu(),
            "response_mask": mask,
            "draws": torch.rand(
                mask.shape, generator=torch.Generator().manual_seed(seed)
            ),
        }
        selector_options = {
            name: v
            for name, v in self.algorithm.policy_loss_options.items()
            if name in self._selector.options
        }
        return {**selectors, "selected": self._selector(inputs, **selector_options)}

    def _loss(
        self, logits: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        algorithm, fields = self.algorithm, micro.fields
        with_entropy = algorithm.entropy_coef > 0 or self.entropy is not None
        log_probs, entropies = self.model.log_probs(
            logits, micro, temperature=self.temperature, with_entropy=with_entropy
        )
        weights = fields["weights"]
        # On-policy updates have no field `old_log_probs`: the ratio is then 1 and only
        # its gradient matters.
        inputs = {"old_log_probs": log_probs.detach(), **fields, "log_probs": log_probs}
        corrected: Mapping[str, torch.Tensor] = {}
        # Corrections come first: they may change the advantages that the loss reads.
        if self._corrections:
            corrected = self._correct(inputs)
        if "trains" in fields:
            self._train_only(fields["trains"], inputs)
        policy = self._policy_loss(
            inputs, **policy_loss_options(self._policy_loss, algorithm)
        )
        # (coefficient, term): added up in this order.
        terms: list[tuple[float, LossOutput]] = [(1.0, policy)]
        if algorithm.kl.place == "loss":
            kl = algorithm.kl
            reference = fields["ref_log_probs"]
            old = inputs["old_log_probs"]
            penalty = kl_loss(
                log_probs,
                reference,
                weights,
                old,
                kind=kl.kind_name,
                gradient=kl.gradient,
            )
            terms.append((self._kl_coef, penalty))
        if with_entropy:
            coef = (
                algorithm.entropy_coef if self.entropy is None else self.entropy.weight
            )
            terms.append((-coef, entropy_sum(entropies, weights)))
        if "positive" in fields:
            terms.append(
                (algorithm.positive_coef, likelihood_sum(log_probs, fields["positive"]))
            )
        if self.teacher is not None:
            divergence = self.teacher.divergence(self.model, logits, micro)
            terms.append(
                (algorithm.distillation.coef, distillation_loss(divergence, weights))
            )
        total = combine(*terms)
        metrics = {**total.metrics, **corrected, "loss": share(total.loss)}
        if (
            "old_log_probs" not in fields and self.model.reports
            # Only last stages add differences, so that each sample counts once.
        ):
            difference = log_probs.detach() - fields["rollout_log_probs"]
            self._differences.append(
                torch.stack([difference, (weights != 0).to(difference.dtype)])
            )
        return total.loss, metrics

    def _correct(self, inputs: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Add the corrections to the inputs of the policy loss, and return their metrics.

        A loss that declares `correction_factors` or `importance_weights` applies them
        itself. Otherwise they multiply the advantages. See `algorithms.policy_losses`.
        """
        mask = inputs["weights"] != 0
        masked_inputs = {**inputs, "response_mask": mask}
        parts = [
            (entry.name, entry(masked_inputs, **options))
            for entry, options in self._corrections
        ]
        # Factors of single tokens are passed on separately if the loss applies them
        # itself.
        passed_separately = (
            OF_SINGLE_TOKENS if self._reads("importance_weights") else ()
        )
        weighing = [part for name, part in parts if name in passed_separately]
        multiplied = [part for name, part in parts if name not in passed_separately]
        if weighing:
            inputs["importance_weights"] = _product(weighing, mask).factors
        if multiplied and self._reads("correction_factors"):
            inputs["correction_factors"] = _product(multiplied, mask).factors
        elif multiplied:
            inputs["advantages"] = (
                inputs["advantages"] * _product(multiplied, mask).factors
            )
        return _product([part for _, part in parts], mask).metrics

    def _train_only(
        self, trained: torch.Tensor, inputs: dict[str, torch.Tensor]
    ) -> None:
        """Restrict the policy loss's gradient to the tokens in `trained`, a [b, r] bool mask.

        The rest of the loss must not see the selection: ratios, means and baselines of
        responses use all tokens.
        """
        inputs["log_probs"] = torch.where(
            trained, inputs["log_probs"], inputs["log_probs"].detach()
        )
        if self._reads("trained_tokens"):
            inputs["trained_tokens"] = trained
        else:
            # The value of the loss then covers only the trained tokens. A product is
            # used because it lets a non-finite advantage reach the loss, which
            # torch.where would hide.
            inputs["advantages"] = inputs["advantages"] * trained
        if "selected" in inputs:
            inputs["selected"] = inputs["selected"] & trained

    def _reads(self, name: str) -> bool:
        """Return whether the policy loss declares this input."""
        return name in (*self._policy_loss.inputs, *self._policy_loss.optional_inputs)


# Corrections that weight each token by its own ratio.
OF_SINGLE_TOKENS = ("token_truncate", "token_mask")


def _product(parts: list[Correction], mask: torch.Tensor) -> Correction:
    return parts[0] if len(parts) == 1 else combined(parts, mask)


def policy_loss_options(
    loss: Entry[LossOutput], algorithm: AlgorithmConfig
) -> dict[str, Any]:
    """Return the loss options that the configuration sets. The function's defaults apply to the others."""
    options: dict[str, Any] = dict(algorithm.preset_loss_options)
    if algorithm.clip_range is not None:
        options |= {"clip_low": algorithm.clip_range, "clip_high": algorithm.clip_range}
    if algorithm.clip_range_high is not None:
        options["clip_high"] = algorithm.clip_range_high
    loss_options = algorithm.policy_loss_options.items()
    return options | {
        name: value for name, value in loss_options if name in loss.options
    }


def rollout_corrections(
    algorithm: AlgorithmConfig,
) -> list[tuple[Entry[Correction], dict[str, Any]]]:
    """Return the configured corrections with their options; empty if none is configured."""
    entries = []
    for correction in (algorithm.correction, *algorithm.correction.also):
        limits = {
            name: limit
            for name, limit in (("low", correction.low), ("high", correction.high))
            if limit is not None
        }
        if correction.kind != "none":
            entries.append(
                (corrections.get(correction.kind), {**correction.options, **limits})
            )
    return entries
