"""Comparison of the engine's log-probs with the actor's, and the check of a run's first step.

Weight fingerprints show that both have the same weights, but not that both compute the
same function, so the first step of a run is checked. In 16 bits two correct
implementations may differ by any amount at single tokens, so the check uses the mean
and the 99.9th percentile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from megaverl.config import Config
from megaverl.config.roles import RolloutConfig
from megaverl.distributed.collectives import device_of
from megaverl.errors import TrainingStopped
from megaverl.platform import platform
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.quantization import GROUP_FORMATS

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
# Rounding to 4 bits is up to 16 times as coarse.
IN_4_BITS = Rounding("an engine with 4-bit weights", 128.0, 2048.0, 512.0)


def rounding_of(
    spec: ModelSpec, rollout: RolloutConfig, *, trained_rounded: bool = False
) -> Rounding:
    """Return the differences that 16-bit rounding explains.

    An architecture that no table describes may have experts, and is treated so.

    Args:
        trained_rounded: the actor rounds its weights as the engine does (`actor.fake_quantization`).
    """
    cache = str(rollout.vllm.get("kv_cache_dtype") or "auto")
    method = None if trained_rounded else rollout.vllm.get("quantization")
    if method in GROUP_FORMATS and GROUP_FORMATS[method].bits == 4:
        return IN_4_BITS
    if method or not cache.startswith(("auto", "bfloat16", "float16")):
        return QUANTISED
    return DENSE if spec.is_tabled and spec.moe is None else WITH_EXPERTS


def check_first_comparison(
    differences: DifferenceStats, config: Config, dtype: torch.dtype, spec: ModelSpec
) -> str | None:
    """Compare the difference of engine and actor with what the rounding of `dtype` explains.

    Returns:
        A warning if rounding does not explain it, else None.

    Raises:
        TrainingStopped: the difference is more than `rollout.logprob_tolerance`. Where that is null, it is more than 0
            on a CPU with `rollout.batch_invariant`, more than `STRICT` in float32 on a CPU, or its mean is more than
            `Rounding.most`.
    """
    # From strict to loose: the user's limit, equality, float32 on a CPU, rounding of
    # 16 bits.
    tolerance = config.rollout.logprob_tolerance
    trained_rounded = config.actor.fake_quantization is not None
    rounding = rounding_of(spec, config.rollout, trained_rounded=trained_rounded)
    is_quantised = rounding in (QUANTISED, IN_4_BITS)
    if tolerance is None and not platform.is_cuda and not is_quantised:
        if config.rollout.batch_invariant:
            tolerance = 0.0
        elif dtype == torch.float32:
            tolerance = STRICT
    if tolerance is not None:
        if differences.largest <= tolerance:
            return None
        raise TrainingStopped(
            _difference_text(
                differences, config, f"allowed are {tolerance:.3g} for any token"
            )
        )
    # On CUDA, float32 matrix products may use TF32, which has the precision of float16.
    unit = torch.finfo(torch.float16 if dtype == torch.float32 else dtype).eps
    if is_quantised:
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
