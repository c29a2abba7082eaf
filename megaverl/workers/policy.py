"""Policy workers: log-probs of responses, and the actor's update by a policy loss.

The module also compares the engine's log-probs with the actor's. Weight fingerprints
show that both have the same weights, but not that both compute the same function, so
the first step of a run is checked. In 16 bits two correct implementations may differ by
any amount at single tokens, so the check uses the mean and the 99.9th percentile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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
from megaverl.config import Config
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.roles import RolloutConfig
from megaverl.data.batch import RolloutBatch
from megaverl.distributed.collectives import device_of
from megaverl.errors import TrainingStopped
from megaverl.models.packing import MicroBatch
from megaverl.platform import platform
from megaverl.rollout import sample_seed
from megaverl.sharding.model_spec import ModelSpec
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


# Histogram bins per factor of 2, so that percentiles are accurate to 2.2 %.
PER_OCTAVE = 32
SMALLEST, LARGEST = -40, 8  # exponents of 2; values outside go to the first or last bin
NUM_BINS = (LARGEST - SMALLEST) * PER_OCTAVE


class DifferenceStats(NamedTuple):
    """Statistics of |engine log-prob - actor log-prob| over tokens, in nats; all 0 without tokens."""

    mean: float
    p999: float
    largest: float

    def metrics(self) -> dict[str, float]:
        """Return the statistics under the names of a step's metrics."""
        return {
            "rollout/logprob_diff_mean": self.mean,
            "rollout/logprob_diff_p999": self.p999,
            "rollout/logprob_diff_max": self.largest,
        }


