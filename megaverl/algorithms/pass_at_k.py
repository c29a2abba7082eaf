"""pass@k: the chance that at least one of k samples is right."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
