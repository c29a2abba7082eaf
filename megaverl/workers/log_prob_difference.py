"""How far the engine's log-probs are from the actor's: their mean, 99.9th percentile and largest, over all ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

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
