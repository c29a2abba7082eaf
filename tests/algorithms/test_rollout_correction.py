"""Factors for engine/trainer mismatch: by hand, against their equations, under masks and for any split."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaverl.algorithms import add_metrics, combined, corrections, finalize
from tests.algorithms.strategies import PROPERTY, Case, cases

QUICK = settings(PROPERTY, max_examples=25)


def call(
    name: str,
    old: Tensor,
    rollout: Tensor,
    mask: Tensor,
    advantages: Tensor | None = None,
    **options: Any,
):
    """The registered one, of responses with negative advantages if not given; the policy is the old one."""
    needed = {"high": 0.3} if name == "reject" else {}
    inputs = {
        "old_log_probs": old,
        "log_probs": old,
        "rollout_log_probs": rollout,
        "response_mask": mask,
    }
    inputs["advantages"] = (
        -torch.ones_like(rollout) if advantages is None else advantages
    )
    return corrections.get(name)(inputs, **(needed | options))


def correct(
    name: str, ratios: list[list[float]], mask: Tensor | None = None, **options: Any
):
    old = torch.tensor(ratios, dtype=torch.float64).log()
    mask = torch.ones_like(old).bool() if mask is None else mask
    return call(name, old, torch.zeros_like(old), mask, **options)


WINDOW = {"low": 0.8, "high": 1.25}
ESTIMATES = {
    "k1": lambda r: -math.log(r),
    "k2": lambda r: math.log(r) ** 2 / 2,
    "k3": lambda r: r - 1 - math.log(r),
}
OVER = {
    "sum": sum,
    "mean": lambda values: sum(values) / max(len(values), 1),
    "max": lambda values: max(values, default=0),
}


def rejected(estimator: str, over: str) -> Callable[[list[float]], list[float]]:
    """From the estimates, at low -0.05 and high 0.02."""

    def factors(ratios: list[float]) -> list[float]:
        estimates = [ESTIMATES[estimator](r) for r in ratios]
        values = estimates if over == "token" else [OVER[over](estimates)] * len(ratios)
        return [1.0 if -0.05 <= value <= 0.02 else 0.0 for value in values]

    return factors


def product(ratios: list[float]) -> float:
    return math.prod(ratios)


def geometric_mean(ratios: list[float]) -> float:
    return math.prod(ratios) ** (1 / max(len(ratios), 1))


def inside(value: float) -> bool:
    return 0.8 <= value <= 1.25


# one response's factors from its ratios, from the equations
EQUATIONS: dict[str, tuple[Callable[[list[float]], list[float]], dict[str, Any]]] = {
    "token_truncate": (lambda rs: [min(r, 1.25) for r in rs], {"high": 1.25}),
    "token_truncate with a floor": (
        lambda rs: [max(min(r, 1.25), 0.8) for r in rs],
        WINDOW,
    ),
    "token_mask": (lambda rs: [r if inside(r) else 0.0 for r in rs], WINDOW),
    "sequence_truncate": (
        lambda rs: [min(product(rs), 1.25)] * len(rs),
        {"high": 1.25},
    ),
    "sequence_mask": (
        lambda rs: [product(rs) if inside(product(rs)) else 0.0] * len(rs),
        WINDOW,
    ),
    "geometric_mask": (
        lambda rs: [1.0 if inside(geometric_mean(rs)) else 0.0] * len(rs),
        WINDOW,
    ),
    "off_policy_mask": (
        lambda rs: [0.0 if -math.log(geometric_mean(rs)) > 0.1 else 1.0] * len(rs),
        {"high": 0.1},
    ),
    **{
        f"reject {estimator} {over}": (
            rejected(estimator, over),
            {"estimator": estimator, "over": over, "low": -0.05, "high": 0.02},
        )
        for estimator in ESTIMATES
        for over in ("token", *OVER)
    },
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_a_correction_is_its_equation(name: str):
    """Truncated importance sampling (TIS) with and without a floor, its masks of tokens
    and of sequences, off-policy sequence masking, and rejection by k1, k2 or k3 of a
    token or by sum, mean or maximum.
    """
    expected, options = EQUATIONS[name]

    @QUICK
    @given(cases(holes=True))
    def check(case: Case) -> None:
        old, rollout = case.normal(), case.normal(scale=0.2)
        old = rollout + 0.2 * old
        result = call(
            name.split()[0],
            case.garbage(old),
            case.garbage(rollout),
            case.mask,
            **options,
        )
        for i in range(len(case.mask)):
            ratios = [
                math.exp(float(old[i, t] - rollout[i, t]))
                for t in range(case.mask.shape[1])
                if case.mask[i, t]
            ]
            wanted = torch.tensor(expected(ratios), dtype=torch.float64)
            assert torch.allclose(
                result.factors[i][case.mask[i]], wanted, rtol=0, atol=1e-6
            )
        assert not result.factors[~case.mask].any()

    check()


def test_every_correction_has_its_equation():
    assert {name.split()[0] for name in EQUATIONS} == set(corrections)


def test_only_what_went_wrong_is_masked_off_policy():
    left, kept = [[0.5, 0.5]], [[1.1, 0.9]]
    for ratios, advantage, factor in (
        (left, -1.0, 0.0),
        (left, 1.0, 1.0),
        (left, 0.0, 1.0),
        (kept, -1.0, 1.0),
    ):
        given = torch.full((1, 2), advantage).double()
        assert correct(
            "off_policy_mask", ratios, advantages=given
        ).factors.tolist() == [[factor] * 2]


def test_several_are_multiplied():
    """Truncated weights of tokens, without the responses whose ratio is far off."""
    ratios, mask = (
        [[4.0, 1.0], [1.2, 1.0], [9.0, 9.0]],
        torch.tensor([[True, True], [True, False], [False, False]]),
    )
    weights = correct("token_truncate", ratios, mask)
    whole = correct(
        "reject", ratios, mask, estimator="k1", over="sum", low=-1.0, high=1.0
    )
    both = combined([weights, whole], mask)
    torch.testing.assert_close(
        both.factors, torch.tensor([[0.0, 0.0], [1.2, 0.0], [0.0, 0.0]]).double()
    )
    metrics = finalize(both.metrics)
    assert metrics["correction_factor"] == pytest.approx(0.4) and metrics[
        "rejected_fraction"
    ] == pytest.approx(2 / 3)
    assert (
        metrics["correction_fraction"]
        == finalize(weights.metrics)["correction_fraction"]
    )


@pytest.mark.parametrize("name", corrections)
def test_rows_are_corrected_on_their_own(name: str):
    generator = torch.Generator().manual_seed(0)
    old, rollout = (torch.randn(6, 5, generator=generator) * 0.2 for _ in range(2))
    mask = torch.arange(5) < torch.tensor([[5], [0], [3], [1], [4], [2]])
    whole = call(name, old, rollout, mask)
    parts = [
        call(name, old[rows], rollout[rows], mask[rows])
        for rows in ([0, 3], [1, 2, 5], [4])
    ]
    torch.testing.assert_close(
        torch.cat([p.factors for p in parts]), whole.factors[[0, 3, 1, 2, 5, 4]]
    )
    metrics: dict[str, Tensor] = {}
    for part in parts:
        metrics = add_metrics(metrics, part.metrics)
    assert finalize(metrics) == pytest.approx(finalize(whole.metrics))


def test_by_hand():
    torch.testing.assert_close(
        correct("token_truncate", [[4.0, 0.5]]).factors,
        torch.tensor([[2.0, 0.5]]).double(),
    )
    torch.testing.assert_close(
        correct("token_mask", [[8.0, 0.4, 2.0]]).factors,
        torch.tensor([[0.0, 0.0, 2.0]]).double(),
    )
    torch.testing.assert_close(
        correct("sequence_truncate", [[4.0, 0.25], [4.0, 1.0]]).factors,
        torch.tensor([[1.0] * 2, [2.0] * 2]).double(),
    )
    torch.testing.assert_close(
        correct("sequence_mask", [[4.0, 0.25], [4.0, 1.0]]).factors,
        torch.tensor([[1.0] * 2, [0.0] * 2]).double(),
    )
    torch.testing.assert_close(
        correct("geometric_mask", [[4.0, 0.25], [1.1, 1.0]]).factors,
        torch.tensor([[1.0] * 2, [0.0] * 2]).double(),
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
    result = call(name, old, rollout, torch.ones(1, 3).bool())
    assert torch.isfinite(result.factors).all()
    assert all(torch.isfinite(metric).all() for metric in result.metrics.values())


@pytest.mark.parametrize("name", corrections)
def test_a_log_prob_that_is_not_a_number_is_not_let_through(name: str):
    rollout = torch.tensor([[math.nan, 0.0], [0.0, 0.0]])
    factors = call(name, torch.zeros(2, 2), rollout, torch.ones(2, 2).bool()).factors
    assert math.isnan(float(factors[0, 0])) and factors[1].tolist() == [1.0, 1.0]
    hidden = torch.tensor([[False, True], [True, True]])
    assert torch.equal(
        call(name, torch.zeros(2, 2), rollout, hidden).factors, hidden.float()
    )


@pytest.mark.parametrize(
    "name", ["sequence_truncate", "sequence_mask", "geometric_mask"]
)
def test_a_ratio_of_responses_is_bounded_after_its_sum(name: str):
    """e^-50 e^25 e^25 is 1; with each factor bounded at e^20 first it would be e^20."""
    old = torch.tensor([[-50.0, 25.0, 25.0]])
    result = call(name, old, torch.zeros(1, 3), torch.ones(1, 3).bool())
    torch.testing.assert_close(result.factors, torch.ones(1, 3))


@settings(QUICK)
@given(st.floats(-0.1, 0.1))
def test_no_gradient_flows_through_a_correction(gap: float):
    old = torch.full((1, 2), gap, requires_grad=True)
    for name in corrections:
        assert not call(
            name, old, torch.zeros(1, 2), torch.ones(1, 2).bool()
        ).factors.requires_grad
