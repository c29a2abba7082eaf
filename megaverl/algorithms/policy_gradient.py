"""Policy losses without a trust region: the plain policy gradient, and those that weigh it by the ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from megaverl.algorithms.loss import LossOutput, bounded
from megaverl.algorithms.metrics import moments
from megaverl.algorithms.policy_losses import policy_losses, ratio_metrics, tokens_of


@policy_losses.register("gpg")
@policy_losses.register("policy_gradient")
def policy_gradient(log_probs: Tensor, advantages: Tensor, weights: Tensor) -> LossOutput:
    """REINFORCE: loss = - sum_t weight_t A_t log_prob_t (Williams 1992; Sutton et al. 1999, theorem 1).

    GPG (arXiv 2504.02546) uses the same, with its own advantages. Right for samples of the very policy that is
    trained: one update per batch.

    Args: see `policy_losses`.

    Metrics: `log_prob`, the token mean.
    """
    active = weights != 0
    log_probs = torch.where(active, log_probs, 0.0)
    loss = -(weights * log_probs * torch.where(active, advantages, 0.0)).sum()
    return LossOutput(loss, {"log_prob": moments(log_probs, active)})


@policy_losses.register("importance_sampling")
def importance_sampling(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, weights: Tensor) -> LossOutput:
    """The unclipped surrogate: loss = - sum_t weight_t r_t A_t, arXiv 1707.06347, eq. 6 ("CPI").

    Args: see `policy_losses`.

    Metrics: `clip_fraction` (always 0), `approx_kl`, `ratio`.
    """
    log_ratio, advantages, active = tokens_of(log_probs, old_log_probs, advantages, weights)
    loss = -(weights * bounded(log_ratio).exp() * advantages).sum()
    return LossOutput(loss, ratio_metrics(log_ratio, active, torch.zeros_like(active)))


@policy_losses.register("cispo")
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> LossOutput:
    """Clipped importance weights on the policy gradient, arXiv 2506.13585, eq. 4 and 5.

    loss = - sum_t weight_t stop_gradient(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log_prob_t: the weight is
    limited, and no token loses its gradient. The paper tunes only the upper limit and leaves the lower one out, as
    clip_low=1 does.

    Args: see `policy_losses`. clip_low, clip_high: how far the weight may fall below, and rise above, 1.

    Metrics: `clip_fraction` (weights that were limited), `approx_kl`, `ratio`.
    """
    log_ratio, advantages, active = tokens_of(log_probs, old_log_probs, advantages, weights)
    ratio = bounded(log_ratio.detach()).exp()
    limited = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    log_probs = torch.where(active, log_probs, 0.0)
    loss = -(weights * limited * advantages * log_probs).sum()
    return LossOutput(loss, ratio_metrics(log_ratio, active, limited != ratio))


@policy_losses.register("sapo")
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> LossOutput:
    """Soft adaptive policy optimization, arXiv 2511.20347, eq. 5 and 6: a sigmoid gate in place of the clip.

    loss = - sum_t weight_t f(r_t) A_t with f(r) = 4 / tau sigmoid(tau (r - 1)), tau = tau_positive where A_t > 0, else
    tau_negative. The slope of f is 1 at r = 1 and falls off to both sides, faster for a larger tau.

    Args: see `policy_losses`. tau_positive, tau_negative: temperatures, above 0.

    Metrics: `clip_fraction` (tokens whose slope is below a half), `approx_kl`, `ratio`.
    """
    log_ratio, advantages, active = tokens_of(log_probs, old_log_probs, advantages, weights)
    tau = torch.full_like(log_ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (bounded(log_ratio).exp() - 1.0))
    loss = -(weights * 4.0 / tau * gate * advantages).sum()
    slope = 4.0 * gate.detach() * (1.0 - gate.detach())
    return LossOutput(loss, ratio_metrics(log_ratio, active, slope < 0.5))
