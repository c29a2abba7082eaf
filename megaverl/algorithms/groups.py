"""Statistics over groups of samples (the responses to one prompt), whatever their order in the batch."""

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
