"""The entropy bonus."""

from __future__ import annotations

import torch
from torch import Tensor

from megaverl.algorithms.loss import LossOutput
from megaverl.algorithms.metrics import moments


def entropy_sum(entropies: Tensor, weights: Tensor) -> LossOutput:
    """sum_t weight_t H_t: subtract it, times a coefficient, from the policy loss (arXiv 1707.06347, eq. 9).

    Args (both `[batch, response]`):
        entropies: float, in nats, of the policy's distribution over the vocabulary at each token.
        weights: float, from `aggregation`; where 0 the entropy may be anything, NaN included.

    Metrics: `entropy`, the token mean.
    """
    active = weights != 0
    entropies = torch.where(active, entropies, 0.0)
    return LossOutput((weights * entropies).sum(), {"entropy": moments(entropies, active)})
