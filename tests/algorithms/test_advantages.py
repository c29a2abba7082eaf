from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaverl.algorithms import advantage_estimators, gae, grpo, whiten
from megaverl.errors import DataError
from tests.algorithms.strategies import PROPERTY, Case, cases


def gae_reference(rewards, values, mask, last_values, gamma, lam):
    """arXiv 1506.02438: delta of eq. 9 and the sum of eq. 16, term by term."""
    advantages = torch.zeros_like(values)
    for row in range(len(values)):
        tokens = [t for t in range(values.shape[1]) if mask[row, t]]
        v = [float(values[row, t]) for t in tokens] + [float(last_values[row])]
        delta = [
            float(rewards[row, t]) + gamma * v[i + 1] - v[i]
            for i, t in enumerate(tokens)
        ]
        for i, t in enumerate(tokens):
            advantages[row, t] = sum(
                (gamma * lam) ** k * delta[i + k] for k in range(len(tokens) - i)
            )
    return advantages


def test_gae_by_hand():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.6, 0.8]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    result = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    # delta = (0.9 * 0.6 - 0.5, 0.9 * 0.8 - 0.6, 1 - 0.8) = (0.04, 0.12, 0.2), gamma lam
    # = 0.45
    torch.testing.assert_close(
        result.advantages, torch.tensor([[0.04 + 0.45 * 0.21, 0.12 + 0.45 * 0.2, 0.2]])
    )
    torch.testing.assert_close(result.returns, result.advantages + values)


def test_gae_with_lambda_one_is_return_minus_value():
    rewards, values = (
        torch.tensor([[1.0, 2.0, 3.0]]),
        torch.tensor([[10.0, 20.0, 30.0]]),
    )
    result = gae(
        rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lam=1.0
    )
    torch.testing.assert_close(result.returns, torch.tensor([[6.0, 5.0, 3.0]]))


def test_a_response_that_was_cut_off_is_bootstrapped():
    rewards, values = torch.zeros(1, 2), torch.zeros(1, 2)
    result = gae(
        rewards,
        values,
        torch.ones(1, 2, dtype=torch.bool),
        torch.tensor([4.0]),
        gamma=0.5,
        lam=1.0,
    )
    torch.testing.assert_close(result.advantages, torch.tensor([[1.0, 2.0]]))


@PROPERTY
@given(cases(holes=True), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_its_equation(case: Case, gamma: float, lam: float):
    rewards, values, last = case.normal(), case.normal(), case.normal(len(case.mask))
    result = gae(
        case.garbage(rewards),
        case.garbage(values),
        case.mask,
        last,
        gamma=gamma,
        lam=lam,
    )
    expected = gae_reference(rewards, values, case.mask, last, gamma, lam)
    assert torch.allclose(result.advantages, expected, rtol=0, atol=1e-6)
    assert torch.allclose(
        result.returns, expected + values * case.mask, rtol=0, atol=1e-6
    )


@PROPERTY
@given(cases(), st.integers(0, 20))
def test_gae_does_not_see_padding(case: Case, extra: int):
    rewards, values = case.normal(), case.normal()

    def widen(tensor):
        return torch.nn.functional.pad(tensor, (0, extra))

    narrow = gae(rewards, values, case.mask)
    wide = gae(
        widen(rewards) + 7 * ~widen(case.mask),
        widen(values) - 3 * ~widen(case.mask),
        widen(case.mask),
    )
    assert torch.allclose(widen(narrow.advantages), wide.advantages, atol=1e-9)


def test_gae_over_a_long_response_in_float32():
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(2, 3000, generator=generator) for _ in range(2))
    mask = torch.arange(3000) < torch.tensor([[3000], [1777]])
    last = torch.zeros(2)
    expected = []
    for row in range(2):  # the recurrence, in float64
        running, after, out = 0.0, 0.0, [0.0] * 3000
        for t in range(int(mask[row].sum()) - 1, -1, -1):
            running = (
                float(rewards[row, t])
                + 0.99 * after
                - float(values[row, t])
                + 0.99 * 0.95 * running
            )
            after, out[t] = float(values[row, t]), running
        expected.append(out)
    result = gae(rewards, values, mask, last, gamma=0.99, lam=0.95)
    torch.testing.assert_close(
        result.advantages, torch.tensor(expected), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 3)])
