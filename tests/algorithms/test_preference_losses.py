"""Preference, reward-model and distillation losses: by hand, against their equations, in parts, and at extremes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaverl.algorithms import (
    LossOutput,
    add_metrics,
    advantage_estimators,
    bradley_terry,
    distillation_loss,
    divergences,
    finalize,
    kto_reference_kl,
    preference_losses,
    response_log_probs,
    reward_model_losses,
)
from tests.algorithms.strategies import PROPERTY, Case, cases

QUICK = settings(PROPERTY, max_examples=30)
Pairs = dict[str, Tensor]


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def log_odds(mean: Tensor) -> Tensor:
    p = torch.exp(mean)
    return torch.log(p / (1 - p))


# one pair (or sample) of each loss, from its paper
def dpo(x: Pairs, i: int) -> Tensor:
    chosen = 0.3 * (x["chosen_log_probs"][i] - x["ref_chosen_log_probs"][i])
    rejected = 0.3 * (x["rejected_log_probs"][i] - x["ref_rejected_log_probs"][i])
    return -0.9 * sigmoid(chosen - rejected).log() - 0.1 * sigmoid(rejected - chosen).log()


def ipo(x: Pairs, i: int) -> Tensor:
    """Of log-probs per token."""
    ratios = [
        (x[f"{side}_log_probs"][i] - x[f"ref_{side}_log_probs"][i]) / x[f"{side}_lengths"][i]
        for side in ("chosen", "rejected")
    ]
    return (ratios[0] - ratios[1] - 1 / (2 * 0.3)) ** 2


def ipo_of_responses(x: Pairs, i: int) -> Tensor:
    """Eq. 17 as it stands."""
    ratio = torch.exp(x["chosen_log_probs"][i] - x["rejected_log_probs"][i])
    ref_ratio = torch.exp(x["ref_chosen_log_probs"][i] - x["ref_rejected_log_probs"][i])
    return (torch.log(ratio / ref_ratio) - 1 / (2 * 0.3)) ** 2


def simpo(x: Pairs, i: int) -> Tensor:
    chosen = 2.5 / x["chosen_lengths"][i] * x["chosen_log_probs"][i]
    rejected = 2.5 / x["rejected_lengths"][i] * x["rejected_log_probs"][i]
    return -sigmoid(chosen - rejected - 0.7).log()


def orpo(x: Pairs, i: int) -> Tensor:
    chosen = x["chosen_log_probs"][i] / x["chosen_lengths"][i]
    rejected = x["rejected_log_probs"][i] / x["rejected_lengths"][i]
    return -chosen - 0.2 * sigmoid(log_odds(chosen) - log_odds(rejected)).log()


def kto(x: Pairs, i: int) -> Tensor:
    z = max(float(x["reference_kl"]), 0.0)
    gain = 0.3 * (x["log_probs"][i] - x["ref_log_probs"][i] - z)
    return 1.5 * (1 - sigmoid(gain)) if x["desirable"][i] else 0.5 * (1 - sigmoid(-gain))


LOSSES: dict[str, tuple[Callable[[Pairs, int], Tensor], dict[str, float]]] = {
    "dpo": (dpo, {"beta": 0.3, "label_smoothing": 0.1}),
    "ipo": (ipo, {"beta": 0.3}),
    "ipo of responses": (ipo_of_responses, {"beta": 0.3, "average_log_prob": False}),
    "simpo": (simpo, {"beta": 2.5, "gamma": 0.7}),
    "orpo": (orpo, {"lam": 0.2}),
    "kto": (kto, {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}),
}


def pairs(count: int, seed: int, scale: float = 3.0) -> Pairs:
    generator = torch.Generator().manual_seed(seed)

    def log_probs() -> Tensor:
        return -0.05 - scale * torch.rand(count, generator=generator, dtype=torch.float64)

    names = ("chosen_log_probs", "rejected_log_probs", "log_probs", "ref_chosen_log_probs", "ref_rejected_log_probs")
    x = {name: log_probs().requires_grad_(not name.startswith("ref_")) for name in names}
    x |= {name: torch.randint(1, 9, (count,), generator=generator) for name in ("chosen_lengths", "rejected_lengths")}
    x |= {"ref_log_probs": log_probs(), "desirable": torch.rand(count, generator=generator) > 0.5}
    return x | {"reference_kl": torch.tensor(0.4).double(), "weights": torch.full((count,), 1 / count).double()}


def part(x: Pairs, rows: Tensor) -> Pairs:
    return {name: tensor if tensor.dim() == 0 else tensor[rows] for name, tensor in x.items()}


def leaves(x: Pairs) -> list[Tensor]:
    return [tensor for tensor in x.values() if tensor.requires_grad]


def gradients(loss: Tensor, x: Pairs) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves(x), allow_unused=True)
    return [torch.zeros(()) if g is None else g for g in found]


def test_every_preference_loss_is_tested():
    assert {name.split()[0] for name in LOSSES} == set(preference_losses)
    assert list(reward_model_losses) == ["bradley_terry"]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_equation_whole_and_in_parts(name: str):
    reference, options = LOSSES[name]
    loss = preference_losses.get(name.split()[0])

    @QUICK
    @given(st.integers(1, 6), st.integers(0, 2**31), st.data())
    def check(count: int, seed: int, data: st.DataObject) -> None:
        x = pairs(count, seed)
        result = loss(x, **options)
        expected = sum((reference(x, i) / count for i in range(count)), torch.zeros(()).double())
        assert float(result.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
        for ours, wanted in zip(gradients(result.loss, x), gradients(expected, x), strict=True):
            assert torch.allclose(ours, wanted, rtol=0, atol=1e-6)
        first = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
        shares = [loss(part(x, rows), **options) for rows in (first, ~first)]
        assert float(sum(s.loss.detach() for s in shares)) == pytest.approx(float(result.loss.detach()), abs=1e-9)
        metrics = finalize(add_metrics(shares[0].metrics, shares[1].metrics))
        assert metrics == pytest.approx(finalize(result.metrics), abs=1e-9)

    check()


@pytest.mark.parametrize("name", preference_losses)
@pytest.mark.parametrize("log_prob", [-1e5, 0.0])
def test_extremes_and_padding_stay_finite(name: str, log_prob: float):
    x = {key: value.detach().float() if value.is_floating_point() else value for key, value in pairs(3, 0).items()}
    for key in ("chosen_log_probs", "log_probs"):
        x[key] = torch.tensor([log_prob, -1.0, math.nan]).requires_grad_()
    x["rejected_log_probs"] = torch.tensor([-1.0, log_prob, math.nan]).requires_grad_()
    x["weights"] = torch.tensor([0.5, 0.5, 0.0])
    x["chosen_lengths"][1] = 0
    result = preference_losses.get(name)(x)
    assert torch.isfinite(result.loss) and all(torch.isfinite(m).all() for m in result.metrics.values())
    assert all(torch.isfinite(g).all() for g in gradients(result.loss, x))


def one(name: str, **numbers: float) -> float:
    x = {key: torch.tensor([value], dtype=torch.float64) for key, value in numbers.items()}
    return float(preference_losses.get(name)({**x, "weights": torch.ones(1).double()}).loss)


def test_dpo_and_ipo_by_hand():
    same = {"chosen_log_probs": -5.0, "ref_chosen_log_probs": -5.0, "rejected_log_probs": -7.0}
    assert one("dpo", **same, ref_rejected_log_probs=-7.0) == pytest.approx(math.log(2))
    # the rejected one fell by 10: margin 0.1 x 10
    assert one("dpo", **same, ref_rejected_log_probs=3.0) == pytest.approx(math.log(1 + math.exp(-1.0)))
    # h = 5 = 1 / (2 x 0.1): 0 - (-10) / 2 per token
    lengths = {"chosen_lengths": 4.0, "rejected_lengths": 2.0}
    assert one("ipo", **same, ref_rejected_log_probs=3.0, **lengths) == pytest.approx(0.0)


def test_simpo_and_orpo_by_hand():
    lengths = {"chosen_lengths": 2.0, "rejected_lengths": 4.0}
    assert one("simpo", chosen_log_probs=-2.0, rejected_log_probs=-6.0, **lengths) == pytest.approx(math.log(2))
    half = {"chosen_log_probs": 2 * math.log(0.5), "rejected_log_probs": 4 * math.log(0.25)}
    odds = -math.log(3 / (1 + 3))  # (0.5 / 0.5) / (0.25 / 0.75) = 3
    assert one("orpo", **half, **lengths) == pytest.approx(math.log(2) + 0.1 * odds)


def test_kto_by_hand():
    x = {"log_probs": torch.tensor([1.0, 1.0]), "ref_log_probs": torch.zeros(2), "weights": torch.tensor([1.0, 0.5])}
    x |= {"desirable": torch.tensor([True, False]), "reference_kl": torch.tensor(-3.0)}  # a KL below 0 counts as 0
    result = preference_losses.get("kto")(x, beta=1.0)
    assert float(result.loss) == pytest.approx(1 / (1 + math.e) + 0.5 / (1 + 1 / math.e))  # sigmoid(-1), sigmoid(1)
    assert float(kto_reference_kl(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))) == 1.5
    assert float(kto_reference_kl(torch.zeros(0), torch.zeros(0))) == 0.0


def test_response_log_probs_by_hand():
    sums, lengths = response_log_probs(
        torch.tensor([[-1.0, -2.0], [-4.0, math.nan], [math.nan] * 2]), torch.tensor([[1, 1], [1, 0], [0, 0]]).bool()
    )
    assert sums.tolist() == [-3.0, -4.0, 0.0] and lengths.tolist() == [2, 1, 0]


def test_bradley_terry_by_hand():
    chosen, rejected = torch.tensor([2.0, 0.0, math.nan]).requires_grad_(), torch.tensor([1.0, 1.0, math.nan])
    weights = torch.tensor([0.5, 0.5, 0.0])
    plain = bradley_terry(chosen, rejected, weights)
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(1))) / 2
    assert float(plain.loss.detach()) == pytest.approx(expected)
    assert finalize(plain.metrics)["preference_accuracy"] == 0.5
    (gradient,) = torch.autograd.grad(plain.loss, chosen)
    torch.testing.assert_close(gradient, -torch.tensor([1 / (1 + math.e), 1 / (1 + 1 / math.e), 0.0]) / 2)
    wide = bradley_terry(chosen, rejected, weights, torch.tensor([1.0, 0.0, math.nan]), center_coef=0.1)
    expected = (math.log(2) + 0.1 * 9 + math.log(1 + math.exp(1)) + 0.1) / 2
    assert float(wide.loss.detach()) == pytest.approx(expected)


# per token, from lists of probabilities
def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def jensen_shannon(s: list[float], t: list[float]) -> float:
    m = [0.3 * b + 0.7 * a for a, b in zip(s, t, strict=True)]
    return 0.3 * kl(t, m) + 0.7 * kl(s, m)


DIVERGENCES: dict[str, tuple[Callable[[list[float], list[float]], float], dict[str, float]]] = {
    "forward_kl": (lambda s, t: kl(t, s), {}),
    "reverse_kl": (kl, {}),
    "jensen_shannon": (jensen_shannon, {"beta": 0.3}),
}


@pytest.mark.parametrize("name", divergences)
def test_a_divergence_is_its_equation(name: str):
    reference, options = DIVERGENCES[name]

    @QUICK
    @given(cases(holes=True))
    def check(case: Case) -> None:
        shape = (*case.mask.shape, 4)
        logits = case.normal(*shape).requires_grad_()
        student, teacher = logits.log_softmax(-1), case.normal(*shape).log_softmax(-1)
        apart = divergences.get(name).function(student, teacher, **options)
        apart = torch.where(case.mask, apart, torch.nan)
        result: LossOutput = distillation_loss(apart, case.mask / 7.0)
        expected = 0.0
        for i, t in case.mask.nonzero().tolist():
            expected += reference(student[i, t].exp().tolist(), teacher[i, t].exp().tolist()) / 7.0
        assert float(result.loss.detach()) == pytest.approx(expected, abs=1e-6)
        (gradient,) = torch.autograd.grad(result.loss, logits)
        assert torch.isfinite(gradient).all() and not gradient[~case.mask].any()

    check()


@pytest.mark.parametrize("name", divergences)
def test_gradients_of_divergences_by_finite_differences(name: str):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 2, 3, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(1, 2, 3, generator=generator, dtype=torch.float64).log_softmax(-1)
    function = divergences.get(name).function
    assert torch.autograd.gradcheck(
        lambda x: distillation_loss(function(x.log_softmax(-1), teacher), torch.full((1, 2), 0.5).double()).loss,
        logits,
    )


@pytest.mark.parametrize("name", divergences)
def test_impossible_tokens_have_finite_divergences(name: str):
    student = torch.tensor([[[0.0, -math.inf]]]).requires_grad_()
    teacher = torch.tensor([[[-math.inf, 0.0]]])
    value = float(divergences.get(name).function(student, teacher)[0, 0])
    assert math.isfinite(value) and value > 0.6


def test_the_distillation_advantage_is_the_gradient_of_the_reverse_kl():
    """Summed over all tokens with their probability, the policy gradient is that of KL(student || teacher)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    student, teacher = logits.log_softmax(0), torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    inputs = {"rollout_log_probs": student.detach()[:, None], "ref_log_probs": teacher[:, None]}
    estimator = advantage_estimators.get("distillation")
    advantages = estimator({**inputs, "response_mask": torch.ones(5, 1).bool()}).advantages[:, 0]
    surrogate = (student.exp().detach() * advantages * student).sum()
    exact = -(student.exp() * (student - teacher)).sum()
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (surrogate, exact)]
    torch.testing.assert_close(*gradients)
