"""Mean, 99.9th percentile and largest of differences, as of all of them sorted, on one rank and on several."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaverl.workers.log_prob_difference import DifferenceStats, LogProbDifference
from tests.algorithms.strategies import PROPERTY
from tests.worlds import run_world


def of_parts(parts: list[list[float]]) -> DifferenceStats:
    difference = LogProbDifference()
    for part in parts:
        values = torch.tensor([part])
        mask = torch.cat([torch.ones_like(values), torch.zeros_like(values)], dim=1).bool()
        difference.add(torch.cat([values, values + math.nan], dim=1), torch.zeros(1, 2 * len(part)), mask)
    return difference.stats()


@PROPERTY
@given(st.lists(st.floats(-200.0, 200.0, width=32), min_size=1, max_size=50), st.integers(0, 2), st.integers(0, 3000))
def test_as_of_all_of_them_sorted(values: list[float], num_parts: int, num_small: int) -> None:
    """The percentile to 2.2 % from above; in any parts, of tokens under the mask alone."""
    values = [*values, *[2.0**-10] * num_small]
    parts = [values[part :: num_parts + 1] for part in range(num_parts + 1)]
    found, apart = of_parts(parts), sorted(abs(value) for value in values)
    assert found.mean == pytest.approx(sum(apart) / len(apart), rel=1e-6) and found.largest == apart[-1]
    percentile = apart[math.ceil(0.999 * len(apart)) - 1]
    assert percentile * (1 - 1e-9) <= found.p999 <= max(percentile * 2 ** (1 / 32), 2.0**-39)


def test_no_tokens_and_no_numbers() -> None:
    assert of_parts([[]]) == DifferenceStats(0.0, 0.0, 0.0)
    assert of_parts([[0.0, math.nan]]).mean == math.inf and of_parts([[-math.inf, 0.0]]).largest == math.inf


def test_of_all_ranks() -> None:
    own = [[0.5, 0.25], [2.0, 0.125, 0.0, 0.125]]
    for found in run_world(2, "tests.workers.algorithm_ranks:log_prob_difference", own=own):
        assert found == [0.5, 2.0, 2.0]
