"""Rewards for answers that are numbers or formulas."""

from __future__ import annotations

import importlib.util
import re
from decimal import Decimal, InvalidOperation

from megaverl.rewards.matching import references
from megaverl.rewards.math_worker import MathWorker
from megaverl.rewards.registry import register_reward
from megaverl.rewards.sample import RewardSample

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
