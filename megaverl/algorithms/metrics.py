"""Metrics as sums that can be added over tokens, micro-batches and ranks, and are divided only at the end.

A metric is a tensor of three float64 numbers `[count, sum, sum of squares]`. Two of them are joined by
adding, so a metric never depends on how the batch was split; a mean of means would. pass@k is here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

MetricSums = dict[str, Tensor]  # name -> [3]: count, sum, sum of squares


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """`[count, sum, sum of squares]` (float64, detached) of the values under the mask.

    Args:
        values: any shape; what stands outside the mask may be anything, NaN included.
        mask: bool, the same shape.
    """
    kept = torch.where(mask, values.detach().double(), 0.0)
    return torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()])


def add_metrics(total: MetricSums, more: Mapping[str, Tensor]) -> MetricSums:
    """`total` plus `more`, name by name; neither is changed."""
    joined = dict(total)
    for name, sums in more.items():
        joined[name] = joined[name] + sums if name in joined else sums
    return joined


def mean(sums: Tensor) -> float:
    """Sum over count; 0.0 where nothing was counted."""
    count, total, _ = sums.tolist()
    return total / count if count else 0.0


def variance(sums: Tensor) -> float:
    """Population variance; 0.0 where nothing was counted."""
    count, total, squares = sums.tolist()
    return max(squares / count - (total / count) ** 2, 0.0) if count else 0.0


def explained_variance(returns: Tensor, value_error: Tensor) -> float:
    """1 - Var[return - value] / Var[return]: 1 for a perfect critic, 0 for a constant, less for a worse one.

    Args:
        returns: moments of the returns.
        value_error: moments of return - value.

    Returns 0.0 where the returns do not vary, as there is nothing to explain.
    """
    spread, centre = variance(returns), mean(returns)
    if spread <= 1e-12 * max(1.0, centre * centre):  # what rounding leaves of a constant
        return 0.0
    return 1.0 - variance(value_error) / spread


# A metric that needs more than one mean: name -> (the sums that it reads, function).
_DERIVED: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "explained_variance": (("returns", "value_error"), explained_variance),
}


def finalize(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean of every metric, and the metrics derived from several of them: of those without, and with, a `role/`."""
    result = {name: mean(value) for name, value in sums.items()}
    for role in {name[: name.rfind("/") + 1] for name in sums}:
        for name, (needs, function) in _DERIVED.items():
            if all(role + need in sums for need in needs):
                result[role + name] = function(*(sums[role + need] for need in needs))
    return result


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Mean of the values under the mask, in float64; 0.0 for an empty mask."""
    return mean(moments(values, mask))


def masked_std(values: Tensor, mask: Tensor) -> float:
    """Population standard deviation of the values under the mask, in float64; 0.0 for an empty mask."""
    return math.sqrt(variance(moments(values, mask)))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate from n samples, c of them right: 1 - C(n - c, k) / C(n, k), arXiv 2107.03374, eq. 1.

    Raises:
        ValueError: not 0 <= num_correct <= num_samples, or not 1 <= k <= num_samples.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} right out of {num_samples} samples is not defined")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def mean_pass_at_k(correct: Tensor, group_ids: Tensor, k: int) -> float:
    """The mean of `pass_at_k` over prompts; 0.0 for an empty batch.

    Args:
        correct: `[batch]` bool. group_ids: `[batch]` int64, equal for the samples of one prompt.

    Raises:
        ValueError: a prompt with fewer than k samples.
    """
    ids, index = torch.unique(group_ids, return_inverse=True)
    sizes = torch.bincount(index, minlength=len(ids)).tolist()
    rights = torch.bincount(index[correct], minlength=len(ids)).tolist()
    scores = [pass_at_k(size, right, k) for size, right in zip(sizes, rights, strict=True)]
    return sum(scores) / len(scores) if scores else 0.0
