from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaverl.algorithms import (
    AdaptiveEntropy,
    AdaptiveKL,
    FixedKL,
    kl_estimators,
    kl_loss,
    mean_pass_at_k,
    pass_at_k,
    policy_losses,
    remax,
    token_rewards,
)
from megaverl.errors import CheckpointError, ConfigError, DataError, TrainingStopped
from tests.algorithms.strategies import PROPERTY, Case, cases


def test_score_stands_on_the_last_token_and_kl_on_every_one():
    mask = torch.tensor(
        [[True, True, False], [False, False, False], [True, False, True]]
    )
    kl = torch.tensor([[0.1, 0.2, 9.0], [9.0, 9.0, 9.0], [0.3, 9.0, 0.4]])
    result = token_rewards(torch.tensor([1.0, 2.0, 3.0]), mask, kl, kl_coef=0.5)
    expected = torch.tensor([[-0.05, 0.9, 0.0], [0.0, 0.0, 0.0], [-0.15, 0.0, 2.8]])
    torch.testing.assert_close(result, expected)


@PROPERTY
@given(cases(holes=True), st.floats(0, 2))
def test_token_rewards_add_up(case: Case, coef: float):
    rewards, kl = case.normal(len(case.mask)), case.normal()
    result = token_rewards(rewards, case.mask, case.garbage(kl), kl_coef=coef)
    expected = torch.where(case.mask.any(1), rewards, 0.0) - coef * (
        kl * case.mask
    ).sum(1)
    assert (
        torch.allclose(result.sum(1), expected, atol=1e-6)
        and not result[~case.mask].any()
    )


def test_token_rewards_of_no_tokens_and_of_a_bad_score():
    assert token_rewards(torch.ones(2), torch.zeros(2, 0, dtype=torch.bool)).shape == (
        2,
        0,
    )
    with pytest.raises(DataError, match="rewards of sample 1 is inf .*reward function"):
        token_rewards(
            torch.tensor([0.0, float("inf")]), torch.ones(2, 1, dtype=torch.bool)
        )


@pytest.mark.parametrize("kind", kl_estimators)
def test_in_the_reward_k1_alone_has_the_gradient_of_the_kl(kind: str):
    """All responses of two tokens out of three, each with its probability: the expectation, and no sampling."""
    generator = torch.Generator().manual_seed(0)
    logits = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((3,), (3, 3))
    ]
    moved = [
        each.detach() + 0.1 * torch.randn(each.shape, generator=generator).double()
        for each in logits
    ]
    first, second = torch.cartesian_prod(torch.arange(3), torch.arange(3)).T

    def log_probs_of(parameters: list[torch.Tensor]) -> torch.Tensor:
        start, then = (each.log_softmax(-1) for each in parameters)
        return torch.stack([start[first], then[first, second]], dim=1)  # [9, 2]

    policy, reference = log_probs_of(logits), log_probs_of(moved)
    kl = (policy.sum(1).exp() * (policy - reference).sum(1)).sum()
    mask = torch.ones(9, 2).bool()
    estimate = kl_estimators.get(kind)(
        {"log_probs": policy.detach(), "ref_log_probs": reference}
    )
    rewards = token_rewards(torch.zeros(9).double(), mask, estimate, kl_coef=1.0)
    advantages = remax(rewards, torch.zeros(9).double(), mask).advantages
    weights = policy.detach().sum(1, keepdim=True).exp().expand(9, 2)
    loss = policy_losses.get("policy_gradient")(
        {"log_probs": policy, "advantages": advantages, "weights": weights}
    ).loss
    expected, found = (
        torch.cat(
            [g.flatten() for g in torch.autograd.grad(value, logits, retain_graph=True)]
        )
        for value in (kl, loss)
    )
    if kind == "k1":
        torch.testing.assert_close(found, expected)
        scored = kl_loss(policy, reference, weights, kind="k1", gradient="score").loss
        by_score = torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(scored, logits, retain_graph=True)
            ]
        )
        torch.testing.assert_close(
            by_score, expected, msg="as a loss, of whole responses"
        )
        assert float(scored.detach()) == pytest.approx(float(kl.detach()))
        tokenwise = kl_loss(
            policy, reference, weights, kind="k1", gradient="straight_through"
        ).loss
        alone = torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(tokenwise, logits, retain_graph=True)
            ]
        )
        assert float((alone - expected).norm() / expected.norm()) > 1e-3, (
            "tokens by themselves are not all of it"
        )
    else:
        assert float((found - expected).norm() / expected.norm()) > 0.5


