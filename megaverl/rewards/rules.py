"""The built-in rules: the response's length, exact matches and formats, numbers and formulas."""

from __future__ import annotations

import importlib.util
import re
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from megaverl.rewards.math_worker import MathWorker
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


NUMBER = r"[-+]?\$?\s?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\$?\.\d+"
AFTER_HASHES = re.compile(rf"####\s*\$?\s*({NUMBER})")
ANY_NUMBER = re.compile(NUMBER)
METHODS = ("strict", "flexible")


def final_number(text: str, method: str = "strict") -> Decimal | None:
    """The number after the last `####`; `flexible`: failing that, the last number of the text; or None.

    Dollar signs and commas between thousands are allowed: `#### $1,234.50`.
    """
    found = AFTER_HASHES.findall(text)
    if not found and method == "flexible":
        found = ANY_NUMBER.findall(text)
    return _number(found[-1]) if found else None


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(re.sub(r"[$,\s]", "", text))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _check_gsm8k(method: str = "strict", format_score: float = 0.0) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be {' or '.join(METHODS)}")


@register_reward("gsm8k", check=_check_gsm8k)
def gsm8k(sample: RewardSample, *, method: str = "strict", format_score: float = 0.0) -> float:
    """1 for the reference's final number, `format_score` for another one, 0 for none.

    GSM8K (Cobbe et al. 2021, arXiv:2110.14168) ends every answer with `#### N`. The reference may be such an
    answer, the number alone, or a text without `####`, whose last number counts: "The answer is 42." Numbers are
    compared by value: 72 is 72.0.
    """
    [reference, *_] = references(sample)
    expected = final_number(reference)
    if expected is None and "####" not in reference:
        whole = _number(reference)
        expected = final_number(reference, "flexible") if whole is None else whole
    if expected is None:
        raise ValueError(f"the reference {reference[-60:]!r} has no number after '####', or none at all")
    found = final_number(sample.response, method)
    if found is None:
        return 0.0
    return 1.0 if found == expected else format_score


def _check_math_verify(timeout_seconds: float = 5.0) -> None:
    if timeout_seconds <= 0:
        raise ValueError(f"timeout_seconds is {timeout_seconds}; it must be more than 0")
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("the library is missing. Run: pip install math-verify[antlr4-13-2]")


@register_reward("math_verify", batched=True, check=_check_math_verify)
def math_verify(samples: list[RewardSample], *, timeout_seconds: float = 5.0) -> list[float]:
    """1 if the response's last formula or number equals the reference as mathematics (1/2 is 0.5), else 0.

    Decided by the library math-verify in a process of its own, for model output can make sympy compute for
    ever; what takes longer than `timeout_seconds` scores 0.
    """
    worker = MathWorker.shared()
    scores = []
    for sample in samples:
        verdicts = (worker.equal(text, sample.response, timeout_seconds) for text in references(sample))
        scores.append(float(any(verdicts)))
    return scores
