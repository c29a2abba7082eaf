"""Factors for engine/trainer mismatch: by hand, against their equations, under masks and for any split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaverl.algorithms import add_metrics, corrections, finalize
from tests.algorithms.strategies import PROPERTY, Case, cases

QUICK = settings(PROPERTY, max_examples=25)


def correct(name: str, ratios: list[list[float]], mask: Tensor | None = None, **options: float):
    old = torch.tensor(ratios, dtype=torch.float64).log()
    mask = torch.ones_like(old).bool() if mask is None else mask
    return corrections.get(name).function(old, torch.zeros_like(old), mask, **options)


def expected(name: str, ratios: list[float]) -> list[float]:
    """One response, from the equations, at low 0.8 and high 1.25."""
    whole = math.prod(ratios)
    mean = whole ** (1 / max(len(ratios), 1))
    inside = 0.8 <= whole <= 1.25
    return {
        "token_truncate": [min(r, 1.25) for r in ratios],
        "token_mask": [r if 0.8 <= r <= 1.25 else 0.0 for r in ratios],
        "sequence_truncate": [min(whole, 1.25)] * len(ratios),
        "sequence_mask": [whole if inside else 0.0] * len(ratios),
        "geometric_mask": [1.0 if 0.8 <= mean <= 1.25 else 0.0] * len(ratios),
    }[name]


@pytest.mark.parametrize("name", corrections)
def test_a_correction_is_its_equation(name: str):
    options = {"high": 1.25} | ({} if "truncate" in name else {"low": 0.8})

    @QUICK
    @given(cases(holes=True))
    def check(case: Case) -> None:
        old, rollout = case.normal(), case.normal(scale=0.2)
        old = rollout + 0.2 * old
        result = corrections.get(name).function(case.garbage(old), case.garbage(rollout), case.mask, **options)
        for i in range(len(case.mask)):
            ratios = [math.exp(float(old[i, t] - rollout[i, t])) for t in range(case.mask.shape[1]) if case.mask[i, t]]
            wanted = torch.tensor(expected(name, ratios), dtype=torch.float64)
            assert torch.allclose(result.factors[i][case.mask[i]], wanted, rtol=0, atol=1e-6)
        assert not result.factors[~case.mask].any()

    check()


@pytest.mark.parametrize("name", corrections)
def test_rows_are_corrected_on_their_own(name: str):
    generator = torch.Generator().manual_seed(0)
    old, rollout = (torch.randn(6, 5, generator=generator) * 0.2 for _ in range(2))
    mask = torch.arange(5) < torch.tensor([[5], [0], [3], [1], [4], [2]])
    function = corrections.get(name).function
    whole = function(old, rollout, mask)
    parts = [function(old[rows], rollout[rows], mask[rows]) for rows in ([0, 3], [1, 2, 5], [4])]
    torch.testing.assert_close(torch.cat([p.factors for p in parts]), whole.factors[[0, 3, 1, 2, 5, 4]])
    metrics: dict[str, Tensor] = {}
    for part in parts:
        metrics = add_metrics(metrics, part.metrics)
    assert finalize(metrics) == pytest.approx(finalize(whole.metrics))


def test_by_hand():
    torch.testing.assert_close(correct("token_truncate", [[4.0, 0.5]]).factors, torch.tensor([[2.0, 0.5]]).double())
    torch.testing.assert_close(
        correct("token_mask", [[8.0, 0.4, 2.0]]).factors, torch.tensor([[0.0, 0.0, 2.0]]).double()
    )
    torch.testing.assert_close(
        correct("sequence_truncate", [[4.0, 0.25], [4.0, 1.0]]).factors, torch.tensor([[1.0] * 2, [2.0] * 2]).double()
    )
    torch.testing.assert_close(
        correct("sequence_mask", [[4.0, 0.25], [4.0, 1.0]]).factors, torch.tensor([[1.0] * 2, [0.0] * 2]).double()
    )
    torch.testing.assert_close(
        correct("geometric_mask", [[4.0, 0.25], [1.1, 1.0]]).factors, torch.tensor([[1.0] * 2, [0.0] * 2]).double()
    )


def test_metrics_by_hand():
    metrics = finalize(correct("token_truncate", [[4.0, 1.0]]).metrics)
    assert metrics["mismatch_ratio"] == pytest.approx(2.5)
    assert metrics["mismatch_kl"] == pytest.approx((3.0 - math.log(4)) / 2)
    assert metrics["correction_factor"] == pytest.approx(1.5)
    assert metrics["correction_fraction"] == 0.5


@pytest.mark.parametrize("name", corrections)
@pytest.mark.parametrize("gap", [1e4, -1e4, math.inf, -math.inf])
def test_a_huge_mismatch_stays_finite(name: str, gap: float):
    old, rollout = torch.tensor([[gap, gap, 0.0]]), torch.tensor([[0.0, 0.0, 0.0]])
    result = corrections.get(name).function(old, rollout, torch.ones(1, 3).bool())
    assert torch.isfinite(result.factors).all()
    assert all(torch.isfinite(metric).all() for metric in result.metrics.values())


@pytest.mark.parametrize("name", corrections)
def test_a_log_prob_that_is_not_a_number_is_not_let_through(name: str):
    rollout = torch.tensor([[math.nan, 0.0], [0.0, 0.0]])
    factors = corrections.get(name).function(torch.zeros(2, 2), rollout, torch.ones(2, 2).bool()).factors
    assert math.isnan(float(factors[0, 0])) and factors[1].tolist() == [1.0, 1.0]
    hidden = torch.tensor([[False, True], [True, True]])
    assert torch.equal(corrections.get(name).function(torch.zeros(2, 2), rollout, hidden).factors, hidden.float())


@pytest.mark.parametrize("name", ["sequence_truncate", "sequence_mask", "geometric_mask"])
def test_a_ratio_of_responses_is_bounded_after_its_sum(name: str):
    """e^-50 e^25 e^25 is 1; with each factor bounded at e^20 first it would be e^20."""
    old = torch.tensor([[-50.0, 25.0, 25.0]])
    result = corrections.get(name).function(old, torch.zeros(1, 3), torch.ones(1, 3).bool())
    torch.testing.assert_close(result.factors, torch.ones(1, 3))


@settings(QUICK)
@given(st.floats(-0.1, 0.1))
def test_no_gradient_flows_through_a_correction(gap: float):
    old = torch.full((1, 2), gap, requires_grad=True)
    for name in corrections:
        assert not corrections.get(name).function(old, torch.zeros(1, 2), torch.ones(1, 2).bool()).factors.requires_grad
