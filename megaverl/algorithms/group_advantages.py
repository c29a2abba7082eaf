"""Advantages relative to the other responses to the same prompt (GRPO and its relatives), and per turn of an episode.

GRPO and its relatives give every token of a response the same advantage. Shapes in all
of them:
    rewards: `[batch]` float, one score per response. DataError if one is not finite.
    group_ids: `[batch]` int64, equal for the responses to one prompt, in any order.
    response_mask: `[batch, response]` bool, the model's own tokens.
Returns: advantages `[batch, response]` in the dtype of `rewards`, 0 outside the mask;
no returns. A group of one, or one whose rewards are all equal, gets 0.

Estimators for turns treat a turn as one action whose tokens share its advantage. They
also read, only under the mask:
    token_rewards: `[batch, response]` float. A turn's reward is the sum over its tokens.
    turn_ids: `[batch, response]` int64, rising from 0 within a response. Text of the environment is outside the mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megaverl.algorithms.advantages import (
    Advantages,
    AllReduce,
    GroupStats,
    advantage_estimators,
    check_finite,
    gae,
    group_stats,
    group_totals,
    on_one_rank,
    suffix_scan,
    whiten,
)
from megaverl.errors import DataError


@advantage_estimators.register("grpo", of_groups=True)
def grpo(
    rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
    leave_one_out: bool = False,
) -> Advantages:
    """Compute GRPO's advantages with outcome supervision, arXiv 2402.03300, section 4.1.2 (in its text).

    A_i = (r_i - mean of the group) / (std of the group + eps), where std is the sample
    standard deviation (n - 1). Without `normalize_std` there is no division; see
    `dr_grpo`.

    Args:
        eps: added to the standard deviation.
        leave_one_out: use mean and deviation of the group's other responses. If these are all equal, nothing is
            divided, as in NeMo-RL by default (`use_leave_one_out_baseline`).
        For the others see the module.
    """
    check_finite("rewards", rewards)
    stats = group_stats(rewards, group_ids)
    if leave_one_out:
        gains, std = _next_to_the_others(stats, group_ids)
        divided = (
            torch.where(std > 0, gains / (std + eps), gains) if normalize_std else gains
        )
        return _same_for_all_tokens(divided, rewards, response_mask)
    per_sample = stats.centered / (stats.std + eps) if normalize_std else stats.centered
    return _same_for_all_tokens(per_sample, rewards, response_mask)


def _next_to_the_others(stats: GroupStats, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compare each reward with the others of its group.

    Returns:
        The reward minus the others' mean, and the others' sample standard deviation, each `[batch]`.
    """
    num_others = (stats.size - 1).clamp(min=1)
    gains = stats.centered * (stats.size / num_others)
    # Subtracting this sample's part from the group's sum of squares leaves the sum of
    # squares of the other samples around their mean.
    squares = group_totals(stats.centered.square(), group_ids) - stats.centered * gains
    # If the others are all equal, rounding leaves a residue. Up to 1e-12 of the group's
    # own sum of squares counts as 0.
    squares = squares.where(
        squares > 1e-12 * group_totals(stats.centered.square(), group_ids), 0.0
    )
    return gains, (squares / (num_others - 1).clamp(min=1)).sqrt()