class LogProbDifference:
    """Accumulator of log-prob differences on the host.

    A histogram with logarithmic bins makes the percentile over all ranks' tokens a
    single small all-reduce.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros(NUM_BINS, dtype=torch.float64)
        self._total = torch.zeros(1, dtype=torch.float64)
        self._largest = torch.zeros(1, dtype=torch.float64)

    def add(self, difference: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the tokens under `mask`; both arguments are `[batch, response]`. NaN counts as infinite."""
        # A NaN counts as infinite, so that it cannot hide in the mean or the
        # percentile.
        difference = (
            difference[mask].abs().double().nan_to_num(nan=math.inf, posinf=math.inf)
        )
        # Exponent of 2 in steps of 1 / PER_OCTAVE, counted from the smallest one.
        if difference.numel():
            bins = (
                ((difference.log2() - SMALLEST) * PER_OCTAVE)
                .floor()
                .clamp(0, NUM_BINS - 1)
                .long()
            )
            self._counts += torch.bincount(bins, minlength=NUM_BINS)
            self._total += difference.sum()
            self._largest = torch.maximum(self._largest, difference.max())

    def over_ranks(self, group: dist.ProcessGroup) -> LogProbDifference:
        """Return the sum over all ranks of `group`, on each of them."""
        joined, device = LogProbDifference(), device_of(group)
        # Collective over the ranks of `group`: one sum and one maximum, however many
        # tokens there are.
        sums, largest = (
            torch.cat([self._counts, self._total]).to(device),
            self._largest.to(device, copy=True),
        )
        dist.all_reduce(sums, group=group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        joined._counts, joined._total, joined._largest = (
            torch.cat([sums, largest]).cpu().split([NUM_BINS, 1, 1])
        )
        return joined

    def stats(self) -> DifferenceStats:
        """Return statistics of the tokens added so far."""
        below, largest = self._counts.cumsum(0), float(self._largest)
        count = float(below[-1])
        if not count:
            return DifferenceStats(0.0, 0.0, 0.0)
        # First bin by which 99.9 % of the tokens are covered.
        place = int(torch.searchsorted(below, math.ceil(0.999 * count)))
        return DifferenceStats(
            mean=float(self._total) / count,
            # The upper edge of the bin, so that the percentile is never too small.
            p999=min(2.0 ** (SMALLEST + (place + 1) / PER_OCTAVE), largest),
            largest=largest,
        )


# Tolerance in nats for float32 on a CPU, where only rounding differs: the test suite's
# runs show 1e-5.
STRICT = 1e-3


class Rounding(NamedTuple):
    """Log-prob differences that rounding explains between two 16-bit implementations of one model.

    Attributes:
        model: the kind of model, for messages.
        mean: upper bound of the usual mean of |difference| over tokens, in units of the dtype's last place at 1
            (bfloat16: 0.0078, float16: 0.00098).
        p999: upper bound of the usual 99.9th percentile, in the same units.
        most: a mean above this cannot be rounding, in the same units.
    """

    model: str
    mean: float
    p999: float
    most: float


# Measured in bfloat16 between transformers and megatron-core, on random models of the
# supported architectures with 2 and 8 layers, and log-probs as spread out as a trained
# model's: means of 0.007 to 0.039 for dense models and of 0.021 to 0.15 with experts,
# where rounding changes the expert of a token near a tie. Reported: 0.011 (Qwen3-4B),
# 0.064 (4 layers of 30B-A3B), 0.21 (8 layers, 2 of 32 experts). A wrong rotary base or
# window shows 0.18 and more.
DENSE = Rounding("a dense model", mean=5.0, p999=64.0, most=16.0)
WITH_EXPERTS = Rounding("a mixture of experts", mean=20.0, p999=256.0, most=32.0)
# For an engine with weights or cache in 8 bits, whatever the model: in units of
# bfloat16.
QUANTISED = Rounding(
    "an engine with 8-bit weights or cache", mean=32.0, p999=512.0, most=64.0
)


def rounding_of(spec: ModelSpec, rollout: RolloutConfig) -> Rounding:
    """Return the differences that 16-bit rounding explains.

    An architecture that no table describes may have experts, and is treated so.
    """
    cache = str(rollout.vllm.get("kv_cache_dtype") or "auto")
    if rollout.vllm.get("quantization") or not cache.startswith(
        ("auto", "bfloat16", "float16")
    ):
        return QUANTISED
    return DENSE if spec.is_tabled and spec.moe is None else WITH_EXPERTS


def check_first_comparison(
    differences: DifferenceStats, config: Config, dtype: torch.dtype, spec: ModelSpec
) -> str | None:
    """Compare the difference of engine and actor with what the rounding of `dtype` explains.

    Returns:
        A warning if rounding does not explain it, else None.

    Raises:
        TrainingStopped: the difference is more than `rollout.logprob_tolerance`. Where that is null, it is more than
            `STRICT` in float32 on a CPU, or its mean is more than `Rounding.most`.
    """
    # Three rules, from strict to loose: the user's limit, float32 on a CPU, rounding of
    # 16 bits.
    tolerance = config.rollout.logprob_tolerance
    if tolerance is None and dtype == torch.float32 and not platform.is_cuda:
        tolerance = STRICT
    if tolerance is not None:
        if differences.largest <= tolerance:
            return None
        raise TrainingStopped(
            _difference_text(
                differences, config, f"allowed are {tolerance:.3g} for any token"
            )
        )
    rounding = rounding_of(spec, config.rollout)
    # On CUDA, float32 matrix products may use TF32, which has the precision of float16.
    unit = torch.finfo(torch.float16 if dtype == torch.float32 else dtype).eps
    if rounding is QUANTISED:
        unit = torch.finfo(torch.bfloat16).eps
    name = str(dtype).removeprefix("torch.")
    usual = (
        f"rounding in {name} explains {rounding.mean * unit:.2g} in the mean and {rounding.p999 * unit:.2g} for 99.9 % "
        f"of the tokens of {rounding.model}"
    )
    # Written with `not`, so that a NaN counts as too large.
    if not differences.mean <= rounding.most * unit:
        limit = f"allowed are {rounding.most * unit:.2g} in the mean, for {usual}"
        raise TrainingStopped(_difference_text(differences, config, limit))
    if (
        differences.mean <= rounding.mean * unit
        and differences.p999 <= rounding.p999 * unit
    ):
        return None
    loud = f"{usual}. ROUNDING DOES NOT EXPLAIN THIS: the engine samples from another policy than is trained"
    return _difference_text(differences, config, loud)


def _difference_text(differences: DifferenceStats, config: Config, limit: str) -> str:
    engine = config.rollout.engine
    is_compared = config.reshard.check_every >= 0
    weights = (
        "have the same weights"
        if is_compared
        else "may have other weights (reshard.check_every=-1 compares none)"
    )
    return (
        f"the log-probs that {engine} reports and those that the actor computes for the same tokens differ by "
        f"{differences.mean:.3g} in the mean, for 99.9 % of the tokens by up to {differences.p999:.3g}, at most by "
        f"{differences.largest:.3g}; {limit}. Both {weights}. Likely causes: sampling fields that only "
        "the engine applies "
        "(top_p, top_k, penalties); keys of config.json that the two compute differently (rotary embedding, sliding "
        "window, norms' epsilon, router); rollout.vllm fields that make the engine round more (quantization, "
        "kv_cache_dtype, attention kernels). Compare both with transformers: rollout.engine=hf samples with it. If the "
        "difference is only rounding, set rollout.logprob_tolerance to the largest that you allow for a token."
    )


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
