"""Statistics of an evaluation: avg@k, maj@k and pass@k of each prompt, their intervals, and paired comparisons.

Every score is first computed per prompt and then averaged over prompts. Prompts are independent draws from a
population of questions, the samples of one prompt are not. So the standard error of a mean is the deviation of the
per-prompt scores over the square root of the number of prompts (Miller 2024, arXiv 2411.00640).
Intervals and p-values follow Student's t-distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megaverl.algorithms.loss import pass_at_k

CONFIDENCE = 0.95


@dataclass(frozen=True)
class PromptScores:
    """Results of all samples of one prompt.

    Attributes:
        correct: whether each sample is right.
        answers: each sample's answer in a normal form, None for a sample without an answer. Empty: the suite has no
            answers that could be counted, as for programs.
    """

    correct: tuple[bool, ...]
    answers: tuple[str | None, ...] = ()

    @property
    def average(self) -> float:
        """Share of the samples that are right (avg@k)."""
        return sum(self.correct) / len(self.correct)

    def passed(self, k: int) -> float:
        """Return the probability that at least one of k samples is right (pass@k)."""
        return pass_at_k(len(self.correct), sum(self.correct), k)

    def majority(self, k: int) -> float:
        """Return the share of the blocks of k samples whose most frequent answer is right (maj@k).

        The blocks are consecutive and disjoint, so that the estimate is unbiased.
        Remaining samples are left out.

        Raises:
            ValueError: k is not 1 to the number of samples, or the samples have no answers.
        """
        if not 1 <= k <= len(self.correct) or len(self.answers) != len(self.correct):
            raise ValueError(
                f"maj@{k} of {len(self.correct)} samples with {len(self.answers)} answers is not defined"
            )
        starts = range(0, len(self.correct) - k + 1, k)
        blocks = [
            _majority_of(
                self.answers[start : start + k], self.correct[start : start + k]
            )
            for start in starts
        ]
        return sum(blocks) / len(blocks)


# Stands for every right answer in a vote. Two answers that both equal the reference are
# the same, however written.
_RIGHT = object()


def _majority_of(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Return whether the most frequent answer is right; with several of them, the share of those that are right.

    Samples without an answer do not vote.
    """
    votes: dict[object, int] = {}
    for answer, is_right in zip(answers, correct, strict=True):
        key = _RIGHT if is_right else answer
        if key is not None:
            votes[key] = votes.get(key, 0) + 1
    most = max(votes.values(), default=0)
    leaders = [key for key, count in votes.items() if count == most]
    return (_RIGHT in leaders) / len(leaders) if leaders else 0.0


@dataclass(frozen=True)
class Estimate:
    """Mean over prompts with its confidence interval and standard error."""

    value: float
    low: float
    high: float
    error: float
    num_prompts: int


def mean_with_interval(
    values: Sequence[float], confidence: float = CONFIDENCE
) -> Estimate:
    """Return the mean of scores between 0 and 1, one of each prompt, with its interval.

    If all scores are 0, or all are 1, the deviation is 0 and bounds nothing. The interval
    is then the exact one of a binomial proportion (Clopper and Pearson 1934).

    Raises:
        ValueError: there are no scores.
    """
    count = len(values)
    if count == 0:
        raise ValueError("there are no scores")
    mean = math.fsum(values) / count
    if mean in (0.0, 1.0):
        beyond = ((1 - confidence) / 2) ** (1 / count)
        low, high = (0.0, 1 - beyond) if mean == 0.0 else (beyond, 1.0)
        return Estimate(mean, low, high, 0.0, count)
    if count == 1:
        return Estimate(mean, 0.0, 1.0, math.nan, 1)
    error = _standard_error(values, mean)
    reach = student_quantile((1 + confidence) / 2, count - 1) * error
    return Estimate(mean, max(0.0, mean - reach), min(1.0, mean + reach), error, count)


@dataclass(frozen=True)
class PairedDifference:
    """Mean difference of two evaluations over the same prompts.

    Attributes:
        value: mean of (after - before).
        low, high: confidence interval.
        p_value: two-sided p-value of a paired t-test. 1.0 if all differences are 0, NaN for a single prompt.
        num_prompts: prompts that both evaluations have.
    """

    value: float
    low: float
    high: float
    p_value: float
    num_prompts: int


def paired_difference(
    before: Mapping[str, float],
    after: Mapping[str, float],
    confidence: float = CONFIDENCE,
) -> PairedDifference:
    """Return the difference of two evaluations, paired over the prompts that both have.

    Pairing removes the deviation of the prompts' difficulty, which both evaluations
    share (Miller 2024, arXiv 2411.00640).

    Args:
        before, after: score of each prompt, by the prompt's identity.

    Raises:
        ValueError: they have no prompt in common.
    """
    common = [prompt for prompt in after if prompt in before]
    if not common:
        raise ValueError("the two evaluations have no prompt in common")
    differences = [after[prompt] - before[prompt] for prompt in common]
    count = len(differences)
    mean = math.fsum(differences) / count
    if count == 1:
        return PairedDifference(mean, -1.0, 1.0, math.nan, 1)
    error = _standard_error(differences, mean)
    # All prompts differ by the same amount.
    if error == 0.0:
        return PairedDifference(mean, mean, mean, 1.0 if mean == 0.0 else 0.0, count)
    reach = student_quantile((1 + confidence) / 2, count - 1) * error
    p_value = 2 * (1 - student_cdf(abs(mean / error), count - 1))
    return PairedDifference(mean, mean - reach, mean + reach, p_value, count)


def _standard_error(values: Sequence[float], mean: float) -> float:
    """Return the standard error of a mean, from the deviation with n - 1."""
    squares = math.fsum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - 1) / len(values))


def student_cdf(t: float, freedom: int) -> float:
    """Return the distribution function of Student's t with `freedom` degrees of freedom.

    It is a finite sum for whole degrees (Abramowitz and Stegun 1964, eqs. 26.7.3 and
    26.7.4).
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    # The terms are cos^j with the factors 1, 2/3, 2*4/(3*5), ... (odd) or 1, 1/2,
    # 1*3/(2*4), ... (even).
    is_odd = freedom % 2 == 1
    term = cosine if is_odd else 1.0
    total = 0.0
    for exponent in range(1 if is_odd else 0, freedom - 1, 2):
        total += term
        term *= cosine**2 * (exponent + 1) / (exponent + 2)
    area = (
        (angle + math.sin(angle) * total) * 2 / math.pi
        if is_odd
        else math.sin(angle) * total
    )
    return 0.5 + area / 2


def student_quantile(share: float, freedom: int) -> float:
    """Return the value below which Student's t lies with probability `share`, at least 0.5."""
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if student_cdf(middle, freedom) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2
