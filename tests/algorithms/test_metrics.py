from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from megaverl.algorithms import (
    add_metrics,
    finalize,
    masked_mean,
    masked_std,
    moments,
)
from tests.algorithms.strategies import PROPERTY, Case, cases


def test_moments_ignore_what_is_masked():
    sums = moments(
        torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([True, True, False])
    )
    assert sums.tolist() == [2.0, 4.0, 10.0]
    assert masked_mean(torch.tensor([1.0, 3.0]), torch.tensor([True, False])) == 1.0
    assert masked_mean(torch.ones(2), torch.zeros(2).bool()) == 0.0
    assert (
        masked_std(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        == 1.0
    )


def test_adding():
    mask = torch.ones(1).bool()
    first = {
        "a": moments(torch.tensor([1.0]), mask),
        "b": moments(torch.tensor([5.0]), mask),
    }
    second = {
        "a": moments(torch.tensor([3.0]), mask),
        "c": moments(torch.tensor([7.0]), mask),
    }
    total = add_metrics(first, second)
    assert finalize(total) == {"a": 2.0, "b": 5.0, "c": 7.0}
    assert finalize(first) == {"a": 1.0, "b": 5.0}  # unchanged


@PROPERTY
@given(cases())
def test_explained_variance(case: Case):
    returns, values = case.normal() + 3, case.normal()
    sums = {
        "returns": moments(returns, case.mask),
        "value_error": moments(returns - values, case.mask),
    }
    result = finalize(sums)["explained_variance"]
    kept, error = returns[case.mask], (returns - values)[case.mask]
    if len(kept) < 2:
        assert result == 0.0
    else:
        assert result == pytest.approx(
            float(1 - error.var(correction=0) / kept.var(correction=0)), rel=1e-5
        )


@pytest.mark.parametrize("value", [0.1, 0.7, 1.1, 3.3, -1e3 / 7])
def test_explained_variance_of_a_constant_is_zero(value):
    constant, mask = (
        torch.full((1000,), value, dtype=torch.float64),
        torch.ones(1000).bool(),
    )
    sums = {
        "returns": moments(constant, mask),
        "value_error": moments(torch.arange(1000.0), mask),
    }
    assert finalize(sums)["explained_variance"] == 0.0
    assert math.isfinite(finalize(sums)["value_error"])
