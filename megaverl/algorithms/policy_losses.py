"""Policy losses: per-token surrogates, weighted and summed. Here the registry, and PPO's clip in its variants.

Every loss gets the same inputs, all `[batch, response]`:
    log_probs: float, of the policy being trained; the gradient flows here.
    old_log_probs: float, of the policy at the start of the update.
    advantages: float.
    weights: float, from `aggregation`; where 0 the other inputs may be anything, NaN included.
A row is a whole response, so that losses over whole responses do not see how the batch was split either.

All are linear in the size of the advantages: a correction for stale samples (`rollout_correction`) is a factor on
them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megaverl.algorithms.loss import LossOutput, bounded, loss_problem
from megaverl.algorithms.metrics import MetricSums, moments
from megaverl.algorithms.registry import Registry

policy_losses: Registry[LossOutput] = Registry("policy loss", loss_problem)


class Tokens(NamedTuple):
    """What most surrogates are made of, `[batch, response]`, 0 where there is no token to train."""

    log_ratio: Tensor  # log_prob - old_log_prob, of any size: `bounded` before exp()
    advantages: Tensor
    active: Tensor  # bool


def tokens_of(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, weights: Tensor) -> Tokens:
    """The log-ratio and the advantages of the tokens that train; what stands elsewhere is 0, NaN included."""
    active = weights != 0
    log_ratio = torch.where(active, log_probs - old_log_probs, 0.0)
    return Tokens(log_ratio, torch.where(active, advantages, 0.0), active)


def ratio_metrics(log_ratio: Tensor, active: Tensor, clipped: Tensor) -> MetricSums:
    """`clip_fraction` (tokens whose gradient was taken away), `approx_kl` (k3 of old against new), `ratio`."""
    log_ratio = bounded(log_ratio.detach())
    return {
        "clip_fraction": moments(clipped, active),
        "approx_kl": moments(torch.expm1(log_ratio) - log_ratio, active),
        "ratio": moments(log_ratio.exp(), active),
    }


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
    r_t = exp(log_prob - old_log_prob). GRPO (arXiv 2402.03300, eq. 3) uses the same; with clip_high above clip_low
    it is DAPO's decoupled clip (arXiv 2503.14476, eq. 10, "clip-higher"). Beyond a log-ratio of +-20 a token has no
    gradient (`bounded`), so that nothing overflows.

    Args: see the module. clip_low, clip_high: how far the ratio may fall below, and rise above, 1.

    Metrics: `clip_fraction`, `approx_kl`, `ratio`.
    """
    log_ratio, advantages, active = tokens_of(log_probs, old_log_probs, advantages, weights)
    ratio = bounded(log_ratio).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -(weights * torch.minimum(unclipped, clipped)).sum()
    return LossOutput(loss, ratio_metrics(log_ratio, active, clipped < unclipped))


@policy_losses.register("dual_clip")
def dual_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float = 3.0,
) -> LossOutput:
    """PPO's clip with a floor for negative advantages, arXiv 1912.09729, eq. 5 (dual-clip PPO), negated.

    Where A_t < 0 the surrogate is max(min(r_t A_t, clip(r_t) A_t), clip_dual A_t): a ratio far above 1 can no longer
    make the loss grow without bound. Where A_t >= 0 it is PPO's.

    Args: as `ppo_clip`. clip_dual: c of the paper, above 1 + clip_high.

    Metrics: those of `ppo_clip`, and `dual_clip_fraction`, the tokens on the floor.
    """
    log_ratio, advantages, active = tokens_of(log_probs, old_log_probs, advantages, weights)
    ratio = bounded(log_ratio).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    surrogate, floor = torch.minimum(unclipped, clipped), clip_dual * advantages
    on_floor = (advantages < 0) & (surrogate < floor)
    loss = -(weights * torch.where(on_floor, floor, surrogate)).sum()
    metrics = ratio_metrics(log_ratio, active, (clipped < unclipped) | on_floor)
    return LossOutput(loss, metrics | {"dual_clip_fraction": moments(on_floor, active)})
