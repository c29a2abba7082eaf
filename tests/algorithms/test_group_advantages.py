"""Advantages of whole responses against their equations, written out over groups as lists."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.algorithms import (
    advantage_estimators,
    gdpo,
    kl_loss,
    pass_at_k,
    policy_losses,
)
from megaverl.errors import DataError
from tests.algorithms.strategies import PROPERTY, Case, cases

QUICK = settings(PROPERTY, max_examples=30)
Rewards = list[float]


def mean(values: Rewards) -> float:
    return sum(values) / len(values)


def sample_std(values: Rewards) -> float:
    return (
        math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))
        if len(values) > 1
        else 0.0
    )


# name -> the advantage of response i of one group, from its rewards and lengths
def dr_grpo(r: Rewards, lengths: list[int], i: int) -> float:
    return r[i] - mean(r)


def rloo(r: Rewards, lengths: list[int], i: int) -> float:
    others = r[:i] + r[i + 1 :]
    return r[i] - mean(others) if others else 0.0


def opo(r: Rewards, lengths: list[int], i: int) -> float:
    return (
        r[i] - sum(n * x for n, x in zip(lengths, r, strict=True)) / sum(lengths)
        if sum(lengths)
        else 0.0
    )


def best_of_group(r: Rewards, lengths: list[int], i: int) -> float:
    others = r[:i] + r[i + 1 :]
    return max(r) - max(others) if others else 0.0


GROUPWISE: dict[str, Callable[[Rewards, list[int], int], float]] = {
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "best_of_group": best_of_group,
}


def drawn_groups(case: Case, data: st.DataObject) -> list[int]:
    return data.draw(
        st.lists(st.integers(0, 2), min_size=len(case.mask), max_size=len(case.mask))
    )


@pytest.mark.parametrize("name", GROUPWISE)
def test_an_estimator_is_its_equation(name: str):
    @QUICK
    @given(cases(), st.data())
    def check(case: Case, data: st.DataObject) -> None:
        groups = drawn_groups(case, data)
        rewards = case.normal(len(groups), scale=3.0)
        inputs = {
            "rewards": rewards,
            "group_ids": torch.tensor(groups),
            "response_mask": case.mask,
        }
        result = advantage_estimators.get(name)(inputs)
        assert result.returns is None
        for i, group in enumerate(groups):
            mine = [j for j in range(len(groups)) if groups[j] == group]
            lengths = [int(case.mask[j].sum()) for j in mine]
            expected = GROUPWISE[name](
                [float(rewards[j]) for j in mine], lengths, mine.index(i)
            )
            assert torch.allclose(
                result.advantages[i],
                expected * case.mask[i].double(),
                rtol=0,
                atol=1e-6,
            )

    check()


@QUICK
@given(cases(), st.data(), st.booleans())
def test_gpg_is_its_equation(case: Case, data: st.DataObject, normalize: bool):
    groups = drawn_groups(case, data)
    rewards = data.draw(
        st.lists(
            st.sampled_from([0.0, 1.0]), min_size=len(groups), max_size=len(groups)
        )
    )
    inputs = {
        "rewards": torch.tensor(rewards).double(),
        "group_ids": torch.tensor(groups),
        "response_mask": case.mask,
    }
    result = advantage_estimators.get("gpg")(inputs, normalize_std=normalize).advantages
    of = {
        group: [r for r, g in zip(rewards, groups, strict=True) if g == group]
        for group in groups
    }
    silent = sum(len(rs) for rs in of.values() if len(set(rs)) == 1)
    alpha = len(groups) / (len(groups) - silent) if silent < len(groups) else 0.0
    for i, group in enumerate(groups):
        scale = sample_std(of[group]) + 1e-6 if normalize else 1.0
        expected = alpha * (rewards[i] - mean(of[group])) / scale
        assert torch.allclose(
            result[i], expected * case.mask[i].double(), rtol=0, atol=1e-6
        )


@QUICK
@given(cases(), st.data())
def test_reinforce_plus_plus_with_baseline_is_its_equation(
    case: Case, data: st.DataObject
):
    groups = drawn_groups(case, data)
    rewards = case.normal(len(groups))
    inputs = {
        "rewards": rewards,
        "group_ids": torch.tensor(groups),
        "response_mask": case.mask,
    }
    result = advantage_estimators.get("reinforce_plus_plus_baseline")(inputs).advantages
    tokens = []
    for i, group in enumerate(groups):
        plain = float(rewards[i]) - mean(
            [float(rewards[j]) for j in range(len(groups)) if groups[j] == group]
        )
        tokens += [plain] * int(case.mask[i].sum())
    if not tokens:
        return
    variance = mean([(x - mean(tokens)) ** 2 for x in tokens])
    wanted = torch.tensor(
        [(x - mean(tokens)) / math.sqrt(variance + 1e-8) for x in tokens],
        dtype=torch.float64,
    )
    assert (
        torch.allclose(result[case.mask], wanted, rtol=0, atol=1e-6)
        and not result[~case.mask].any()
    )


@QUICK
@given(cases(), st.data(), st.integers(1, 3))
def test_gdpo_is_its_equation(case: Case, data: st.DataObject, count: int):
    groups = drawn_groups(case, data)
    rewards = case.normal(len(groups), count) * torch.tensor([1.0, 100.0, 0.01])[:count]
    weights = torch.tensor([1.0, 0.5, 2.0])[:count]
    result = gdpo(rewards, torch.tensor(groups), case.mask, weights).advantages
    sums = []
    for i, group in enumerate(groups):
        mine = [j for j in range(len(groups)) if groups[j] == group]
        total = 0.0
        for k in range(count):
            values = [float(rewards[j, k]) for j in mine]
            total += (
                float(weights[k])
                * (float(rewards[i, k]) - mean(values))
                / (sample_std(values) + 1e-6)
            )
        sums.append(total)
    for i in range(len(groups)):
        expected = (sums[i] - mean(sums)) / (sample_std(sums) + 1e-6)
        assert torch.allclose(
            result[i], expected * case.mask[i].double(), rtol=0, atol=1e-6
        )


def test_gdpo_tells_apart_what_the_sum_of_rewards_does_not():
    # the rewards' scales do not matter: 1 of a small one counts as much as 100 of a
    # large one
    rewards = torch.tensor([[1.0, 0.0], [0.0, 100.0], [0.0, 0.0], [1.0, 100.0]])
    result = gdpo(rewards, torch.zeros(4).long(), torch.ones(4, 1).bool()).advantages[
        :, 0
    ]
    assert (
        float(result[0])
        == pytest.approx(float(result[1]), abs=1e-5)
        == pytest.approx(0.0, abs=1e-5)
    )
    assert (
        float(result[3]) == pytest.approx(-float(result[2])) and float(result[3]) > 1.0
    )


def test_gdpo_refuses_a_plain_column():
    with pytest.raises(
        DataError, match=r"component_rewards must be \[batch, rewards\], found \[3\]"
    ):
        gdpo(torch.zeros(3), torch.zeros(3).long(), torch.ones(3, 1).bool())


@pytest.mark.parametrize(("n", "k"), [(4, 1), (4, 2), (5, 3), (6, 6)])
def test_pass_at_k_is_the_mean_over_all_subsets(n: int, k: int):
    """The definition, by enumerating the groups of k that a response is in."""
    estimator = advantage_estimators.get("pass_at_k")
    for right in range(n + 1):
        rewards = torch.tensor([1.0] * right + [0.0] * (n - right), dtype=torch.float64)
        mask = torch.ones(n, 1).bool()
        inputs = {
            "rewards": rewards,
            "group_ids": torch.zeros(n).long(),
            "response_mask": mask,
        }
        result = estimator(inputs, k=k).advantages[:, 0]
        subsets = {
            subset: max(float(rewards[i]) for i in subset)
            for subset in combinations(range(n), k)
        }
        average = mean(list(subsets.values()))
        assert average == pytest.approx(pass_at_k(n, right, k))
        deviation = math.sqrt(
            mean([(value - average) ** 2 for value in subsets.values()])
        )
        for i in range(n):
            credits = [
                (v - average) / deviation if deviation else 0.0
                for s, v in subsets.items()
                if i in s
            ]
            assert float(result[i]) == pytest.approx(mean(credits), abs=1e-9)


def test_pass_at_k_needs_k_responses():
    inputs = {
        "rewards": torch.ones(3),
        "group_ids": torch.tensor([0, 0, 1]),
        "response_mask": torch.ones(3, 1).bool(),
    }
    with pytest.raises(
        DataError, match="pass@2 needs groups of at least 2 responses, found one of 1"
    ):
        advantage_estimators.get("pass_at_k")(inputs, k=2)


OUTCOME = [
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
    "best_of_group",
    "pass_at_k",
]


@pytest.mark.parametrize("name", OUTCOME)
def test_single_samples_equal_rewards_and_empty_batches_give_zero(name: str):
    options = {"k": 1} if name == "pass_at_k" else {}
    estimator = advantage_estimators.get(name)
    for rewards, groups in (
        ([0.1] * 3, [0, 0, 0]),
        ([0.3, 1.0, 0.0], [0, 1, 2]),
        ([], []),
    ):
        mask = torch.ones(len(rewards), 2).bool()
        inputs = {
            "rewards": torch.tensor(rewards),
            "group_ids": torch.tensor(groups).long(),
            "response_mask": mask,
        }
        assert not estimator(inputs, **options).advantages.any()
    with pytest.raises(DataError, match="rewards of sample 1 is inf"):
        bad = {
            "rewards": torch.tensor([0.0, math.inf]),
            "group_ids": torch.zeros(2).long(),
        }
        estimator({**bad, "response_mask": torch.ones(2, 1).bool()}, **options)


def test_rloo_by_hand():
    inputs = {
        "rewards": torch.tensor([1.0, 0.0, 0.5]),
        "group_ids": torch.zeros(3).long(),
    }
    result = advantage_estimators.get("rloo")(
        {**inputs, "response_mask": torch.ones(3, 1).bool()}
    ).advantages
    torch.testing.assert_close(result[:, 0], torch.tensor([0.75, -0.75, 0.0]))


def test_opo_by_hand():
    inputs = {"rewards": torch.tensor([1.0, 0.0]), "group_ids": torch.zeros(2).long()}
    mask = torch.tensor([[True, True, True], [True, False, False]])
    result = advantage_estimators.get("opo")(
        {**inputs, "response_mask": mask}
    ).advantages
    # The baseline is 3/4.
    torch.testing.assert_close(result, torch.tensor([[0.25] * 3, [-0.75, 0, 0]]))


def test_raft_is_fine_tuning_on_the_best_of_each_group():
    """Mean cross-entropy over the kept responses' tokens, as a policy gradient over the whole batch."""
    lengths = torch.tensor([2, 3, 1, 2, 3])
    mask = torch.arange(3) < lengths[:, None]
    rewards, groups = (
        torch.tensor([0.5, 1.0, 1.0, 0.2, 0.1]),
        torch.tensor([0, 0, 0, 1, 1]),
    )
    log_probs = (
        torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        .double()
        .requires_grad_()
    )
    weights = mask.double() / mask.sum()

    def gradient(kept: list[int], **options: float) -> None:
        batch = {
            "rewards": rewards.double(),
            "group_ids": groups,
            "response_mask": mask,
        }
        advantages = advantage_estimators.get("raft")(batch, **options).advantages
        given = {"log_probs": log_probs, "advantages": advantages, "weights": weights}
        loss = policy_losses.get("policy_gradient")(given).loss
        expected = -log_probs[kept][mask[kept]].mean()
        for value in (loss, expected):
            assert value.item() == pytest.approx(expected.item())
        found, wanted = (
            torch.autograd.grad(value, log_probs, retain_graph=True)[0]
            for value in (loss, expected)
        )
        torch.testing.assert_close(found, wanted)

    gradient([1, 3])  # of equal ones the first
    gradient([1], right_from=1.0)
    gradient([1, 2, 3, 4], keep=2)
    batch = {"rewards": rewards, "group_ids": groups, "response_mask": mask}
    assert not advantage_estimators.get("raft")(
        batch, right_from=2.0
    ).advantages.any(), "nothing is kept"