def test_empty_batches_and_empty_responses_are_finite(shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    for advantages in (
        gae(torch.zeros(shape), torch.zeros(shape), mask).advantages,
        grpo(torch.zeros(shape[0]), torch.arange(shape[0]), mask).advantages,
        whiten(torch.zeros(shape), mask),
    ):
        assert advantages.shape == shape and not advantages.any()


def test_grpo_by_hand():
    rewards = torch.tensor([1.0, 10.0, 0.0, 40.0, 0.0])
    mask = torch.tensor(
        [[True, True], [True, False], [True, True], [True, True], [False, False]]
    )
    result = grpo(rewards, torch.tensor([7, 3, 7, 3, 7]), mask, eps=0.0)
    # group 7: 1, 0, 0: mean 1/3, sample std 1/sqrt(3); group 3: 10, 40: mean 25, std 15
    # sqrt(2)
    high, low = 2 / math.sqrt(3), -1 / math.sqrt(3)
    pair = 1 / math.sqrt(2)
    expected = torch.tensor(
        [[high, high], [-pair, 0.0], [low, low], [pair, pair], [0.0, 0.0]]
    )
    torch.testing.assert_close(result.advantages, expected)
    assert result.returns is None
    plain = grpo(rewards, torch.tensor([7, 3, 7, 3, 7]), mask, normalize_std=False)
    torch.testing.assert_close(
        plain.advantages[:, 0], torch.tensor([2 / 3, -15.0, -1 / 3, 15.0, 0.0])
    )


def test_groups_that_say_nothing_get_exactly_zero():
    mask = torch.ones(8, 2, dtype=torch.bool)
    # 0.1 is no binary fraction: what rounding leaves of r - mean, over as small a std, would be far from 0.
    rewards = torch.tensor([0.1] * 3 + [0.7] * 4 + [5.0], dtype=torch.float64)
    assert rewards[:3].sum() / 3 != rewards[0]
    assert not grpo(
        rewards, torch.tensor([0] * 3 + [1] * 4 + [2]), mask, eps=1e-30
    ).advantages.any()


@PROPERTY
@given(cases(), st.data())
def test_grpo_is_its_equation(case: Case, data: st.DataObject):
    groups = data.draw(
        st.lists(st.integers(0, 2), min_size=len(case.mask), max_size=len(case.mask))
    )
    rewards = case.normal(len(groups), scale=3.0)
    result = grpo(rewards, torch.tensor(groups), case.mask, eps=1e-6).advantages
    for i, group in enumerate(groups):
        mine = [float(rewards[j]) for j in range(len(groups)) if groups[j] == group]
        mean = sum(mine) / len(mine)
        std = (
            math.sqrt(sum((r - mean) ** 2 for r in mine) / (len(mine) - 1))
            if len(mine) > 1
            else 0.0
        )
        expected = (float(rewards[i]) - mean) / (std + 1e-6)
        assert torch.allclose(
            result[i], expected * case.mask[i].double(), rtol=0, atol=1e-6
        )


def test_a_reward_that_is_not_finite_is_named():
    with pytest.raises(DataError, match="rewards of sample 2 is nan"):
        grpo(
            torch.tensor([0.0, 1.0, float("nan")]),
            torch.zeros(3).long(),
            torch.ones(3, 1, dtype=torch.bool),
        )


@PROPERTY
@given(cases())
def test_whiten(case: Case):
    values = case.normal(scale=5.0) + 100
    result = whiten(case.garbage(values), case.mask)
    kept = values[case.mask]
    assert not result[~case.mask].any()
    if len(kept) > 1:
        expected = (kept - kept.mean()) / torch.sqrt(kept.var(correction=0) + 1e-8)
        assert torch.allclose(result[case.mask], expected, atol=1e-6)
        unshifted = whiten(values, case.mask, shift_mean=False)[case.mask]
        assert torch.allclose(
            unshifted, kept / torch.sqrt(kept.var(correction=0) + 1e-8), atol=1e-6
        )
    else:
        assert not result.any()


def test_the_registry_says_what_an_estimator_reads():
    assert advantage_estimators.get("gae").inputs == (
        "token_rewards",
        "values",
        "response_mask",
    )
    # So no critic is wanted.
    assert "values" not in advantage_estimators.get("grpo").inputs
