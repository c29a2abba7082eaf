"""Losses of the critic."""

from __future__ import annotations

import torch
from torch import Tensor

from megaverl.algorithms.loss import LossOutput, loss_problem
from megaverl.algorithms.metrics import moments
from megaverl.algorithms.registry import Registry

value_losses: Registry[LossOutput] = Registry("value loss", loss_problem)


@value_losses.register("clipped")
def clipped(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip_range: float | None = 0.2
) -> LossOutput:
    """Squared error, with the value kept near what it was, arXiv 2005.12729, section 3 ("value clipping").

    loss = sum_t weight_t 1/2 max((V - R)^2, (V_clip - R)^2), V_clip = V_old + clip(V - V_old, +-clip_range).
    The maximum takes the gradient away from a value that has already moved `clip_range` towards its target.

    Args (all `[batch, response]`):
        values: float, of the critic being trained; the gradient flows here.
        old_values: float, of the critic at the start of the update.
        returns: float, the targets.
        weights: float, from `aggregation`; where 0 the other inputs may be anything, NaN included.
        clip_range: in units of the value; None for the plain squared error.

    Metrics: `value_clip_fraction`, `values`, `returns`, `value_error`; the last two also give
    `explained_variance`.
    """
    active = weights != 0
    values = torch.where(active, values, 0.0)
    old_values = torch.where(active, old_values, 0.0)
    returns = torch.where(active, returns, 0.0)
    error = (values - returns).square()
    limited = error
    if clip_range is not None:
        moved = values - old_values
        clipped_error = (old_values + moved.clamp(-clip_range, clip_range) - returns).square()
        limited = torch.where(moved.abs() > clip_range, clipped_error, error)  # else they differ by rounding alone
    loss = 0.5 * (weights * torch.maximum(error, limited)).sum()
    metrics = {
        "value_clip_fraction": moments(limited > error, active),
        "values": moments(values, active),
        "returns": moments(returns, active),
        "value_error": moments(returns - values, active),
    }
    return LossOutput(loss, metrics)
