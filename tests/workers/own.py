"""Parts of an update as a user writes them, named module:function in a configuration."""

from __future__ import annotations

import torch
from torch import Tensor

from megaverl.algorithms import LossOutput, moments


def squared(
    values: Tensor, returns: Tensor, weights: Tensor, *, scale: float = 1.0
) -> LossOutput:
    """A value loss without a clip."""
    error = torch.where(weights != 0, values - returns, 0.0)
    return LossOutput(
        scale * (weights * error.square()).sum(),
        {"own_error": moments(error, weights != 0)},
    )


def every_other(response_mask: Tensor, *, offset: int = 0) -> Tensor:
    """A token selector."""
    return response_mask & ((response_mask.cumsum(dim=1) + offset) % 2 == 0)
