"""REINFORCE++, ReMax, the optimal token baseline, turns and PRIME, each against its equation in loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaverl.algorithms import (
    add_metrics,
    finalize,
    gae,
    grpo,
    implicit_rewards,
    optimal_token_baseline,
    outcome_cross_entropy,
    prime,
    reinforce_plus_plus,
    remax,
    rewards_to_go,
    rloo,
    score_norms,
    token_rewards,
    turn_gae,
    turn_grpo,
    whiten,
)
from megaverl.errors import DataError
from tests.algorithms.strategies import PROPERTY, Case, cases

QUICK = settings(PROPERTY, max_examples=30)


def tokens(mask: Tensor, i: int) -> list[int]:
    return [t for t in range(mask.shape[1]) if mask[i, t]]


def to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """The sum, token by token, over the tokens that exist."""
    result = torch.zeros_like(rewards)
    for i in range(len(mask)):
        own = tokens(mask, i)
        for n, t in enumerate(own):
            result[i, t] = sum(
                gamma**k * float(rewards[i, s]) for k, s in enumerate(own[n:])
            )
    return result


@QUICK
@given(cases(holes=True), st.floats(0, 1))
def test_rewards_to_go_reinforce_plus_plus_and_remax(case: Case, gamma: float):
    rewards, greedy = case.normal(), case.normal(len(case.mask))
    expected = to_go(rewards, case.mask, gamma)
    assert torch.allclose(
        rewards_to_go(case.garbage(rewards), case.mask, gamma),
        expected,
        rtol=0,
        atol=1e-6,
    )
    normalised = reinforce_plus_plus(
        case.garbage(rewards), case.mask, gamma=gamma
    ).advantages
    assert torch.allclose(normalised, whiten(expected, case.mask), rtol=0, atol=1e-6)
    gains = remax(case.garbage(rewards), greedy, case.mask, gamma=gamma).advantages
    assert torch.allclose(
        gains, (expected - greedy[:, None]) * case.mask, rtol=0, atol=1e-6
    )


def test_remax_of_an_outcome_by_hand():
    mask = torch.tensor([[True, True], [True, False]])
    rewards = token_rewards(torch.tensor([1.0, 0.0]), mask)
    result = remax(rewards, torch.tensor([0.25, 1.0]), mask).advantages
    torch.testing.assert_close(result, torch.tensor([[0.75, 0.75], [-1.0, 0.0]]))
    with pytest.raises(DataError, match="greedy_rewards of sample 0 is nan"):
        remax(rewards, torch.tensor([math.nan, 1.0]), mask)


@QUICK
@given(cases(holes=True), st.data(), st.floats(0, 1), st.booleans())
def test_optimal_token_baseline_is_its_equation(
    case: Case, data: st.DataObject, gamma: float, zero_tail: bool
):
    groups = data.draw(
        st.lists(st.integers(0, 2), min_size=len(case.mask), max_size=len(case.mask))
    )
    rewards, norms = case.normal(), case.normal().abs() + 0.1
    result = optimal_token_baseline(
        case.garbage(rewards),
        case.garbage(norms),
        torch.tensor(groups),
        case.mask,
        gamma=gamma,
        handle_zero_tail=zero_tail,
    )
    gains = to_go(rewards, case.mask, gamma)
    for i, group in enumerate(groups):
        mine = [j for j in range(len(groups)) if groups[j] == group]
        for t in range(case.mask.shape[1]):
            expected = 0.0
            if case.mask[i, t] and len(mine) > 1:
                there = [j for j in mine if case.mask[j, t]]
                weights = {
                    j: sum(float(norms[j, s]) for s in tokens(case.mask, j) if s <= t)
                    for j in there
                }
                baseline = sum(float(gains[j, t]) * weights[j] for j in there) / (
                    sum(weights.values()) + 1e-8
                )
                expected = float(gains[i, t]) - (
                    0.0 if zero_tail and len(there) == 1 else baseline
                )
            assert float(result.advantages[i, t]) == pytest.approx(expected, abs=1e-6)


def test_optimal_token_baseline_by_hand():
    rewards, norms = (
        torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 3.0]]),
        torch.tensor([[3.0, 1.0], [1.0, 1.0], [0, 0]]),
    )
    result = optimal_token_baseline(
        rewards, norms, torch.tensor([0, 0, 1]), torch.ones(3, 2).bool()
    ).advantages
    # baselines 3 / (3 + 1) and 4 / (4 + 2); the third is alone, and says nothing
    # whatever its weights
    torch.testing.assert_close(
        result, torch.tensor([[0.25, 1 / 3], [-0.75, -2 / 3], [0.0, 0.0]])
    )


def test_the_tail_of_the_only_response_left_is_its_own_baseline_or_has_none():
    rewards, mask = (
        torch.tensor([[0.0, 0.0, 2.0], [1.0, 0.0, 0.0]]),
        torch.tensor([[1, 1, 1], [1, 0, 0]]).bool(),
    )
    given = (rewards, torch.ones(2, 3), torch.tensor([0, 0]), mask)
    # Baseline (2 + 1) / 2 at the first token.
    head = [[0.5, 0.0, 0.0], [-0.5, 0.0, 0.0]]
    torch.testing.assert_close(
        optimal_token_baseline(*given).advantages, torch.tensor(head)
    )
    head[0][1:] = [2.0, 2.0]
    torch.testing.assert_close(
        optimal_token_baseline(*given, handle_zero_tail=True).advantages,
        torch.tensor(head),
    )


def test_score_norms_are_squared_gradients_by_the_logits():
    logits = torch.randn(
        1, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    log_p = logits.log_softmax(dim=-1)
    targets = torch.tensor([[0, 4, 2]])
    chosen = log_p.gather(2, targets[..., None])[..., 0]
    result = score_norms(chosen, log_p.exp().square().sum(-1))
    (gradient,) = torch.autograd.grad(chosen.sum(), logits)
    torch.testing.assert_close(result, gradient.square().sum(-1))


def drawn_turns(case: Case, data: st.DataObject) -> Tensor:
    """Ids that rise within a row; outside the mask anything."""
    steps = data.draw(
        st.lists(
            st.integers(0, 1), min_size=case.mask.numel(), max_size=case.mask.numel()
        ).map(torch.tensor)
    )
    return torch.where(case.mask, (steps.view_as(case.mask) * case.mask).cumsum(1), -7)


def turns_of(ids: Tensor, mask: Tensor, i: int) -> list[list[int]]:
    """The tokens of each turn of response i, in order; ids that no token has are no turns."""
    own = tokens(mask, i)
    return [
        [t for t in own if int(ids[i, t]) == k]
        for k in sorted({int(ids[i, t]) for t in own})
    ]


@QUICK
@given(cases(holes=True), st.data(), st.floats(0, 1), st.floats(0, 1))
def test_turn_gae_is_gae_over_turns(
    case: Case, data: st.DataObject, gamma: float, lam: float
):
    ids, rewards, values = drawn_turns(case, data), case.normal(), case.normal()
    last = case.normal(len(case.mask))
    result = turn_gae(
        case.garbage(rewards),
        case.garbage(values),
        ids,
        case.mask,
        last,
        gamma=gamma,
        lam=lam,
    )
    for i in range(len(case.mask)):
        turns = turns_of(ids, case.mask, i)
        if not turns:
            continue
        r = torch.tensor(
            [[sum(float(rewards[i, t]) for t in turn) for turn in turns]],
            dtype=torch.float64,
        )
        v = torch.stack([values[i, turn[0]] for turn in turns])[None]
        wanted = gae(
            r, v, torch.ones_like(r).bool(), last[i : i + 1], gamma=gamma, lam=lam
        )
        for k, turn in enumerate(turns):
            assert torch.allclose(
                result.advantages[i, turn], wanted.advantages[0, k], rtol=0, atol=1e-6
            )
            assert torch.allclose(
                result.returns[i, turn], wanted.returns[0, k], rtol=0, atol=1e-6
            )
    assert (
        not result.advantages[~case.mask].any() and not result.returns[~case.mask].any()
    )


@QUICK
@given(cases(), st.data(), st.floats(0, 1))
def test_turn_grpo_is_its_equation(case: Case, data: st.DataObject, gamma: float):
    ids, rewards = drawn_turns(case, data), case.normal()
    groups = data.draw(
        st.lists(st.integers(0, 1), min_size=len(case.mask), max_size=len(case.mask))
    )
    result = turn_grpo(
        case.garbage(rewards), ids, torch.tensor(groups), case.mask, gamma=gamma
    ).advantages
    gains: dict[tuple[int, int], float] = {}
    for i in range(len(case.mask)):
        sums = {
            k: sum(
                float(rewards[i, t])
                for t in tokens(case.mask, i)
                if int(ids[i, t]) == k
            )
            for k in range(12)
        }
        for k in {int(ids[i, t]) for t in tokens(case.mask, i)}:
            gains[i, k] = sum(gamma ** (j - k) * sums[j] for j in range(k, 12))
    for i, group in enumerate(groups):
        for t in tokens(case.mask, i):
            k = int(ids[i, t])
            mine = [
                gains[j, k]
                for j in range(len(groups))
                if groups[j] == group and (j, k) in gains
            ]
            mean = sum(mine) / len(mine)
            std = (
                math.sqrt(sum((g - mean) ** 2 for g in mine) / (len(mine) - 1))
                if len(mine) > 1
                else 0.0
            )
            assert float(result[i, t]) == pytest.approx(
                (gains[i, k] - mean) / (std + 1e-6), abs=1e-5
            )


def test_turn_grpo_with_one_turn_is_grpo():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3).long()
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    per_token = token_rewards(rewards, mask)
    result = turn_grpo(per_token, torch.zeros(3, 2).long(), groups, mask).advantages
    torch.testing.assert_close(result, grpo(rewards, groups, mask).advantages)


@pytest.mark.parametrize("ids", [[[0, 2, 1]], [[-1, 0, 0]]])
def test_turn_ids_that_make_no_sense_are_refused(ids: list[list[int]]):
    with pytest.raises(DataError, match="must not be negative, and must not fall"):
        turn_grpo(
            torch.zeros(1, 3),
            torch.tensor(ids),
            torch.zeros(1).long(),
            torch.ones(1, 3).bool(),
        )


@QUICK
@given(cases(holes=True), st.data(), st.floats(0, 1))
def test_prime_is_its_equation(case: Case, data: st.DataObject, gamma: float):
    groups = data.draw(
        st.lists(st.integers(0, 2), min_size=len(case.mask), max_size=len(case.mask))
    )
    process, outcomes = case.normal(), case.normal(len(groups))
    result = prime(
        case.garbage(process), outcomes, torch.tensor(groups), case.mask, gamma=gamma
    ).advantages
    own = {i: tokens(case.mask, i) for i in range(len(groups))}
    means = {
        i: sum(float(process[i, t]) for t in own[i]) / max(len(own[i]), 1) for i in own
    }
    plain = rloo(outcomes, torch.tensor(groups), case.mask).advantages
    for i, group in enumerate(groups):
        others = [j for j in own if groups[j] == group and j != i]
        baseline = sum(means[j] for j in others) / len(others) if others else 0.0
        for n, t in enumerate(own[i]):
            gain = sum(
                gamma**k * (float(process[i, s]) - baseline)
                for k, s in enumerate(own[i][n:])
            )
            assert float(result[i, t]) == pytest.approx(
                gain + float(plain[i, t]), abs=1e-6
            )
    assert not result[~case.mask].any()


@QUICK
@given(cases(holes=True), st.data())
def test_outcome_cross_entropy_is_its_equation(case: Case, data: st.DataObject):
    right = data.draw(
        st.lists(st.booleans(), min_size=len(case.mask), max_size=len(case.mask))
    )
    phi, ref = case.normal().requires_grad_(), case.normal()
    weights = torch.full((len(right),), 1 / len(right)).double()
    result = outcome_cross_entropy(
        case.garbage(phi),
        case.garbage(ref),
        torch.tensor(right),
        case.mask,
        weights,
        beta=0.5,
    )
    expected = torch.zeros((), dtype=torch.float64)
    for i, outcome in enumerate(right):
        score = sum(
            (0.5 * (phi[i, t] - ref[i, t]) for t in tokens(case.mask, i)),
            torch.zeros(()).double(),
        )
        probability = 1 / (1 + torch.exp(-score))
        expected = expected - (probability if outcome else 1 - probability).log() / len(
            right
        )
    assert float(result.loss.detach()) == pytest.approx(
        float(expected.detach()), abs=1e-6
    )
    if case.mask.any():
        gradients = [
            torch.autograd.grad(value, phi)[0] for value in (result.loss, expected)
        ]
        assert torch.allclose(*gradients, rtol=0, atol=1e-6)
    halves = [
        outcome_cross_entropy(
            phi[rows],
            ref[rows],
            torch.tensor(right)[rows],
            case.mask[rows],
            weights[rows],
            beta=0.5,
        )
        for rows in (slice(0, 1), slice(1, None))
    ]
    assert float(sum(half.loss.detach() for half in halves)) == pytest.approx(
        float(result.loss.detach()), abs=1e-9
    )
    assert finalize(add_metrics(halves[0].metrics, halves[1].metrics)) == pytest.approx(
        finalize(result.metrics)
    )


def test_implicit_rewards_by_hand():
    assert float(
        implicit_rewards(torch.tensor(-1.0), torch.tensor(-3.0), beta=0.1)
    ) == pytest.approx(0.2)
