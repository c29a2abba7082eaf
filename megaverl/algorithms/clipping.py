"""Clipping of a gradient by its norm."""

from __future__ import annotations

_EPSILON = 1e-6


def clip_factor(norm: float, max_norm: float) -> float:
    """What a gradient of this norm is multiplied by, so that its norm is at most `max_norm`; 1 where it is.

    As megatron-core's `clip_grads.clip_grad_by_total_norm_fp32` has it, so that the numbers are the same.

    Args:
        max_norm: 0 or less: nothing is clipped.
    """
    return min(1.0, max_norm / (norm + _EPSILON)) if max_norm > 0 else 1.0
