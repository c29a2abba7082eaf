"""Advantage estimators for tokens: GAE, returns minus a baseline, and token rewards.

Also statistics over groups of samples (the responses to one prompt), and the choice of
groups that dynamic sampling keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaverl.algorithms.registry import Registry, tensor_problem
from megaverl.errors import DataError


class GroupStats(NamedTuple):
    """Statistics of each sample's group, float64 `[batch]`.

    Attributes:
        centered: value minus the group's mean, exactly 0 if all values of the group are equal.
        std: sample standard deviation (n - 1), 0 for a group of one.
        size: size of the group.
    """

    centered: Tensor
    std: Tensor
    size: Tensor


def group_totals(values: Tensor, group_ids: Tensor) -> Tensor:
    """Return for each sample the sum of `values` `[batch, ...]` over its group, float64 of the same shape."""
    ids, index = torch.unique(group_ids, return_inverse=True)
    # float64, so that the order of the sum does not show in a float32 result.
    totals = values.new_zeros((len(ids), *values.shape[1:]), dtype=torch.float64)
    return totals.index_add(0, index, values.double())[index]


def group_stats(values: Tensor, group_ids: Tensor) -> GroupStats:
    """Compute statistics of `values` `[batch]` within groups that share an id in `group_ids` `[batch]` (int64)."""
    values = values.double()
    ids, index = torch.unique(group_ids, return_inverse=True)
    size = group_totals(torch.ones_like(values), group_ids)
    # Subtracting the group's smallest value first makes equal values exactly equal to
    # their mean, without rounding.
    least = values.new_full((len(ids),), torch.inf).scatter_reduce(
        0, index, values, "amin"
    )
    above = values - least[index]
    centered = above - group_totals(above, group_ids) / size
    std = (group_totals(centered.square(), group_ids) / (size - 1).clamp(min=1)).sqrt()
    return GroupStats(centered, std, size)


class KeptSamples(NamedTuple):
    """Samples that dynamic sampling keeps.

    Attributes:
        rows: int64, samples to train on: whole groups in the order of the batch.
        missing: number of groups that are still needed.
        silent: number of groups in the batch whose scores are all equal.
    """

    rows: Tensor
    missing: int
    silent: int


def keep_groups(
    scores: Tensor,
    group_ids: Tensor,
    prompt_ids: Tensor | None = None,
    *,
    wanted: int,
    last_round: bool = False,
) -> KeptSamples:
    """Return the first `wanted` groups whose scores differ, arXiv 2503.14476, section 3.2, eq. 11.

    The paper keeps a group if 0 < its correct answers < its size. With scores of 0 and
    1 that is the same. A group of one is never kept.

    A trainer calls this after every round of generation, with everything generated for
    the step so far, and generates `missing` more groups from the next prompts, up to
    its limit of rounds. With `last_round` the limit is reached: the first silent groups
    fill up what is missing (their advantages are 0), so that the batch keeps its size.

    Args:
        scores: `[batch]` float or bool, such as `Scores.correct` or the rewards before shaping. NaN means unknown; the
            others of the group decide.
        group_ids: `[batch]` int64, equal for the responses to one prompt.
        prompt_ids: `[batch]` int64, for prompts with several groups, such as one group per agent of an episode. They
            are kept or dropped together, and one group that differs is enough. None: each group is a prompt.
        wanted: prompts in a step, `data.prompts_per_step`.
    """
    if not len(scores):
        return KeptSamples(torch.zeros(0, dtype=torch.int64), wanted, 0)
    known = ~scores.isnan()
    # Infinite scores would all compare equal.
    check_finite("scores", torch.where(known, scores.double(), 0.0))
    differs = group_stats(scores[known].double(), group_ids[known]).std > 0
    units = group_ids if prompt_ids is None else prompt_ids
    # One group that differs is enough for a prompt with several groups.
    telling = _in_order(units[known][differs])
    silent = [unit for unit in _in_order(units) if unit not in set(telling)]
    chosen = telling[:wanted]
    missing = wanted - len(chosen)
    if last_round:
        chosen = chosen + silent[:missing]
        missing = wanted - len(chosen)
    kept = torch.isin(
        units, torch.tensor(chosen, dtype=torch.int64, device=units.device)
    )
    return KeptSamples(kept.nonzero()[:, 0], missing, len(silent))


def _in_order(group_ids: Tensor) -> list[int]:
    """Return the distinct ids in order of their first occurrence."""
    return list(dict.fromkeys(group_ids.tolist()))


def policy_filtration(
    rewards: Tensor, group_ids: Tensor, draws: Tensor | None = None
) -> Tensor:
    """Select the responses that PF-PPO trains on, arXiv 2409.06957 (from memory).

    Rewards are most reliable at the extremes, so the best and the worst response of
    each group are selected. With draws, the best and any other one.

    Args:
        rewards: `[batch]` float. A response with an unknown reward (NaN) is left out.
        group_ids: `[batch]` int64.
        draws: `[batch]` uniform random numbers. Among equal rewards, the first counts as the highest.

    Returns:
        `[batch]` bool.
    """
    keep = torch.zeros_like(group_ids, dtype=torch.bool)
    for group in group_ids.unique():
        members = ((group_ids == group) & ~rewards.isnan()).nonzero()[:, 0]
        if len(members):
            best, *others = members[
                rewards[members].argsort(descending=True, stable=True)
            ].tolist()
            keep[best] = True
            if others:
                keep[
                    others[-1]
                    if draws is None
                    else max(others, key=lambda row: float(draws[row]))
                ] = True
    return keep


class Advantages(NamedTuple):
    """Result of an advantage estimator.

    Attributes:
        advantages: `[batch, response]`, 0 outside the mask.
        returns: targets of the critic, or None.
    """

    advantages: Tensor
    returns: Tensor | None


def _problem(result: Any, inputs: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the result of a user's estimator, or None."""
    if not isinstance(result, Advantages):
        return (
            f"{type(result).__name__}; expected Advantages(advantages, returns or None)"
        )
    shape = inputs["response_mask"].shape
    wrong = tensor_problem(result.advantages, shape, "as advantages ")
    return wrong or (
        tensor_problem(result.returns, shape, "as returns ")
        if result.returns is not None
        else None
    )


