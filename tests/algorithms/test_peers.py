"""Options under which a loss or an advantage is that of TRL, verl or NeMo-RL, where these differ from the paper.

The right numbers are written here response by response, from what those projects'
programs compute; docs/coming_from.md lists the differences.
"""

from __future__ import annotations

import math

import pytest
import torch

from megaverl.algorithms import (
    advantage_estimators,
    aggregations,
    kl_estimators,
    policy_losses,
    preference_losses,
)
from megaverl.algorithms.loss import count_denominators
from tests.algorithms.strategies import Case


def tokens() -> dict[str, torch.Tensor]:
    """Three responses of 4, 2 and 3 tokens, with one advantage each."""
    mask = torch.arange(4) < torch.tensor([[4], [2], [3]])
    case = Case(mask, torch.Generator().manual_seed(2))
    old = (case.normal(scale=0.5) - 2.0).clamp(max=-0.05)
    return {
        "log_probs": (old + case.normal(scale=0.3)).clamp(max=-0.05).requires_grad_(),
        "old_log_probs": old,
        "rollout_log_probs": (old + case.normal(scale=0.3)).clamp(max=-0.05),
        "advantages": torch.tensor([[1.5], [-0.5], [0.7]]).double().expand(3, 4),
        "weights": mask.double() / mask.sum(),
    }


def test_vespo_takes_token_weights_into_the_ratio_of_the_response() -> None:
    """TRL: log W = sum of log(pi / pi_old) + sum of log(weight); the advantage is not multiplied."""
    x = tokens()
    importance = (x["old_log_probs"] - x["rollout_log_probs"]).exp().clamp(max=1.1)
    importance[2, 0] = 0.0  # token_mask has rejected this one: log 1e-8 in TRL
    given = {**x, "importance_weights": importance}
    expected = 0.0
    for row, length in enumerate((4, 2, 3)):
        log_w = 0.0
        for t in range(length):
            log_w += float(x["log_probs"][row, t].detach() - x["old_log_probs"][row, t])
            log_w += math.log(max(float(importance[row, t]), 1e-8))
        w = math.exp(max(log_w, math.log(1e-8)))
        advantage = float(x["advantages"][row, 0])
        k, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        phi = math.exp(decay + k * math.log(w) - decay * w)
        expected -= (
            phi * advantage * float(x["log_probs"][row, :length].sum().detach()) / 9
        )
    vespo = policy_losses.get("vespo")
    found = vespo(given)
    assert float(found.loss.detach()) == pytest.approx(expected, rel=1e-6)
    multiplied = vespo({**x, "advantages": x["advantages"] * importance})
    by_option = vespo(given, correction_in="advantages")
    rejected = importance == 0
    without = vespo({**x, "correction_factors": importance})
    assert float(by_option.loss.detach()) == float(without.loss.detach())
    assert float(by_option.loss.detach()) != pytest.approx(
        float(multiplied.loss.detach())
    ), "one token is rejected"
    assert bool(rejected.any()) and float(found.loss.detach()) != pytest.approx(
        float(by_option.loss.detach())
    )


def test_dro_by_token_is_that_of_verl() -> None:
    x = tokens()
    log_ratio = x["log_probs"] - x["old_log_probs"]
    per_token = -(x["log_probs"] * x["advantages"] - 0.5 * 0.3 * log_ratio.square())
    right = per_token[x["weights"] != 0].mean()
    found = policy_losses.get("dro")(x, beta=0.3, over="token").loss
    assert_same_gradient(found, right, x["log_probs"])
    assert float(policy_losses.get("dro")(x, beta=0.3).loss.detach()) != pytest.approx(
        float(right.detach())
    )


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_with_a_truncated_ratio_is_that_of_verl(name: str) -> None:
    x, threshold = tokens(), {"dppo_tv": 0.02, "dppo_kl": 0.002}[name]
    ratio = (x["log_probs"] - x["rollout_log_probs"]).exp().detach()
    pi, mu = x["log_probs"].exp().detach(), x["rollout_log_probs"].exp()
    if name == "dppo_tv":
        far = (pi - mu).abs() > threshold
    else:
        far = mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log() > threshold
    up, positive = pi > mu, x["advantages"] > 0
    blocked = far & torch.where(positive, up, ~up)
    per_token = -x["advantages"] * ratio.clamp(max=1.1) * x["log_probs"] * ~blocked
    found = policy_losses.get(name)(x, threshold=threshold, ratio_max=1.1).loss
    active = x["weights"] != 0
    assert_same_gradient(found, per_token[active].mean(), x["log_probs"])
    assert bool((ratio > 1.1)[active].any()) and bool(blocked[active].any())
    whole, unlimited = (
        policy_losses.get(name)(x, threshold=threshold, ratio_max=limit).loss
        for limit in (None, 1e9)
    )
    gradients = [
        torch.autograd.grad(loss, x["log_probs"])[0] for loss in (whole, unlimited)
    ]
    torch.testing.assert_close(*gradients)


def assert_same_gradient(
    found: torch.Tensor, right: torch.Tensor, leaf: torch.Tensor
) -> None:
    assert float(found.detach()) == pytest.approx(float(right.detach()))
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, leaf)[0] for loss in (found, right))
    )