@advantage_estimators.register("dr_grpo", of_groups=True)
def dr_grpo(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Advantages:
    """Compute Dr. GRPO, arXiv 2503.20783, section 3.2 (unnumbered): A_i = r_i - mean of the group, without dividing.

    The other part of the paper is the aggregation `fixed_length`.
    """
    return grpo(rewards, group_ids, response_mask, normalize_std=False)


@advantage_estimators.register("rloo", of_groups=True)
def rloo(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Advantages:
    """Compute REINFORCE leave-one-out, arXiv 2402.14740 (unnumbered): A_i = r_i - mean of the group's other rewards.

    It equals n / (n - 1) (r_i - mean of the group).
    """
    check_finite("rewards", rewards)
    stats = group_stats(rewards, group_ids)
    # The mean over the others differs from the group's mean by this factor: n / (n - 1)
    # (r - mean) = r - mean of others.
    factor = stats.size / (stats.size - 1).clamp(min=1)
    return _same_for_all_tokens(factor * stats.centered, rewards, response_mask)


@advantage_estimators.register("opo", of_groups=True)
def opo(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Advantages:
    """Compute on-policy RL with the optimal reward baseline, arXiv 2505.23585 (equation number not checked).

    A_i = r_i - sum_j l_j r_j / sum_j l_j. The mean weights each response by its length
    l_j, which minimizes the variance if the squared gradient of a response grows with
    its length. A group without any token gets 0.
    """
    check_finite("rewards", rewards)
    # The baseline shifts with the rewards, so centering first does not change the
    # result and keeps it accurate.
    centered = group_stats(rewards, group_ids).centered
    lengths = response_mask.sum(dim=1).double()
    baseline = group_totals(lengths * centered, group_ids) / group_totals(
        lengths, group_ids
    ).clamp(min=1)
    return _same_for_all_tokens(centered - baseline, rewards, response_mask)


@advantage_estimators.register("gpg", of_groups=True)
def gpg(
    rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    all_reduce: AllReduce | None = None,
    *,
    normalize_std: bool = False,
    eps: float = 1e-6,
) -> Advantages:
    """Compute group policy gradient, arXiv 2504.02546, with alpha of eq. 7 (of the rest: equation number not checked).

    A_i = alpha (r_i - mean of the group) / F, alpha = B / (B - M). M of the batch's B
    responses are in groups whose rewards are all equal. These have no gradient but
    count in the mean over the batch, which alpha compensates. F is 1, or with
    `normalize_std` the group's sample standard deviation + eps.
    """
    check_finite("rewards", rewards)
    stats = group_stats(rewards, group_ids)
    total = all_reduce or on_one_rank
    # Groups whose rewards are all equal have no gradient. alpha makes up for their
    # share of the batch.
    telling = total((group_totals(stats.centered.abs(), group_ids) > 0).sum())
    alpha = int(total(torch.tensor(len(rewards)))) / telling.clamp(min=1)
    scale = stats.std + eps if normalize_std else 1.0
    return _same_for_all_tokens(alpha * stats.centered / scale, rewards, response_mask)


@advantage_estimators.register("reinforce_plus_plus_baseline", of_groups=True)
def reinforce_plus_plus_baseline(
    rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    all_reduce: AllReduce | None = None,
) -> Advantages:
    """Compute REINFORCE++ with baseline, arXiv 2501.03262, appendix A of version 2.

    A_i = r_i - mean of the group, shifted and scaled to mean 0 and variance 1 over all
    tokens of the batch.
    """
    check_finite("rewards", rewards)
    plain = dr_grpo(rewards, group_ids, response_mask)
    return Advantages(
        whiten(plain.advantages, response_mask, all_reduce=all_reduce), None
    )


@advantage_estimators.register("gdpo")
def gdpo(
    component_rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    component_weights: Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> Advantages:
    """Compute group reward-decoupled normalization, arXiv 2601.05242, eqs. 4 to 6 (with weights: eq. 7 for 5).

    Each reward is normalized by itself. The GRPO advantages of all rewards are summed
    (with their weights), and the sums are scaled to mean 0 and deviation 1 over the
    responses of the batch. The deviation is that of a sample (n - 1), + eps.

    Args:
        component_rewards: `[batch, rewards]` float.
        component_weights: `[rewards]` float, weights of the sum. None: all 1.
        For the others see the module.
    """
    if component_rewards.dim() != 2 or not component_rewards.shape[1]:
        raise DataError(
            f"component_rewards must be [batch, rewards], found {list(component_rewards.shape)}"
        )
    check_finite("component_rewards", component_rewards.sum(dim=1))
    total = torch.zeros_like(component_rewards[:, 0], dtype=torch.float64)
    for k, column in enumerate(component_rewards.unbind(dim=1)):
        stats = group_stats(column, group_ids)
        weight = 1.0 if component_weights is None else float(component_weights[k])
        # Each reward is normalized on its own before the sum. Otherwise one with a
        # large spread would drown the others.
        total += weight * stats.centered / (stats.std + eps)
    # One group for the whole batch: the sum's spread depends on the number of rewards.
    everything = group_stats(total, torch.zeros_like(group_ids))
    return _same_for_all_tokens(
        everything.centered / (everything.std + eps), component_rewards, response_mask
    )


@advantage_estimators.register("pass_at_k", of_groups=True)
def pass_at_k_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    k: int,
    right_from: float = 1.0,
) -> Advantages:
    """Compute pass@k training, arXiv 2508.10751, section 2.4, its analytical form, eqs. 11, 12, 14 and 15.

    Groups of k count as one answer. Let m of a group's n responses be wrong. Over all
    subsets of k, the mean of "one is correct" is R = 1 - C(m, k) / C(n, k), with
    deviation s = sqrt(R (1 - R)). A response gets the mean advantage of the subsets
    that contain it: (1 - R) / s if it is correct, and (1 - R - C(m - 1, k - 1) / C(n -
    1, k - 1)) / s if it is wrong. All are 0 if s is 0.

    Args:
        k: at least 1, at most the group's size.
        right_from: a response is correct from this reward on.
        For the others see the module.

    Raises:
        DataError: a group has fewer than k responses.
    """
    check_finite("rewards", rewards)
    wrong = (rewards < right_from).double()
    sizes = group_totals(torch.ones_like(wrong), group_ids).tolist()
    # Binomial coefficients are computed with Python's integers, which do not overflow.
    numbers = group_totals(wrong, group_ids).tolist()
    if k < 1 or any(size < k for size in sizes):
        raise DataError(
            f"pass@{k} needs groups of at least {max(k, 1)} responses, found one of {int(min(sizes))}"
        )
    credits = [
        _pass_at_k_credit(int(n), int(m), k, is_wrong=bool(w))
        for n, m, w in zip(sizes, numbers, wrong.tolist(), strict=True)
    ]
    return _same_for_all_tokens(
        torch.tensor(credits, dtype=torch.float64), rewards, response_mask
    )


def _pass_at_k_credit(n: int, m: int, k: int, *, is_wrong: bool) -> float:
    """Return the advantage of one response, in a group of n with m wrong ones."""
    failing = math.comb(m, k) / math.comb(n, k)
    deviation = math.sqrt(failing * (1.0 - failing))
    if deviation == 0.0:
        return 0.0
    with_this_wrong = (
        math.comb(m - 1, k - 1) / math.comb(n - 1, k - 1) if is_wrong else 0.0
    )
    return (failing - with_this_wrong) / deviation


@advantage_estimators.register("best_of_group", of_groups=True)
def best_of_group(
    rewards: Tensor, group_ids: Tensor, response_mask: Tensor
) -> Advantages:
    """Compute the gain of the group's maximum by each response, arXiv 2503.19595 (equation number not checked).

    A_i = max_j r_j - max_{j != i} r_j. Only a single best response gets an advantage,
    its lead over the second: the policy gradient of the best of n.
    """
    check_finite("rewards", rewards)
    credit = torch.zeros_like(rewards, dtype=torch.float64)
    for group in group_ids.unique():
        members = (group_ids == group).nonzero()[:, 0]
        if len(members) > 1:
            best = rewards[members].double().topk(2)
            credit[members[best.indices[0]]] = best.values[0] - best.values[1]
    return _same_for_all_tokens(credit, rewards, response_mask)


@advantage_estimators.register("raft", of_groups=True)
def raft(
    rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    all_reduce: AllReduce | None = None,
    *,
    keep: int = 1,
    right_from: float | None = None,
) -> Advantages:
    """Compute RAFT's rejection sampling, arXiv 2304.06767, algorithm 1.

    The best responses of each group train like SFT data, the others not at all. Also
    the rejection sampling of arXiv 2307.09288, section 3.2.2. With the loss
    `policy_gradient` and the aggregation `token_mean` the update equals supervised
    fine-tuning on the kept responses: there A_t = (tokens of the batch) / (tokens that
    are kept), and 0 elsewhere.

    Args:
        keep: number of best responses to keep of each group. Among equal ones, the first are kept.
        right_from: keep none below this reward.
        For the others see the module.
    """
    check_finite("rewards", rewards)
    kept = torch.zeros_like(rewards, dtype=torch.bool)
    for group in group_ids.unique():
        members = (group_ids == group).nonzero()[:, 0]
        # A stable sort, so that equal rewards are kept in the order of the batch on
        # every device.
        order = torch.sort(
            rewards[members].double(), descending=True, stable=True
        ).indices[:keep]
        kept[members[order]] = True
    if right_from is not None:
        kept &= rewards >= right_from
    lengths = response_mask.sum(dim=1)
    total = all_reduce or on_one_rank
    # Makes up for the dropped responses: the mean over all tokens then equals that over
    # the kept ones.
    scale = total(lengths.sum()) / total(lengths[kept].sum()).clamp(min=1)
    return _same_for_all_tokens(kept.double() * scale, rewards, response_mask)


@advantage_estimators.register("nash_md", of_groups=True)
def nash_md(
    rewards: Tensor, group_ids: Tensor, response_mask: Tensor, *, scale: float = 0.0
) -> Advantages:
    """Compute Nash-MD-PG, arXiv 2312.00886, section 7 (equation number not checked): A_i = P(y_i > y') - 1/2.

    The paper's gradient is (P(y > y') - 1/2 - tau log(pi(y) / mu(y))) grad log pi(y),
    with y from pi and the opponent y' from the geometric mixture pi^(1 - beta) mu^beta.
    The last term is `algorithm.kl` in the loss, with k1 and `score_function`. P(y_i >
    y') is the mean over the group's opponents, which are the responses without any
    token in the mask. Without opponents, A is 0.

    Args:
        scale: 0: the higher reward is preferred, and equal ones by half each. Above 0: sigmoid((r - r') / scale)
            (Bradley-Terry).
        For the others see the module.
    """
    check_finite("rewards", rewards)
    # Opponents are in the batch only to be compared with. They train nothing, so their
    # mask is empty.
    opponents = ~response_mask.any(dim=1)
    pairs = (group_ids.unsqueeze(1) == group_ids) & opponents
    differences = rewards.double().unsqueeze(1) - rewards.double()
    # Without a scale the preference is a comparison: 1, 0, or 1/2 for a tie.
    preferred = (
        torch.sigmoid(differences / scale) if scale else (differences.sign() + 1) / 2
    )
    num_opponents = pairs.sum(dim=1).clamp(min=1)
    mean = torch.where(pairs, preferred - 0.5, 0.0).sum(dim=1) / num_opponents
    return _same_for_all_tokens(mean, rewards, response_mask)


def _same_for_all_tokens(
    per_sample: Tensor, like: Tensor, response_mask: Tensor
) -> Advantages:
    """Return advantages that give each token its sample's value."""
    return Advantages(
        torch.where(response_mask, per_sample.to(like.dtype).unsqueeze(1), 0.0), None
    )


@advantage_estimators.register("turn_gae")
def turn_gae(
    token_rewards: Tensor,
    values: Tensor,
    turn_ids: Tensor,
    response_mask: Tensor,
    last_values: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Advantages:
    """Compute GAE (arXiv 1506.02438, eq. 16) with turns as steps.

    arXiv 2402.19446 takes a whole utterance as the action in the same way. delta_k =
    R_k + gamma V_{k+1} - V_k, where V_k is the value at the turn's first token. After
    the last turn it is 0, or `last_values` for an episode that was cut off. Advantages
    and returns of a turn are repeated at all of its tokens.

    Args:
        values: `[batch, response]` float, V of the state in which each token was chosen.
        last_values: `[batch]` float, the value after each response's last token. None: 0.
        For the others see the module.

    Returns:
        Advantages and returns `[batch, response]` in the dtype of `values`, 0 outside the mask.
    """
    turns = _Turns(turn_ids, response_mask)
    result = gae(
        turns.sums(token_rewards),
        turns.firsts(values),
        turns.exist,
        last_values,
        gamma=gamma,
        lam=lam,
    )
    assert result.returns is not None  # GAE has them
    return Advantages(turns.spread(result.advantages), turns.spread(result.returns))


@advantage_estimators.register("turn_grpo")
def turn_grpo(
    token_rewards: Tensor,
    turn_ids: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Advantages:
    """Compute group-relative advantages per turn: each turn against the same turn of the others.

    It follows MT-GRPO (arXiv 2505.11821; equation number not checked), which normalizes
    each turn's rewards and the outcome's separately and adds them up. Here discounted
    sums of rewards are normalized instead.

    G_k = sum_{j >= k} gamma^(j - k) R_j; A_k = (G_k - mean) / (std + eps) over the
    group's responses that have a turn k. With one turn it is GRPO.

    Returns:
        Advantages `[batch, response]` in the dtype of `token_rewards`, 0 outside the mask; no returns.
    """
    turns = _Turns(turn_ids, response_mask)
    rewards = turns.sums(token_rewards)
    gains = suffix_scan(rewards, torch.full_like(rewards, gamma))
    advantages = torch.zeros_like(gains)
    # Turn k is compared with turn k of the group's other responses. Responses with
    # fewer turns drop out.
    for k in range(gains.shape[1]):
        rows = turns.exist[:, k].nonzero()[:, 0]
        stats = group_stats(gains[rows, k], group_ids[rows])
        scaled = stats.centered / (stats.std + eps) if normalize_std else stats.centered
        advantages[rows, k] = scaled.to(gains.dtype)
    return Advantages(turns.spread(advantages), None)


class _Turns:
    """Conversion between tokens `[batch, response]` and turns `[batch, most turns]`."""

    def __init__(self, turn_ids: Tensor, mask: Tensor) -> None:
        ids = torch.where(mask, turn_ids, 0)
        # Sums over turns need consecutive ids, so ids that fall are refused rather than
        # sorted.
        before = torch.where(mask, turn_ids, -1).cummax(dim=1).values
        if bool((ids < 0).any()) or bool((mask & (turn_ids < before)).any()):
            raise DataError(
                "turn_ids must not be negative, and must not fall within a response"
            )
        count = int(ids.max()) + 1 if ids.numel() else 0
        self.ids = ids
        self.mask = mask
        self.exist = torch.zeros(
            len(mask), count, dtype=torch.int64, device=mask.device
        )
        self.exist = self.exist.scatter_add(1, ids, mask.long()) > 0

    def sums(self, per_token: Tensor) -> Tensor:
        """Return the sum over each turn's tokens; 0 for a turn that does not exist."""
        kept = torch.where(self.mask, per_token, 0.0)
        return kept.new_zeros(self.exist.shape).scatter_add(1, self.ids, kept)

    def firsts(self, per_token: Tensor) -> Tensor:
        """Return the value at each turn's first token; 0 for a turn that does not exist."""
        length = self.mask.shape[1]
        columns = torch.where(
            self.mask, torch.arange(length, device=self.mask.device), length
        )
        first = torch.full(self.exist.shape, length, device=self.mask.device)
        # The smallest column with this turn's id.
        first = first.scatter_reduce(1, self.ids, columns, "amin")
        kept = torch.where(self.mask, per_token, 0.0)
        # The added column of zeros is what turns without a token read.
        return torch.cat([kept, kept.new_zeros(len(kept), 1)], dim=1).gather(1, first)

    def spread(self, per_turn: Tensor) -> Tensor:
        """Return each turn's value at all of its tokens, 0 outside the mask."""
        # gather refuses indices into an axis without entries, which a batch without
        # turns has.
        if not per_turn.shape[1]:
            return self.mask * 0.0
        return torch.where(self.mask, per_turn.gather(1, self.ids), 0.0)