advantage_estimators: Registry[Advantages] = Registry("advantage estimator", _problem)

# Function from this rank's sum to the sum over all ranks' samples.
AllReduce = Callable[[Tensor], Tensor]


def on_one_rank(value: Tensor) -> Tensor:
    """Return `value`: the sum over a batch that is whole on this rank."""
    return value


@advantage_estimators.register("gae", of_groups=True)
def gae(
    token_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    last_values: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Advantages:
    """Compute generalized advantage estimation, arXiv 1506.02438, eq. 16 (with delta as defined before eq. 10).

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum_l (gamma lam)^l delta_{t+l}, returns
    = A + V. The value after a response's last token is 0 (the episode is over), or
    `last_values` for a response that was cut off and is bootstrapped. Tokens outside
    the mask are skipped: the token before a hole is followed by the one after it.

    Args:
        token_rewards: `[batch, response]` float. Only values under the mask are read.
        values: `[batch, response]` float, V of the state in which the token was chosen. Only values under the mask are
            read.
        response_mask: `[batch, response]` bool.
        last_values: `[batch]` float, the value after each response's last token. None: 0.
        gamma: discount per token.
        lam: lambda of GAE. 1 gives returns minus values, 0 gives delta.

    Returns:
        Advantages and returns `[batch, response]` in the dtype of `values`, 0 outside the mask.
    """
    # Values outside the mask may be anything, NaN included. `where` keeps them out, a
    # product with 0 would not.
    rewards = torch.where(response_mask, token_rewards.to(values.dtype), 0.0)
    values = torch.where(response_mask, values, 0.0)
    after = (
        values.new_zeros(len(values))
        if last_values is None
        else last_values.to(values.dtype)
    )
    # The next state is the next token under the mask: tool output in between is no
    # action.
    deltas = rewards + gamma * _next_under_mask(values, response_mask, after) - values
    # A hole in the mask passes on the later sum undiminished.
    decay = torch.ones_like(values).masked_fill(response_mask, gamma * lam)
    advantages = suffix_scan(torch.where(response_mask, deltas, 0.0), decay)
    advantages = torch.where(response_mask, advantages, 0.0)
    return Advantages(advantages, advantages + values)


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    all_reduce: AllReduce | None = None,
) -> Tensor:
    """Scale values under the mask to variance 1 and, with `shift_mean`, shift them to mean 0.

    Returns 0 outside the mask.

    Mean and population variance are computed in float64 over the whole mask, so pass
    the whole (mini-)batch; or, with `all_reduce`, this rank's samples of it. A constant
    becomes 0 with `shift_mean`, and an empty mask gives zeros. Source: the usual
    advantage normalization of PPO, studied in arXiv 2006.05990.

    Args:
        values: `[batch, response]` float.
        mask: `[batch, response]` bool.
        eps: added to the variance.
    """
    total = all_reduce or on_one_rank
    kept = torch.where(mask, values.double(), 0.0)
    count = total(mask.sum()).clamp(min=1)
    mean = total(kept.sum()) / count
    # Two passes, since sum of squares minus square of the sum loses digits for a small
    # variance.
    centered = torch.where(mask, kept - mean, 0.0)
    scale = (total(centered.square().sum()) / count + eps).rsqrt()
    return ((centered if shift_mean else kept) * scale).to(values.dtype)


