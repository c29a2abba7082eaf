"""Advantages from the rewards-to-go of a response, less a baseline that no critic has to learn."""

from __future__ import annotations

import torch
from torch import Tensor

from megaverl.algorithms.advantages import Advantages, advantage_estimators, rewards_to_go, whiten
from megaverl.algorithms.groups import group_totals
from megaverl.algorithms.token_rewards import check_finite


@advantage_estimators.register("reinforce_plus_plus")
def reinforce_plus_plus(token_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0) -> Advantages:
    """REINFORCE++, arXiv 2501.03262, eq. 8 to 10 of version 2: rewards-to-go, normalised over the whole batch.

    A_t = sum_{s >= t} gamma^(s - t) r_s, shifted and scaled to mean 0 and variance 1 over all tokens. It needs no
    groups. The KL penalty belongs into the token rewards (`algorithm.kl.in: reward`).

    Args:
        token_rewards: `[batch, response]` float, read under the mask only. response_mask: `[batch, response]` bool.

    Returns: advantages `[batch, response]`, 0 outside the mask; no returns.
    """
    return Advantages(whiten(rewards_to_go(token_rewards, response_mask, gamma), response_mask), None)


@advantage_estimators.register("remax")
def remax(token_rewards: Tensor, greedy_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0) -> Advantages:
    """ReMax, arXiv 2310.10505 (equation number not checked): the baseline is the reward of the greedy response to the
    same prompt.

    A_t = sum_{s >= t} gamma^(s - t) r_s - greedy reward.

    Args:
        token_rewards: `[batch, response]` float, read under the mask only. response_mask: `[batch, response]` bool.
        greedy_rewards: `[batch]` float, the score of the greedy response to each sample's prompt.

    Returns: advantages `[batch, response]`, 0 outside the mask; no returns.

    Raises:
        DataError: a greedy reward that is not finite.
    """
    check_finite("greedy_rewards", greedy_rewards)
    gains = rewards_to_go(token_rewards, response_mask, gamma) - greedy_rewards.unsqueeze(1)
    return Advantages(torch.where(response_mask, gains, 0.0).to(token_rewards.dtype), None)


@advantage_estimators.register("optimal_token_baseline")
def optimal_token_baseline(
    token_rewards: Tensor,
    score_norms: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    eps: float = 1e-8,
    handle_zero_tail: bool = False,
) -> Advantages:
    """The optimal token baseline, arXiv 2602.07078 (equation number not checked): at each position the variance-minimal
    baseline of the group.

    A_t = G_t - B_t, B_t = sum_i G_t W_t / (sum_i W_t + eps) over the group's responses that have a token at position t,
    with G_t the reward-to-go and W_t = sum_{s <= t} of the squared norm of the score, which the paper approximates by
    that of its logits, 1 - 2 pi(y_s) + sum_v pi(v)^2 (see `score_norms`). A group of one gets 0.

    Where one response is longer than all others of its group, the equation makes it its own baseline: its tail gets 0,
    and learns nothing from a reward that stands at its end. With `handle_zero_tail`, as with verl's option of this name
    (True there), the baseline is 0 where one response is left, and the tail gets its whole reward-to-go.

    Args:
        token_rewards, score_norms: `[batch, response]` float, read under the mask only.
        group_ids: `[batch]` int64. response_mask: `[batch, response]` bool. eps: added to the sum of weights.
        handle_zero_tail: no baseline where a group has one response left.

    Returns: advantages `[batch, response]`, 0 outside the mask; no returns.
    """
    gains = rewards_to_go(token_rewards, response_mask, gamma).double()
    norms = torch.where(response_mask, score_norms.double(), 0.0).cumsum(dim=1)
    norms = torch.where(response_mask, norms, 0.0)
    baseline = group_totals(gains * norms, group_ids) / (group_totals(norms, group_ids) + eps)
    if handle_zero_tail:
        baseline = torch.where(group_totals(response_mask.double(), group_ids) == 1, 0.0, baseline)
    alone = group_totals(torch.ones_like(group_ids), group_ids).unsqueeze(1) < 2
    advantages = torch.where(response_mask & ~alone, gains - baseline, 0.0)
    return Advantages(advantages.to(token_rewards.dtype), None)


def score_norms(log_probs: Tensor, squared_probs: Tensor) -> Tensor:
    """|onehot(y) - pi|^2 = 1 - 2 pi(y) + sum_v pi(v)^2: the squared gradient of log pi(y) by the logits.

    Args: `[batch, response]` float; log_probs: of the sampled tokens; squared_probs: sum over the vocabulary of pi^2.
    """
    return 1.0 - 2.0 * log_probs.exp() + squared_probs
