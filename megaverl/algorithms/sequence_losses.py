"""Policy losses whose ratio is that of whole responses: GSPO and GMPO."""

from __future__ import annotations

import torch
from torch import Tensor

from megaverl.algorithms.loss import LossOutput, bounded
from megaverl.algorithms.policy_losses import policy_losses, ratio_metrics, tokens_of


def mean_over_tokens(values: Tensor, active: Tensor) -> Tensor:
    """`[batch, 1]`: the mean of each row of `values` under `active`; 0 for an empty row."""
    total = torch.where(active, values, 0.0).sum(dim=1, keepdim=True)
    return total / active.sum(dim=1, keepdim=True).clamp(min=1)


@policy_losses.register("gspo")
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossOutput:
    """Group sequence policy optimization, arXiv 2507.18071, eq. 5 to 7, in the per-token form of eq. 13 and 14.

    s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|), loss = - sum_t weight_t min(s_i A_t, clip(s_i) A_t); with respect to the
    policy, s_i counts as stop_gradient(s_i) pi_t / stop_gradient(pi_t). With the same advantage at every token of a
    response, and weights of `seq_mean_token_mean`, value and gradient are those of eq. 5. Tokens with an advantage of
    0, as a correction gives to those that it rejects, do not count in s_i.

    Args: see `policy_losses`. clip_low, clip_high: how far s_i may fall below, and rise above, 1; the defaults are
        section 5.1's.

    Metrics: `clip_fraction`, `approx_kl`, `ratio` (of responses, weighed by their tokens).
    """
    log_ratio, advantages, active = tokens_of(log_probs, old_log_probs, advantages, weights)
    kept = active & (advantages != 0)
    counted = torch.where(kept.any(dim=1, keepdim=True), kept, active)
    mean = mean_over_tokens(log_ratio.detach(), counted)
    ratio = bounded(mean + (log_ratio - log_ratio.detach())).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -(weights * torch.minimum(unclipped, clipped)).sum()
    return LossOutput(loss, ratio_metrics(mean.expand_as(active), active, clipped < unclipped))


@policy_losses.register("gmpo")
def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> LossOutput:
    """Geometric-mean policy optimization, arXiv 2507.20673, section 3, eq. 4: the geometric mean of token-wise
    clipped ratios.

    With l_t = log r_t, c_t = min(l_t, clip_high) where A_t > 0, max(l_t, -clip_low) where A_t < 0, and
    g_i = exp(mean_t c_t): loss = - sum_i weight_i g_i A_i, weight_i the sum of the tokens' weights and A_i the mean of
    their advantages. So a token's ratio may go to e^-clip_low and e^clip_high. The paper's mean over responses is the
    aggregation `seq_mean_token_mean`.

    Tokens with an advantage of 0, as a correction gives to those that it rejects, leave all means over t: a response is
    what remains of it, with its whole weight.

    Args: see `policy_losses`; the paper has one advantage per response. clip_low, clip_high: of the log-ratio.

    Metrics: `clip_fraction`, `approx_kl`, `ratio` (of tokens, unclipped).
    """
    log_ratio, advantages, active = tokens_of(log_probs, old_log_probs, advantages, weights)
    limited = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio)
    limited = torch.where(advantages < 0, limited.clamp(min=-clip_low), limited)
    kept = active & (advantages != 0)
    ratio, gains = bounded(mean_over_tokens(limited, kept)).exp(), mean_over_tokens(advantages, kept)
    loss = -(weights.sum(dim=1, keepdim=True) * ratio * gains).sum()
    return LossOutput(loss, ratio_metrics(log_ratio, active, limited.detach() != log_ratio.detach()))
