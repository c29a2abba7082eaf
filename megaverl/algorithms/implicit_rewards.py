"""PRIME's pure part: rewards of tokens from a model that was trained on outcomes alone (arXiv 2502.01456)."""

from __future__ import annotations

import torch
from torch import Tensor

from megaverl.algorithms.advantages import Advantages, advantage_estimators, rewards_to_go
from megaverl.algorithms.group_advantages import rloo
from megaverl.algorithms.groups import group_totals
from megaverl.algorithms.loss import LossOutput
from megaverl.algorithms.metrics import moments


def implicit_rewards(log_probs: Tensor, ref_log_probs: Tensor, *, beta: float = 0.05) -> Tensor:
    """r_t = beta (log pi_phi(y_t) - log pi_ref(y_t)), arXiv 2502.01456, eq. 3 (the implicit process reward).

    Args: `[batch, response]` float; log_probs: of the reward model phi. beta: scale, above 0.
    """
    return beta * (log_probs - ref_log_probs)


@advantage_estimators.register("prime")
def prime(
    implicit_rewards: Tensor,
    rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
) -> Advantages:
    """PRIME, arXiv 2502.01456, eq. 5: rewards-to-go of leave-one-out token rewards, plus leave-one-out outcomes.

    A_t = sum_{s >= t} gamma^(s - t) (r_s - mean over the group's other responses j of r(y_j)) + RLOO of the outcomes,
    where r(y_j) is the mean of that response's token rewards. Nothing is subtracted in a group of one.

    Args:
        implicit_rewards: `[batch, response]` float, read under the mask only. rewards: `[batch]` float, outcomes.
        group_ids: `[batch]` int64. response_mask: `[batch, response]` bool.

    Returns: advantages `[batch, response]` in the dtype of `rewards`, 0 outside the mask; no returns.

    Raises:
        DataError: an outcome that is not finite.
    """
    process = torch.where(response_mask, implicit_rewards.double(), 0.0)
    means = process.sum(dim=1) / response_mask.sum(dim=1).clamp(min=1)
    others = group_totals(torch.ones_like(means), group_ids) - 1
    baseline = (group_totals(means, group_ids) - means) / others.clamp(min=1)
    gains = rewards_to_go(process - baseline.unsqueeze(1), response_mask, gamma)
    outcome = rloo(rewards, group_ids, response_mask).advantages
    return Advantages(torch.where(response_mask, gains + outcome, 0.0).to(rewards.dtype), None)


def outcome_cross_entropy(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    correct: Tensor,
    response_mask: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.05,
) -> LossOutput:
    """The loss of the implicit reward model, arXiv 2502.01456, algorithm 1, line 8 (unnumbered): cross-entropy
    of sigmoid(r(y)) on the outcome.

    loss = - sum_i weight_i (o_i log sigmoid(r_i) + (1 - o_i) log sigmoid(-r_i)), r_i = sum_t r_t (`implicit_rewards`).

    Args:
        log_probs: `[batch, response]` float, of the reward model; the gradient flows here. ref_log_probs: the same
            shape. Both are read under the mask only.
        correct: `[batch]`, o_i: bool, or a float from 0 to 1. response_mask: `[batch, response]` bool.
        weights: `[batch]` float, one over the number of responses in the mini-batch, or 0.

    Metrics: `implicit_accuracy` (is the sign of r_i right), `implicit_reward`.
    """
    per_token = implicit_rewards(
        torch.where(response_mask, log_probs, 0.0), torch.where(response_mask, ref_log_probs, 0.0), beta=beta
    )
    scores, outcome = per_token.sum(dim=1), correct.to(log_probs.dtype)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(scores, outcome, reduction="none")
    active = weights != 0
    metrics = {
        "implicit_accuracy": moments((scores > 0) == (outcome > 0.5), active),
        "implicit_reward": moments(scores, active),
    }
    return LossOutput((weights * losses).sum(), metrics)
