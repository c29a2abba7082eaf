"""Policy losses that hold a token back by its divergence from the sampling policy, not by its ratio: DPPO."""

from __future__ import annotations

import torch
from torch import Tensor

from megaverl.algorithms.loss import LossOutput, bounded
from megaverl.algorithms.policy_losses import Tokens, policy_losses, ratio_metrics, tokens_of


@policy_losses.register("dppo_tv")
def dppo_tv(
    log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, weights: Tensor, *, threshold: float = 0.15
) -> LossOutput:
    """Divergence PPO with the binary total variation, arXiv 2602.04879, eq. 12, with the binary approximation.

    loss = - sum_t weight_t M_t r_t A_t with r_t = pi_t / mu_t, mu the policy that sampled. M_t is 0 where the update
    would lead on outwards from a token that is already far, (A_t > 0 and r_t > 1 or A_t < 0 and r_t < 1) and
    D_t > threshold, else 1. Here D_t = |pi_t - mu_t|, the total variation of "this token or another".

    The ratio already is to the engine's policy: no `correction` beside it.

    Args: see `policy_losses`. rollout_log_probs: of mu, as the engine reported them. threshold: delta.

    Metrics: `clip_fraction` (tokens with M_t = 0), `approx_kl`, `ratio`.
    """
    tokens = tokens_of(log_probs, rollout_log_probs, advantages, weights)
    return _held_back(tokens, weights, binary_tv(*_detached(tokens.active, log_probs, rollout_log_probs)) > threshold)


@policy_losses.register("dppo_kl")
def dppo_kl(
    log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, weights: Tensor, *, threshold: float = 0.05
) -> LossOutput:
    """Divergence PPO with the binary KL, arXiv 2602.04879, eq. 12, with the binary KL of its eq. 14.

    As `dppo_tv`, with D_t = mu_t log(mu_t / pi_t) + (1 - mu_t) log((1 - mu_t) / (1 - pi_t)).
    """
    tokens = tokens_of(log_probs, rollout_log_probs, advantages, weights)
    return _held_back(tokens, weights, binary_kl(*_detached(tokens.active, log_probs, rollout_log_probs)) > threshold)


def binary_tv(log_probs: Tensor, sampled_log_probs: Tensor) -> Tensor:
    """|pi - mu| of the sampled token. Shapes: any, both the same; log-probs at most 0."""
    return (log_probs.exp() - sampled_log_probs.exp()).abs()


def binary_kl(log_probs: Tensor, sampled_log_probs: Tensor) -> Tensor:
    """KL(mu || pi) of "the sampled token, or another", in nats. Shapes: any, both the same; log-probs at most 0."""
    mu = sampled_log_probs.exp()
    # 1 - p without loss for a p near 0; where p is 1 to the last bit, the other tokens still have some probability.
    smallest = torch.finfo(mu.dtype).tiny
    others_mu, others_pi = -torch.expm1(sampled_log_probs), (-torch.expm1(log_probs)).clamp(min=smallest)
    return mu * (sampled_log_probs - log_probs) + torch.special.xlogy(others_mu, others_mu / others_pi)


def _detached(active: Tensor, *log_probs: Tensor) -> list[Tensor]:
    """Log-probs without gradient where a token trains, else log 1; at most 0."""
    return [torch.where(active, each.detach(), 0.0).clamp(max=0.0) for each in log_probs]


def _held_back(tokens: Tokens, weights: Tensor, far: Tensor) -> LossOutput:
    log_ratio, advantages, active = tokens
    outwards = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    blocked = outwards & far
    loss = -(weights * torch.where(blocked, 0.0, bounded(log_ratio).exp() * advantages)).sum()
    return LossOutput(loss, ratio_metrics(log_ratio, active, blocked))