def test_adaptive_kl_by_hand():
    controller = AdaptiveKL(0.1, target=6.0)
    controller.update(6.6)  # 10 % above the target: coef x (1 + 0.1 x 0.1)
    assert controller.coef == pytest.approx(0.101)
    controller.update(600.0)  # the error is clipped at 0.2
    assert controller.coef == pytest.approx(0.101 * 1.02)
    controller.update(0.0)
    assert controller.coef == pytest.approx(0.101 * 1.02 * 0.98)


def test_adaptive_entropy_by_hand():
    """Skywork-OR1's."""
    bonus = AdaptiveEntropy(0.01, target=0.2, step=0.005)
    # Too low: more of it.
    assert bonus.update(0.1) == 0.01 and bonus.weight == pytest.approx(0.015)
    bonus.update(0.5)
    # High enough: none.
    assert bonus.coef == pytest.approx(0.01) and bonus.weight == 0.0
    assert bonus.update(0.2) == 0.0 and bonus.weight == pytest.approx(0.005)
    state = json.loads(json.dumps(bonus.state_dict()))
    for _ in range(3):
        bonus.update(0.3)
    assert bonus.coef == 0.0, "never below"
    resumed = AdaptiveEntropy(0.5, target=0.2, step=0.005)
    resumed.load_state_dict({})
    assert resumed.weight == 0.5
    resumed.load_state_dict(state)
    assert resumed.weight == pytest.approx(0.005)
    with pytest.raises(TrainingStopped, match="entropy is nan"):
        bonus.update(float("nan"))


def test_kl_controllers_resume_through_json():
    saved = AdaptiveKL(0.1, target=1.0)
    saved.update(1.3)
    state = json.loads(json.dumps(saved.state_dict()))
    resumed = AdaptiveKL(0.1, target=1.0)
    resumed.load_state_dict(state)
    assert resumed.coef == saved.coef
    with pytest.raises(
        CheckpointError, match=r"kind 'adaptive', the configuration asks for 'fixed'"
    ):
        FixedKL(0.1).load_state_dict(state)


def test_fixed_kl_stays():
    controller = FixedKL(0.2)
    controller.update(1000.0)
    controller.load_state_dict(FixedKL(0.5).state_dict())
    assert controller.coef == 0.2


@pytest.mark.parametrize("controller", [FixedKL(0.1), AdaptiveKL(0.1, 1.0)])
def test_a_kl_that_is_not_a_number_stops_the_run(controller):
    with pytest.raises(TrainingStopped, match="measured KL is nan"):
        controller.update(float("nan"))


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="must not be negative, found -1"):
        FixedKL(-1)
    with pytest.raises(
        ConfigError, match="target of an adaptive KL penalty must be above 0, found 0"
    ):
        AdaptiveKL(0.1, target=0)


def test_pass_at_k_by_hand_and_by_counting():
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 3, 2) == 1.0
    assert pass_at_k(10_000, 5_000, 3) == pytest.approx(0.875, abs=1e-4)
    for wrong in ((4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1)):
        with pytest.raises(ValueError, match="not defined"):
            pass_at_k(*wrong)


@PROPERTY
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(
    correct: list[bool], data: st.DataObject
):
    from itertools import combinations

    k = data.draw(st.integers(1, len(correct)))
    subsets = list(combinations(correct, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(share)


def test_mean_pass_at_k_is_over_prompts():
    correct = torch.tensor([True, False, False, False, True, True])
    groups = torch.tensor([5, 5, 2, 2, 9, 9])
    assert mean_pass_at_k(correct, groups, 1) == pytest.approx(0.5)
    assert mean_pass_at_k(correct, groups, 2) == pytest.approx(2 / 3)
    assert mean_pass_at_k(correct[:0], groups[:0], 1) == 0.0
