"""Rewards that look at the length of the response, in tokens."""

from __future__ import annotations

from megaverl.rewards.registry import register_reward
from megaverl.rewards.sample import RewardSample


def _num_tokens(sample: RewardSample) -> int:
    if sample.num_tokens is None:
        raise ValueError("the number of tokens of the response is not known here (RewardSample.num_tokens is None)")
    return sample.num_tokens


def _check_overlong(max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> None:
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"buffer_tokens is {buffer_tokens}; it must be at least 1 and at most max_tokens ({max_tokens})"
        )
    if penalty < 0:
        raise ValueError(f"penalty is {penalty}; give its size, at least 0")


@register_reward("soft_overlong", check=_check_overlong)
def soft_overlong(sample: RewardSample, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> float:
    """0 up to `max_tokens - buffer_tokens`, then falling in a line to `-penalty` at `max_tokens`.

    DAPO (Yu et al. 2025, arXiv:2503.14476), equation 13: soft overlong punishment.
    """
    over = _num_tokens(sample) - (max_tokens - buffer_tokens)
    return -penalty * min(max(over / buffer_tokens, 0.0), 1.0)


def _check_linear(max_tokens: int, free_tokens: int = 0) -> None:
    if not 0 <= free_tokens < max_tokens:
        raise ValueError(f"free_tokens is {free_tokens}; it must be at least 0 and less than max_tokens ({max_tokens})")


@register_reward("length_linear", check=_check_linear)
def length_linear(sample: RewardSample, *, max_tokens: int, free_tokens: int = 0) -> float:
    """0 up to `free_tokens`, then falling in a straight line to -1 at `max_tokens` and on below it."""
    return -max(_num_tokens(sample) - free_tokens, 0) / (max_tokens - free_tokens)


@register_reward("finished")
def finished(sample: RewardSample) -> float:
    """1 if the model ended its response itself, 0 if it was cut off."""
    if sample.finish_reason is None:
        raise ValueError("why the response ended is not known here (RewardSample.finish_reason is None)")
    return float(sample.finish_reason == "stop")
