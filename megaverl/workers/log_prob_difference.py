"""How far the engine's log-probs are from the actor's: mean, 99.9th percentile and largest, and whether that is right.

Fingerprints say whether the weights are the same; the check after a start sees what they cannot: another computation
with them. In 16 bits two right computations differ, at single tokens by any amount: so the mean and the 99.9th
percentile are looked at.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from megaverl.config import Config
from megaverl.errors import TrainingStopped
from megaverl.platform import platform

PER_OCTAVE = 32  # bins between a difference and twice as much: a percentile is known to 2.2 %
SMALLEST, LARGEST = -40, 8  # powers of two; what lies outside is in the first or the last bin
NUM_BINS = (LARGEST - SMALLEST) * PER_OCTAVE


class DifferenceStats(NamedTuple):
    """Of |engine's - actor's log-prob| over tokens, in nats; of no tokens all are 0."""

    mean: float
    p999: float
    largest: float

    def metrics(self) -> dict[str, float]:
        """Under the names that a step's metrics have them by."""
        return {
            "rollout/logprob_diff_mean": self.mean,
            "rollout/logprob_diff_p999": self.p999,
            "rollout/logprob_diff_max": self.largest,
        }


class LogProbDifference:
    """Adds up the differences of tokens. Counts of bins make a percentile of all ranks' tokens one small sum."""

    def __init__(self) -> None:
        self._counts = torch.zeros(NUM_BINS, dtype=torch.float64, device=platform.device)
        self._total = torch.zeros(1, dtype=torch.float64, device=platform.device)
        self._largest = torch.zeros(1, dtype=torch.float64, device=platform.device)

    def add(self, log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor) -> None:
        """Tokens under the `mask`, all `[batch, response]`. A difference that is no number counts as infinite."""
        apart = (log_probs.detach() - rollout_log_probs)[mask].abs().double().nan_to_num(nan=math.inf, posinf=math.inf)
        apart = apart.to(platform.device)
        if apart.numel():
            bins = ((apart.log2() - SMALLEST) * PER_OCTAVE).floor().clamp(0, NUM_BINS - 1).long()
            self._counts += torch.bincount(bins, minlength=NUM_BINS)
            self._total += apart.sum()
            self._largest = torch.maximum(self._largest, apart.max())

    def over_ranks(self, group: dist.ProcessGroup) -> LogProbDifference:
        """What all ranks of the group have added, on each of them."""
        joined, sums = LogProbDifference(), torch.cat([self._counts, self._total])
        joined._largest = self._largest.clone()
        dist.all_reduce(sums, group=group)
        dist.all_reduce(joined._largest, op=dist.ReduceOp.MAX, group=group)
        joined._counts, joined._total = sums[:NUM_BINS], sums[NUM_BINS:]
        return joined

    def stats(self) -> DifferenceStats:
        """Of the tokens so far."""
        below, largest = self._counts.cumsum(0).cpu(), float(self._largest)
        count = float(below[-1])
        if not count:
            return DifferenceStats(0.0, 0.0, 0.0)
        place = int(torch.searchsorted(below, math.ceil(0.999 * count)))
        return DifferenceStats(
            mean=float(self._total) / count,
            p999=min(2.0 ** (SMALLEST + (place + 1) / PER_OCTAVE), largest),
            largest=largest,
        )


# Of float32 on a CPU, where rounding is all that differs: the suite's runs show 1e-5.
STRICT = 1e-3
# In 16 bits, in units of the dtype's last place at 1 (bfloat16: 0.0078). Reported for bfloat16 are means of 0.011
# (Qwen3-4B) and 0.064 (a mixture of experts, 30B-A3B): such a mixture is warned of and goes on.
MEAN_UNITS, P999_UNITS = 4.0, 64.0
# Nats, in any 16 bits: what another model would show.
ABSURD_MEAN = 0.5


def check_first_comparison(found: DifferenceStats, config: Config, dtype: torch.dtype) -> str | None:
    """A warning, where engine and actor differ more than the rounding of `dtype` explains; None where they do not.

    Raises:
        TrainingStopped: by more than `rollout.logprob_tolerance`; where that is null by more than `STRICT` in float32
            on a CPU, or by more than `ABSURD_MEAN` in the mean.
    """
    tolerance = config.rollout.logprob_tolerance
    if tolerance is None and dtype == torch.float32 and not platform.is_cuda:
        tolerance = STRICT
    if tolerance is not None:
        if found.largest <= tolerance:
            return None
        raise TrainingStopped(_said(found, config, f"allowed are {tolerance:.3g} for any token"))
    if not found.mean <= ABSURD_MEAN:
        raise TrainingStopped(_said(found, config, f"allowed are {ABSURD_MEAN:.3g} in the mean"))
    # on CUDA float32's products may be those of TF32, with float16's digits
    unit = torch.finfo(torch.float16 if dtype == torch.float32 else dtype).eps
    if found.mean <= MEAN_UNITS * unit and found.p999 <= P999_UNITS * unit:
        return None
    usual = f"usual are {MEAN_UNITS * unit:.2g} in the mean and {P999_UNITS * unit:.2g} for 99.9 % of the tokens"
    return _said(found, config, f"{usual}; mixtures of experts show more")


def _said(found: DifferenceStats, config: Config, limit: str) -> str:
    compared = config.reshard.check_every >= 0
    weights = "have the same weights" if compared else "may have other weights (reshard.check_every=-1 compares none)"
    return (
        f"the log-probs that {config.rollout.engine} reports and those that Megatron computes for the same tokens "
        f"differ by {found.mean:.3g} in the mean, for 99.9 % of the tokens by up to {found.p999:.3g}, at most by "
        f"{found.largest:.3g}; {limit}. Both {weights}. Sampling fields such as top_p or penalties that only the "
        "engine applies do this, and an architecture that both compute differently. If the difference is only "
        "rounding, set rollout.logprob_tolerance to the largest that you allow."
    )
