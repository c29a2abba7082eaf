"""Groups of samples (the responses to one prompt): statistics over them, and which ones dynamic sampling keeps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GroupStats(NamedTuple):
    """Per sample, the statistics of the group that it belongs to; float64 `[batch]`."""

    centered: Tensor  # value minus the group's mean; exactly 0 where all of the group are equal
    std: Tensor  # sample standard deviation (n - 1); 0 for a group of one
    size: Tensor


def group_totals(values: Tensor, group_ids: Tensor) -> Tensor:
    """Per sample, the sum of `values` `[batch, ...]` over its group: the same shape, float64."""
    ids, index = torch.unique(group_ids, return_inverse=True)
    totals = values.new_zeros((len(ids), *values.shape[1:]), dtype=torch.float64)
    return totals.index_add(0, index, values.double())[index]


def group_stats(values: Tensor, group_ids: Tensor) -> GroupStats:
    """Center `values` `[batch]` within the groups that share an id in `group_ids` `[batch]` (int64)."""
    values = values.double()
    ids, index = torch.unique(group_ids, return_inverse=True)
    size = group_totals(torch.ones_like(values), group_ids)
    # Counting from the group's least value makes equal values exactly equal to their mean, without rounding.
    least = values.new_full((len(ids),), torch.inf).scatter_reduce(0, index, values, "amin")
    above = values - least[index]
    centered = above - group_totals(above, group_ids) / size
    std = (group_totals(centered.square(), group_ids) / (size - 1).clamp(min=1)).sqrt()
    return GroupStats(centered, std, size)


class KeptSamples(NamedTuple):
    """rows: int64, the samples to train on, whole groups in the order of the batch.

    missing: groups that are still wanted. silent: groups of the batch whose scores are all equal.
    """

    rows: Tensor
    missing: int
    silent: int


def keep_groups(
    scores: Tensor, group_ids: Tensor, prompt_ids: Tensor | None = None, *, wanted: int, last_round: bool = False
) -> KeptSamples:
    """The first `wanted` groups whose scores differ, arXiv 2503.14476, section 3.2, eq. 11.

    There a group is kept if 0 < its right answers < its size; with scores of 0 and 1 that is the same as scores that
    differ. A group of one never tells anything.

    A trainer calls it after every round of generation, on all that was generated for the step so far, and generates
    `missing` more groups from the next prompts, up to its bound of rounds. With `last_round` the bound is reached: the
    first silent groups make up what is missing (their advantages are 0), so that the batch keeps its size.

    Args:
        scores: `[batch]` float or bool, such as `Scores.correct` or the rewards before shaping. NaN: not known; the
            others of its group decide.
        group_ids: `[batch]` int64, equal for the responses to one prompt.
        prompt_ids: `[batch]` int64, where a prompt has several groups, as each of several agents has one of every
            episode: they stand and fall together, and one that differs is enough. None: each group is a prompt.
        wanted: prompts in a step, `data.prompts_per_step`.
    """
    if not len(scores):
        return KeptSamples(torch.zeros(0, dtype=torch.int64), wanted, 0)
    known = ~scores.isnan()
    differs = group_stats(scores[known].double(), group_ids[known]).std > 0
    units = group_ids if prompt_ids is None else prompt_ids
    telling = _in_order(units[known][differs])
    silent = [unit for unit in _in_order(units) if unit not in set(telling)]
    chosen = telling[:wanted]
    missing = wanted - len(chosen)
    if last_round:
        chosen = chosen + silent[:missing]
        missing = wanted - len(chosen)
    kept = torch.isin(units, torch.tensor(chosen, dtype=torch.int64, device=units.device))
    return KeptSamples(kept.nonzero()[:, 0], missing, len(silent))


def _in_order(group_ids: Tensor) -> list[int]:
    """The ids that occur, each once, by their first place."""
    return list(dict.fromkeys(group_ids.tolist()))


def policy_filtration(rewards: Tensor, group_ids: Tensor, draws: Tensor | None = None) -> Tensor:
    """The responses that PF-PPO trains on, arXiv 2409.06957 (from memory): rewards are surest at the ends, so of each
    group the best response and the worst; with draws, the best and any other one.

    Args (`[batch]`): rewards: float; one that is NaN is not known, and its response is left out. group_ids: int64.
        draws: uniform random numbers. Of equal rewards the first counts as the higher one.

    Returns: `[batch]` bool.
    """
    keep = torch.zeros_like(group_ids, dtype=torch.bool)
    for group in group_ids.unique():
        members = ((group_ids == group) & ~rewards.isnan()).nonzero()[:, 0]
        if len(members):
            best, *others = members[rewards[members].argsort(descending=True, stable=True)].tolist()
            keep[best] = True
            if others:
                keep[others[-1] if draws is None else max(others, key=lambda row: float(draws[row]))] = True
    return keep
