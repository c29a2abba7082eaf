"""Policy losses: per-token surrogates, weighted and summed."""

from __future__ import annotations

import torch
from torch import Tensor

from megaverl.algorithms.loss import MAX_LOG_RATIO, LossOutput
from megaverl.algorithms.metrics import moments
from megaverl.algorithms.registry import Registry

policy_losses: Registry[LossOutput] = Registry("policy loss")


@policy_losses.register("ppo_clip")
def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> LossOutput:
    """PPO's clipped surrogate, arXiv 1707.06347, eq. 7, negated.

    loss = - sum_t weight_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), with
    r_t = exp(log_prob - old_log_prob). GRPO (arXiv 2402.03300, eq. 3) uses the same. The log-ratio is clamped
    to +-20, beyond which a token has no gradient, so that nothing overflows.

    Args (all `[batch, response]`):
        log_probs: float, of the policy being trained; the gradient flows here.
        old_log_probs: float, of the policy at the start of the update.
        advantages: float.
        weights: float, from `aggregation`; where 0 the other inputs may be anything, NaN included.
        clip_low, clip_high: how far the ratio may fall below, and rise above, 1.

    Metrics: `clip_fraction` (tokens where the clip took the gradient away), `approx_kl` (k3 of old against
    new policy), `ratio`.
    """
    active = weights != 0
    log_ratio = torch.where(active, log_probs - old_log_probs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = torch.where(active, advantages, 0.0)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -(weights * torch.minimum(unclipped, clipped)).sum()
    with torch.no_grad():
        metrics = {
            "clip_fraction": moments(clipped < unclipped, active),
            "approx_kl": moments(torch.expm1(log_ratio) - log_ratio, active),
            "ratio": moments(ratio, active),
        }
    return LossOutput(loss, metrics)