def rewards_to_go(
    token_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0
) -> Tensor:
    """Return G_t = sum_{s >= t} gamma^(s - t) r_s over the tokens under the mask. Holes are skipped.

    Args:
        token_rewards: `[batch, response]` float. Only values under the mask are read.
        response_mask: `[batch, response]` bool.

    Returns:
        `[batch, response]` in the dtype of the rewards, 0 outside the mask.
    """
    rewards = torch.where(response_mask, token_rewards, 0.0)
    decay = torch.ones_like(rewards).masked_fill(response_mask, gamma)
    return torch.where(response_mask, suffix_scan(rewards, decay), 0.0)


def _next_under_mask(values: Tensor, mask: Tensor, after: Tensor) -> Tensor:
    """Return for each position the value at the next one under the mask, or `after` `[batch]` if there is none."""
    length = values.shape[1]
    columns = torch.arange(length, device=values.device).expand_as(mask)
    # The value `length` means that there is none.
    at_or_after = torch.where(mask, columns, length).flip(1).cummin(1).values.flip(1)
    beyond = torch.full_like(at_or_after[:, :1], length)
    following = torch.cat([at_or_after[:, 1:], beyond], dim=1)[:, :length]
    return torch.cat([values, after.unsqueeze(1)], dim=1).gather(1, following)


def suffix_scan(terms: Tensor, decay: Tensor) -> Tensor:
    """Return x_t = terms_t + decay_t x_{t+1} along dim 1, by doubling: log2(length) passes, and no loop over tokens."""
    total = terms
    factor = decay
    step = 1
    while step < terms.shape[1]:
        # total_t covers `step` terms from t on, and factor_t is the product of their
        # decays.
        longer_total = total[:, :-step] + factor[:, :-step] * total[:, step:]
        longer_factor = factor[:, :-step] * factor[:, step:]
        # The last `step` positions have all their terms already.
        total = torch.cat([longer_total, total[:, -step:]], dim=1)
        factor = torch.cat([longer_factor, torch.zeros_like(factor[:, -step:])], dim=1)
        step *= 2
    return total


