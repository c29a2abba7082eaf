"""Statistics of evaluations, against brute force and scipy's numbers."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.algorithms.evaluation import (
    PromptScores,
    mean_with_interval,
    paired_difference,
    student_cdf,
    student_quantile,
)

# scipy 1.17.1: scipy.stats.t.ppf(share, freedom)
QUANTILES = [
    (1, 0.975, 12.706204736174694),
    (2, 0.995, 9.924843200918287),
    (3, 0.975, 3.1824463052837078),
    (29, 0.975, 2.045229642132703),
    (197, 0.995, 2.6010156416895627),
    (1318, 0.975, 1.9617655127673146),
]
# scipy 1.17.1: scipy.stats.t.cdf(t, freedom)
DISTRIBUTION = [
    (1, 0.3, 0.5927735790777423),
    (2, 2.1, 0.9147250654050163),
    (5, 2.1, 0.9551233750577006),
    (30, 0.3, 0.6168769473578236),
    (101, 2.1, 0.9808899147485927),
]
BEFORE = [0.0, 0.25, 0.5, 1.0, 0.75, 0.25, 0.0, 0.5]
AFTER = [0.25, 0.25, 1.0, 1.0, 0.75, 0.75, 0.25, 0.25]
SCIPY_PAIRED = (0.13951958313684426, -0.0654335235868235, 0.3779335235868235)
SCIPY_INTERVAL = (0.27224813509681517, 0.8527518649031849)


@pytest.mark.parametrize(("freedom", "share", "value"), QUANTILES)
def test_quantiles_of_scipy(freedom: int, share: float, value: float) -> None:
    assert student_quantile(share, freedom) == pytest.approx(value, rel=1e-10)


@pytest.mark.parametrize(("freedom", "t", "value"), DISTRIBUTION)
def test_distribution_of_scipy(freedom: int, t: float, value: float) -> None:
    assert student_cdf(t, freedom) == pytest.approx(value, rel=1e-12)
    assert student_cdf(-t, freedom) == pytest.approx(1 - value, rel=1e-10)


def by_name(values: list[float]) -> dict[str, float]:
    return {f"prompt {number}": value for number, value in enumerate(values)}


def test_a_paired_comparison_of_scipy() -> None:
    """scipy 1.17.1: `ttest_rel(AFTER, BEFORE)`, its `pvalue` and `confidence_interval(0.95)`."""
    difference = paired_difference(
        by_name(BEFORE), {**by_name(AFTER), "of one alone": 1.0}
    )
    assert (difference.value, difference.num_prompts) == (0.15625, 8)
    assert difference.p_value == pytest.approx(SCIPY_PAIRED[0], rel=1e-9)
    assert (difference.low, difference.high) == pytest.approx(
        SCIPY_PAIRED[1:], rel=1e-9
    )


def test_comparisons_without_deviation() -> None:
    same = paired_difference(by_name(BEFORE), by_name(BEFORE))
    assert (same.value, same.low, same.high, same.p_value) == (0.0, 0.0, 0.0, 1.0)
    assert math.isnan(paired_difference({"a": 0.0}, {"a": 1.0}).p_value)
    with pytest.raises(ValueError, match="no prompt in common"):
        paired_difference({"a": 0.0}, {"b": 1.0})


def test_intervals() -> None:
    """scipy 1.17.1: t.interval(0.95, 7, mean(AFTER), sem(AFTER)), and binomtest(0, 20).proportion_ci()."""
    estimate = mean_with_interval(AFTER)
    assert (estimate.low, estimate.high) == pytest.approx(SCIPY_INTERVAL, rel=1e-9)
    none, all_right = mean_with_interval([0.0] * 20), mean_with_interval([1.0] * 20)
    assert (none.low, none.high) == pytest.approx((0.0, 0.16843347098308536), rel=1e-9)
    assert (all_right.low, all_right.high) == pytest.approx(
        (1 - 0.16843347098308536, 1.0), rel=1e-9
    )
    one = mean_with_interval([0.5])
    assert (one.low, one.high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="no scores"):
        mean_with_interval([])


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    draw = random.Random(0)
    covered = 0
    for _ in range(400):
        difficulties = [draw.betavariate(2, 2) for _ in range(30)]
        scores = [
            sum(draw.random() < share for _ in range(4)) / 4 for share in difficulties
        ]
        estimate = mean_with_interval(scores)
        covered += estimate.low <= 0.5 <= estimate.high
    assert 0.92 <= covered / 400 <= 0.98


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets(
    correct: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(correct)))
    subsets = list(itertools.combinations(correct, k))
    assert PromptScores(tuple(correct)).passed(k) == pytest.approx(
        sum(map(any, subsets)) / len(subsets)
    )


@pytest.mark.parametrize(
    ("answers", "correct", "k", "value"),
    [
        (("7", "7", "2"), (True, True, False), 3, 1.0),
        (("7", "2", "2"), (True, False, False), 3, 0.0),
        # A tie counts by the share of its answers that are right.
        (("7", "2", "7", "2"), (True, False, True, False), 4, 0.5),
        # Two spellings of the right answer are one answer.
        (("1/2", "0.5", "3", "3", "4"), (True, True, False, False, False), 5, 0.5),
        # A response without an answer has no vote.
        ((None, None, "7"), (False, False, True), 3, 1.0),
        ((None, None), (False, False), 2, 0.0),
        # Blocks of two; the fifth sample is left out.
        (("7", "7", "2", "2", "7"), (True, True, False, False, True), 2, 0.5),
    ],
)
def test_majority(
    answers: tuple[str | None, ...], correct: tuple[bool, ...], k: int, value: float
) -> None:
    assert PromptScores(correct, answers).majority(k) == value


def test_a_majority_of_samples_without_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="maj@2 of 2 samples with 0 answers"):
        PromptScores((True, False)).majority(2)
    with pytest.raises(ValueError, match="maj@3"):
        PromptScores((True, False), ("1", "2")).majority(3)