def pairs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    chosen, rejected = (
        -5 * torch.rand(3, generator=generator).double() - 1 for _ in range(2)
    )
    lengths = torch.tensor([2, 10, 6])
    batch = {
        "chosen_log_probs": chosen,
        "rejected_log_probs": rejected,
        "weights": torch.full((3,), 1 / 3).double(),
    }
    return {**batch, "mean_chosen_length": lengths.double().mean(), "lengths": lengths}


def test_cpo_by_tokens_is_that_of_trl() -> None:
    """Its second term is a cross-entropy over all tokens of the chosen responses."""
    x = pairs()
    first = -torch.nn.functional.logsigmoid(
        0.2 * (x["chosen_log_probs"] - x["rejected_log_probs"])
    ).mean()
    sft = -x["chosen_log_probs"].sum() / x["lengths"].sum()
    cpo = preference_losses.get("cpo")
    assert float(cpo(x, beta=0.2, lam=0.7, sft_over="token").loss) == pytest.approx(
        float(first + 0.7 * sft)
    )
    paper = first - 0.7 * x["chosen_log_probs"].mean()
    assert float(cpo(x, beta=0.2, lam=0.7).loss) == pytest.approx(float(paper))
    halves = [
        {name: tensor[rows] if tensor.dim() else tensor for name, tensor in x.items()}
        for rows in (slice(0, 1), slice(1, 3))
    ]
    shares = sum(
        float(cpo(half, beta=0.2, lam=0.7, sft_over="token").loss) for half in halves
    )
    assert shares == pytest.approx(float(first + 0.7 * sft)), "micro-batches add up"


def test_the_weight_of_wpo_without_a_limit_is_that_of_trl() -> None:
    x = pairs()
    ratios = {
        "chosen_log_ratios": x["chosen_log_probs"] * 0.1,
        "rejected_log_ratios": x["rejected_log_probs"] * 0.2,
    }
    alignment = {
        "chosen_alignment": torch.tensor([0.5, -0.2, 0.1]),
        "rejected_alignment": torch.tensor([0.2, -0.3, -0.4]),
    }
    given = {**ratios, **alignment, "weights": x["weights"]}
    margin = ratios["chosen_log_ratios"] - ratios["rejected_log_ratios"]
    plain = -torch.nn.functional.logsigmoid(0.1 * margin)
    for limit, weights in (
        (None, [math.exp(0.7), math.exp(-0.5), math.exp(-0.3)]),
        (1.0, [1.0, math.exp(-0.5), math.exp(-0.3)]),
    ):
        right = float((torch.tensor(weights) * plain).mean())
        assert float(
            preference_losses.get("wpo")(given, max_weight=limit).loss
        ) == pytest.approx(right)


def test_leave_one_out_is_that_of_nemo_rl() -> None:
    """Baseline and deviation are those of the other responses; nothing is divided where these are all equal."""
    rewards = torch.tensor(
        [1.0, 0.0, 0.0, 0.0, 0.3, -0.7, 2.0, 0.3, 5.0, 1.0, 4.0], dtype=torch.float64
    )
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 3, 3])
    mask = torch.ones(11, 1, dtype=torch.bool)
    right = []
    for row, reward in enumerate(rewards.tolist()):
        others = [
            rewards[k].item()
            for k in range(11)
            if groups[k] == groups[row] and k != row
        ]
        if not others:
            right.append(0.0)
            continue
        mean = sum(others) / len(others)
        variance = (
            sum((other - mean) ** 2 for other in others) / (len(others) - 1)
            if len(others) > 1
            else 0.0
        )
        right.append(
            (reward - mean) / (variance**0.5 + 1e-6) if variance > 0 else reward - mean
        )
    inputs = {"rewards": rewards, "group_ids": groups, "response_mask": mask}
    found = advantage_estimators.get("grpo")(inputs, leave_one_out=True).advantages[
        :, 0
    ]
    assert found.tolist() == pytest.approx(right)
    plain = advantage_estimators.get("grpo")(
        inputs, leave_one_out=True, normalize_std=False
    ).advantages
    torch.testing.assert_close(
        plain, advantage_estimators.get("rloo")(inputs).advantages
    )


def test_low_variance_is_what_verl_calls_k3() -> None:
    log_probs, reference = (
        torch.tensor([-1.0, -9.0, -30.0]),
        torch.tensor([-1.2, -1.0, -1.0]),
    )
    gap = (reference - log_probs).clamp(-20, 20)
    right = (gap.exp() - gap - 1).clamp(-10, 10)
    inputs = {"log_probs": log_probs, "ref_log_probs": reference}
    torch.testing.assert_close(kl_estimators.get("low_variance")(inputs), right)
    assert float(kl_estimators.get("k3")(inputs)[1]) > 2000


def test_an_empty_response_is_no_sequence() -> None:
    """verl does the same; TRL divides by all completions, those without a token too."""
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    weights = aggregations.get("seq_mean_token_mean")(
        {
            "response_mask": mask,
            "denominators": count_denominators(mask),
            "episode_shares": None,
        }
    )
    assert weights.tolist() == [[0.25, 0.25], [0.0, 0.0], [0.5, 0.0]]