def token_rewards(
    rewards: Tensor,
    response_mask: Tensor,
    kl: Tensor | None = None,
    *,
    kl_coef: float = 0.0,
) -> Tensor:
    """Return the score at each response's last token, minus `kl_coef` x KL at every token.

    Source: arXiv 2203.02155, section 3.5: the term of its eq. 2 (without that of
    pretraining), there added token by token; R = r - beta log(pi / rho) is from arXiv
    1909.08593, section 2 (equation number not checked). An empty response has no token
    for its score, which is dropped.

    Args:
        rewards: `[batch]` float, one score per response.
        response_mask: `[batch, response]` bool.
        kl: `[batch, response]` float, per-token estimates (see `kl`). Only values under the mask are read.

    Returns:
        `[batch, response]` in the dtype of `rewards`, 0 outside the mask, on the device of `kl` if it is used.

    Raises:
        DataError: a score is not finite.
    """
    check_finite("rewards", rewards)
    columns = torch.arange(response_mask.shape[1], device=response_mask.device)
    # -1 for an empty response, which no column equals.
    last = (
        torch.where(response_mask, columns, -1).amax(dim=1, keepdim=True)
        if len(columns)
        else columns
    )
    result = torch.where(response_mask & (columns == last), rewards.unsqueeze(1), 0.0)
    if kl is not None and kl_coef:
        kept = torch.where(response_mask.to(kl.device), kl.to(rewards.dtype), 0.0)
        result = result.to(kl.device) - kl_coef * kept
    return result


def check_finite(name: str, per_sample: Tensor) -> None:
    """Check that the numbers of all samples are finite.

    Raises:
        DataError: names the first sample with NaN or infinity.
    """
    wrong = (~torch.isfinite(per_sample)).nonzero()
    if len(wrong):
        sample = int(wrong[0, 0])
        raise DataError(
            f"{name} of sample {sample} is {per_sample[sample].item()} ({len(wrong)} of {len(per_sample)} "
            "samples are not finite); look at the reward function"
        )


def non_finite_token(name: str, values: Tensor, mask: Tensor) -> str | None:
    """Return a sentence that names the first token under the mask with NaN or infinity, or None if all are finite.

    Args:
        name: name of the values, for the sentence.
        values: `[batch, response]` float, or `[batch]`.
        mask: `[batch, response]` bool.
    """
    wrong = ~torch.isfinite(values)
    if values.dim() == 1:
        rows = (wrong & mask.any(dim=1)).nonzero()
        return (
            f"{name} of sample {int(rows[0])} is {float(values[int(rows[0])])}."
            if len(rows)
            else None
        )
    places = (wrong & mask).nonzero()
    if not len(places):
        return None
    sample, token = places[0].tolist()
    value = float(values[sample, token])
    count = len(places)
    return f"{name} of sample {sample} is {value} at response token {token} ({count} of {int(mask.sum())} tokens)."


def check_finite_tokens(mask: Tensor, **values: Tensor) -> None:
    """Check that all values under the mask are finite.

    Raises:
        DataError: see `non_finite_token`.
    """
    for name, tensor in values.items():
        if problem := non_finite_token(name, tensor, mask):
            raise DataError(
                f"{problem} Look at the reward function, the advantage estimator and the model's log-probs."
            )


@advantage_estimators.register("reinforce_plus_plus", of_groups=True)
def reinforce_plus_plus(
    token_rewards: Tensor,
    response_mask: Tensor,
    all_reduce: AllReduce | None = None,
    *,
    gamma: float = 1.0,
) -> Advantages:
    """Compute REINFORCE++, arXiv 2501.03262, eq. 8 to 10 of version 2: rewards-to-go, normalized over the whole batch.

    A_t = sum_{s >= t} gamma^(s - t) r_s, shifted and scaled to mean 0 and variance 1
    over all tokens. It needs no groups. The KL penalty belongs in the token rewards
    (`algorithm.kl.in: reward`).

    Args:
        token_rewards: `[batch, response]` float. Only values under the mask are read.
        response_mask: `[batch, response]` bool.

    Returns:
        Advantages `[batch, response]`, 0 outside the mask; no returns.
    """
    gains = rewards_to_go(token_rewards, response_mask, gamma)
    return Advantages(whiten(gains, response_mask, all_reduce=all_reduce), None)


