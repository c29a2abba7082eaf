"""Per-token estimates of the KL divergence KL(policy || reference) from samples of the policy.

Source of k1, k2, k3: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html, with
r = reference / policy probability of the sampled token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaverl.algorithms.loss import MAX_LOG_RATIO, LossOutput
from megaverl.algorithms.metrics import moments
from megaverl.algorithms.registry import Registry

kl_estimators: Registry[Tensor] = Registry("KL estimator")


@kl_estimators.register("k1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """-log r = log_prob - ref_log_prob: unbiased, of either sign. Shapes: any, all the same."""
    return log_probs - ref_log_probs


@kl_estimators.register("k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(log r)^2 / 2: biased, of low variance; its gradient is unbiased. Shapes: any, all the same."""
    return 0.5 * (log_probs - ref_log_probs).square()


@kl_estimators.register("k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(r - 1) - log r: unbiased and never negative. Shapes: any, all the same.

    log r is held below 20, so that r stays finite: a token that the reference finds e^20 times likelier than
    the policy that sampled it counts as such, and has no gradient.
    """
    log_ratio = (ref_log_probs - log_probs).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, weights: Tensor, *, kind: str = "k3") -> LossOutput:
    """sum_t weight_t KL_t: the KL penalty as a loss, arXiv 2402.03300, eq. 3 and 4 (there with k3).

    Args (all `[batch, response]`):
        log_probs: float, of the policy; the gradient flows here. ref_log_probs: float, of the reference.
        weights: float, from `aggregation`; where 0 the other inputs may be anything, NaN included.
        kind: name of an estimator. The gradient of `k1` has expectation 0: use k2 or k3 in a loss.

    Metrics: `kl_loss`, the token mean of the estimate.

    Raises:
        ConfigError: unknown `kind`.
    """
    active = weights != 0
    estimate = kl_estimators.get(kind).function(
        torch.where(active, log_probs, 0.0), torch.where(active, ref_log_probs, 0.0)
    )
    return LossOutput((weights * estimate).sum(), {"kl_loss": moments(estimate, active)})
