"""Rewards that compare texts: exact match, matching positions, format."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from megaverl.rewards.registry import register_reward
from megaverl.rewards.sample import RewardSample

FORMAT_MODES = ("search", "fullmatch")


def references(sample: RewardSample) -> list[str]:
    """The reference answers as texts: one, or any of a list.

    Raises:
        ValueError: the sample has none.
    """
    found = sample.reference if isinstance(sample.reference, list) else [sample.reference]
    if not found or found[0] is None:
        raise ValueError("the row has no reference answer; name its column with data.answer_key")
    return [str(reference) for reference in found]


@register_reward("exact_match")
def exact_match(sample: RewardSample, *, strip: bool = True, ignore_case: bool = False) -> float:
    """1 if the response is the reference (or one of a list of them), else 0."""
    return float(
        any(
            _plain(sample.response, strip, ignore_case) == _plain(text, strip, ignore_case)
            for text in references(sample)
        )
    )


def _plain(text: str, strip: bool, ignore_case: bool) -> str:
    text = text.strip() if strip else text
    return text.casefold() if ignore_case else text


@register_reward("positions")
def positions(sample: RewardSample, *, strip: bool = True) -> float:
    """Fraction of characters that are right where they stand, 0 to 1: credit for a nearly right answer.

    Counted over the longer of response and reference, so that a response too long or too short loses.
    """

    def matching(reference: str) -> float:
        response = _plain(sample.response, strip, ignore_case=False)
        longest = max(len(response), len(reference))
        same = sum(a == b for a, b in zip(response, reference, strict=False))
        return same / longest if longest else 1.0

    return max(matching(_plain(text, strip, ignore_case=False)) for text in references(sample))


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def _check_format(pattern: Any, mode: str = "search") -> None:
    if mode not in FORMAT_MODES:
        raise ValueError(f"mode is {mode!r}; it must be {' or '.join(FORMAT_MODES)}")
    try:
        _compiled(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression ({error})") from error


@register_reward("format", check=_check_format)
def response_format(sample: RewardSample, *, pattern: str, mode: str = "search") -> float:
    """1 if the regular expression `pattern` is found in the response (`fullmatch`: covers all of it), else 0.

    `.` matches line ends too. Example: `<think>.*</think>\\s*<answer>.*</answer>` with `mode: fullmatch`.
    """
    return float(getattr(_compiled(pattern), mode)(sample.response) is not None)