@QUICK
@given(cases(), st.data(), st.sampled_from([0.0, 0.5]))
def test_nash_md_is_how_often_a_response_is_preferred(
    case: Case, data: st.DataObject, scale: float
):
    groups = drawn_groups(case, data)
    rewards = data.draw(
        st.lists(
            st.sampled_from([0.0, 0.25, 1.0]),
            min_size=len(groups),
            max_size=len(groups),
        )
    )
    inputs = {
        "rewards": torch.tensor(rewards).double(),
        "group_ids": torch.tensor(groups),
        "response_mask": case.mask,
    }
    result = advantage_estimators.get("nash_md")(inputs, scale=scale).advantages
    for i, group in enumerate(groups):
        against = [
            j
            for j in range(len(groups))
            if groups[j] == group and not case.mask[j].any()
        ]
        apart = [rewards[i] - rewards[j] for j in against]
        wins = [
            1 / (1 + math.exp(-gap / scale)) if scale else (gap > 0) + (gap == 0) / 2
            for gap in apart
        ]
        expected = sum(wins) / len(wins) - 0.5 if wins else 0.0
        assert torch.allclose(
            result[i], expected * case.mask[i].double(), rtol=0, atol=1e-9
        )


def test_nash_md_with_its_kl_is_the_gradient_of_the_regularised_preference():
    """Over all pairs of a response and an opponent's, in float64: of P(pi > pi') - tau KL(pi || mu), pi' held fixed,
    where pi' is the geometric mixture.
    """
    generator, tau, beta = torch.Generator().manual_seed(0), 0.3, 0.25
    logits = torch.randn(
        5, generator=generator, dtype=torch.float64, requires_grad=True
    )
    mu = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, -1.0], dtype=torch.float64)
    policy = logits.log_softmax(0)
    opponent = torch.lerp(policy.detach(), mu, beta).softmax(0)
    own, other = torch.cartesian_prod(torch.arange(5), torch.arange(5)).T
    inputs = {
        "rewards": torch.stack([rewards[own], rewards[other]], dim=1).flatten(),
        "group_ids": torch.arange(25).repeat_interleave(2),
        "response_mask": torch.tensor([[True], [False]]).repeat(25, 1),
    }
    advantages = advantage_estimators.get("nash_md")(inputs, scale=0.5).advantages[::2]
    log_probs, weights = (
        policy[own].unsqueeze(1),
        (policy.detach().exp()[own] * opponent[other]).unsqueeze(1),
    )
    loss = policy_losses.get("policy_gradient")(
        {"log_probs": log_probs, "advantages": advantages, "weights": weights}
    ).loss
    penalty = kl_loss(
        log_probs, mu[own].unsqueeze(1), weights, kind="k1", gradient="score"
    ).loss
    found = torch.autograd.grad(loss + tau * penalty, logits, retain_graph=True)[0]
    preferred = torch.sigmoid((rewards[:, None] - rewards) / 0.5)
    objective = (
        policy.exp() @ preferred @ opponent - tau * (policy.exp() * (policy - mu)).sum()
    )
    torch.testing.assert_close(found, torch.autograd.grad(-objective, logits)[0])