@advantage_estimators.register("remax", of_groups=True)
def remax(
    token_rewards: Tensor,
    greedy_rewards: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
) -> Advantages:
    """Compute ReMax, arXiv 2310.10505 (equation number not checked): the baseline is the reward of a greedy response.

    A_t = sum_{s >= t} gamma^(s - t) r_s - reward of the greedy response to the same
    prompt.

    Args:
        token_rewards: `[batch, response]` float. Only values under the mask are read.
        greedy_rewards: `[batch]` float, score of the greedy response to each sample's prompt.
        response_mask: `[batch, response]` bool.

    Returns:
        Advantages `[batch, response]`, 0 outside the mask; no returns.

    Raises:
        DataError: a greedy reward is not finite.
    """
    check_finite("greedy_rewards", greedy_rewards)
    gains = rewards_to_go(
        token_rewards, response_mask, gamma
    ) - greedy_rewards.unsqueeze(1)
    return Advantages(
        torch.where(response_mask, gains, 0.0).to(token_rewards.dtype), None
    )


@advantage_estimators.register("optimal_token_baseline", of_groups=True)
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
    """Compute the optimal token baseline, arXiv 2602.07078 (equation number not checked).

    At each position it is the minimum-variance baseline of the group: A_t = G_t - B_t,
    B_t = sum_i G_t W_t / (sum_i W_t
    + eps) over the group's responses that have a token at position t. G_t is the reward-to-go. W_t = sum_{s <= t} of
    the squared norm of the score, which the paper approximates by that of its logits, 1 - 2 pi(y_s) + sum_v pi(v)^2
    (see `score_norms`). A group of one gets 0.

    If one response is longer than all others of its group, the equation makes it its
    own baseline. Its tail gets 0, and learns nothing from a reward at its end. With
    `handle_zero_tail`, like verl's option of this name (True there), the baseline is 0
    once one response is left, and the tail gets its whole reward-to-go.

    Args:
        token_rewards, score_norms: `[batch, response]` float. Only values under the mask are read.
        group_ids: `[batch]` int64.
        response_mask: `[batch, response]` bool.
        eps: added to the sum of weights.
        handle_zero_tail: no baseline where a group has one response left.

    Returns:
        Advantages `[batch, response]`, 0 outside the mask; no returns.
    """
    gains = rewards_to_go(token_rewards, response_mask, gamma).double()
    # The baseline of a token weights each response by the squared norm of its gradient
    # up to that token.
    norms = torch.where(response_mask, score_norms.double(), 0.0).cumsum(dim=1)
    norms = torch.where(response_mask, norms, 0.0)
    baseline = group_totals(gains * norms, group_ids) / (
        group_totals(norms, group_ids) + eps
    )
    if handle_zero_tail:
        baseline = baseline * (group_totals(response_mask.double(), group_ids) != 1)
    is_single = group_totals(torch.ones_like(group_ids), group_ids).unsqueeze(1) < 2
    # A product instead of torch.where: a reward that is not finite must show in a group
    # of one too.
    advantages = torch.where(response_mask, (gains - baseline) * ~is_single, 0.0)
    return Advantages(advantages.to(token_rewards.dtype), None)


def score_norms(log_probs: Tensor, squared_probs: Tensor) -> Tensor:
    """Return |onehot(y) - pi|^2 = 1 - 2 pi(y) + sum_v pi(v)^2, the squared gradient of log pi(y) by the logits.

    Args:
        log_probs: `[batch, response]` float, of the sampled tokens.
        squared_probs: `[batch, response]` float, sum of pi^2 over the vocabulary.
    """
    return 1.0 - 2.0 * log_probs.exp() + squared_probs
