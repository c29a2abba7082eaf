"""Preference, reward-model and distillation losses: by hand, against their equations, in parts, and at extremes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

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
    matched,
    mean_log_ratio,
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
    return (
        -0.9 * sigmoid(chosen - rejected).log() - 0.1 * sigmoid(rejected - chosen).log()
    )


def ipo(x: Pairs, i: int) -> Tensor:
    """Of log-probs per token."""
    ratios = [
        (x[f"{side}_log_probs"][i] - x[f"ref_{side}_log_probs"][i])
        / x[f"{side}_lengths"][i]
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
    return (
        1.5 * (1 - sigmoid(gain)) if x["desirable"][i] else 0.5 * (1 - sigmoid(-gain))
    )


def log_ratio(x: Pairs, side: str, i: int) -> Tensor:
    return x[f"{side}_log_probs"][i] - x[f"ref_{side}_log_probs"][i]


def rewards(x: Pairs, i: int, beta: float = 0.3) -> tuple[Tensor, Tensor]:
    return beta * log_ratio(x, "chosen", i), beta * log_ratio(x, "rejected", i)


def hinge(x: Pairs, i: int) -> Tensor:
    chosen, rejected = rewards(x, i)
    return torch.maximum(torch.zeros(()).double(), 1 - (chosen - rejected))


def robust(x: Pairs, i: int) -> Tensor:
    chosen, rejected = rewards(x, i)
    true, flipped = -sigmoid(chosen - rejected).log(), -sigmoid(rejected - chosen).log()
    return ((1 - 0.2) * true - 0.2 * flipped) / (1 - 2 * 0.2)


def exo(x: Pairs, i: int) -> Tensor:
    chosen, rejected = rewards(x, i)
    p = torch.exp(chosen) / (torch.exp(chosen) + torch.exp(rejected))
    return p * torch.log(p / 0.9) + (1 - p) * torch.log((1 - p) / 0.1)


def nca(x: Pairs, i: int) -> Tensor:
    chosen, rejected = rewards(x, i)
    return -sigmoid(chosen).log() - 0.5 * sum(
        sigmoid(-r).log() for r in (chosen, rejected)
    )


def sppo(x: Pairs, i: int) -> Tensor:
    eta = 1 / 0.3
    wins = {"chosen": 1.0, "rejected": 0.0}
    return sum(
        ((log_ratio(x, side, i) - eta * (p - 0.5)) ** 2 for side, p in wins.items()),
        torch.zeros(()).double(),
    )


def apo_zero(x: Pairs, i: int) -> Tensor:
    chosen, rejected = rewards(x, i)
    return -sigmoid(chosen) + sigmoid(rejected)


def apo_down(x: Pairs, i: int) -> Tensor:
    chosen, rejected = rewards(x, i)
    return sigmoid(chosen) - sigmoid(chosen - rejected)


def discopop(x: Pairs, i: int) -> Tensor:
    chosen, rejected = rewards(x, i)
    m = chosen - rejected
    share = sigmoid(m / 0.7)
    return (1 - share) * -sigmoid(m).log() + share * torch.exp(-m)


def f_dpo(slope: Callable[[Tensor], Tensor]) -> Callable[[Pairs, int], Tensor]:
    """From f' as a function of u = pi / pi_ref."""

    def loss(x: Pairs, i: int) -> Tensor:
        chosen, rejected = (
            0.3 * slope(torch.exp(log_ratio(x, side, i)))
            for side in ("chosen", "rejected")
        )
        return -sigmoid(chosen - rejected).log()

    return loss


def wpo(x: Pairs, i: int) -> Tensor:
    chosen, rejected = rewards(x, i)
    weight = float(
        torch.exp(x["chosen_alignment"][i]) * torch.exp(x["rejected_alignment"][i])
    )
    return -min(weight, 1.0) * sigmoid(chosen - rejected).log()


def of_rank(k: int, values: list[float]) -> float:
    return sorted(values)[k]


def rank(values: list[float], i: int) -> int:
    return sum(other < values[i] for other in values)


def aot(x: Pairs, i: int) -> Tensor:
    """The policy's margin next to the reference's of the same rank."""
    policy = x["chosen_log_probs"] - x["rejected_log_probs"]
    frozen = x["ref_chosen_log_probs"] - x["ref_rejected_log_probs"]
    return -sigmoid(
        0.3 * (policy[i] - of_rank(rank(policy.tolist(), i), frozen.tolist()))
    ).log()


def aot_unpaired(x: Pairs, i: int) -> Tensor:
    """The i-th smallest chosen reward next to the i-th smallest rejected one."""
    count = len(x["weights"])
    chosen, rejected = (
        sorted((rewards(x, k)[side] for k in range(count)), key=Tensor.item)
        for side in (0, 1)
    )
    return -sigmoid(chosen[i] - rejected[i]).log()


def cpo(x: Pairs, i: int) -> Tensor:
    chosen, rejected = x["chosen_log_probs"][i], x["rejected_log_probs"][i]
    return -sigmoid(0.3 * chosen - 0.3 * rejected).log() - 0.4 * chosen


def alphapo(alpha: float) -> Callable[[Pairs, int], Tensor]:
    def loss(x: Pairs, i: int) -> Tensor:
        chosen, rejected = (
            2.5
            * (
                1
                - torch.exp(x[f"{side}_log_probs"][i] / x[f"{side}_lengths"][i])
                ** -alpha
            )
            / alpha
            for side in ("chosen", "rejected")
        )
        return -sigmoid(chosen - rejected - 0.2).log()

    return loss


def bco(x: Pairs, i: int) -> Tensor:
    gain = 0.3 * (x["log_probs"][i] - x["ref_log_probs"][i]) - 0.3 * x["reward_shift"]
    return -sigmoid(gain).log() if x["desirable"][i] else -sigmoid(-gain).log()


ALPHAPO = {"beta": 2.5, "gamma": 0.2}
LOSSES: dict[str, tuple[Callable[[Pairs, int], Tensor], dict[str, Any]]] = {
    "dpo": (dpo, {"beta": 0.3, "label_smoothing": 0.1}),
    "ipo": (ipo, {"beta": 0.3}),
    "ipo of responses": (ipo_of_responses, {"beta": 0.3, "average_log_prob": False}),
    "simpo": (simpo, {"beta": 2.5, "gamma": 0.7}),
    "orpo": (orpo, {"lam": 0.2}),
    "kto": (kto, {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}),
    "hinge": (hinge, {"beta": 0.3}),
    "robust": (robust, {"beta": 0.3, "label_smoothing": 0.2}),
    "exo": (exo, {"beta": 0.3, "epsilon": 0.1}),
    "nca": (nca, {"beta": 0.3}),
    "sppo": (sppo, {"beta": 0.3}),
    "apo_zero": (apo_zero, {"beta": 0.3}),
    "apo_down": (apo_down, {"beta": 0.3}),
    "discopop": (discopop, {"beta": 0.3, "tau": 0.7}),
    "f_dpo reverse_kl": (f_dpo(torch.log), {"beta": 0.3, "divergence": "reverse_kl"}),
    "f_dpo forward_kl": (
        f_dpo(lambda u: -1 / u),
        {"beta": 0.3, "divergence": "forward_kl"},
    ),
    "f_dpo jensen_shannon": (
        f_dpo(lambda u: torch.log(2 * u / (1 + u))),
        {"beta": 0.3, "divergence": "jensen_shannon"},
    ),
    "f_dpo alpha": (
        f_dpo(lambda u: (1 - u**-0.3) / 0.3),
        {"beta": 0.3, "divergence": "alpha", "alpha": 0.3},
    ),
    "wpo": (wpo, {"beta": 0.3}),
    "aot": (aot, {"beta": 0.3}),
    "aot_unpaired": (aot_unpaired, {"beta": 0.3}),
    "cpo": (cpo, {"beta": 0.3, "lam": 0.4}),
    "alphapo": (alphapo(0.5), {**ALPHAPO, "alpha": 0.5}),
    "alphapo below 0": (alphapo(-0.5), {**ALPHAPO, "alpha": -0.5}),
    "bco": (bco, {"beta": 0.3}),
}


def pairs(count: int, seed: int, scale: float = 3.0) -> Pairs:
    generator = torch.Generator().manual_seed(seed)

    def log_probs() -> Tensor:
        return -0.05 - scale * torch.rand(
            count, generator=generator, dtype=torch.float64
        )

    names = (
        "chosen_log_probs",
        "rejected_log_probs",
        "log_probs",
        "ref_chosen_log_probs",
        "ref_rejected_log_probs",
    )
    x = {
        name: log_probs().requires_grad_(not name.startswith("ref_")) for name in names
    }
    x |= {
        name: torch.randint(1, 9, (count,), generator=generator)
        for name in ("chosen_lengths", "rejected_lengths")
    }
    x |= {
        "ref_log_probs": log_probs(),
        "desirable": torch.rand(count, generator=generator) > 0.5,
    }
    x |= {f"{side}_alignment": log_probs() + 1.5 for side in ("chosen", "rejected")}
    x |= {
        "reference_kl": torch.tensor(0.4).double(),
        "weights": torch.full((count,), 1 / count).double(),
    }
    return with_log_ratios(x)


def with_log_ratios(x: Pairs) -> Pairs:
    """And what follows from those of all pairs."""
    chosen, rejected = (
        x[f"{side}_log_probs"] - x[f"ref_{side}_log_probs"]
        for side in ("chosen", "rejected")
    )
    policy = (x["chosen_log_probs"] - x["rejected_log_probs"]).detach()
    frozen = x["ref_chosen_log_probs"] - x["ref_rejected_log_probs"]
    return x | {
        "chosen_log_ratios": chosen,
        "rejected_log_ratios": rejected,
        "chosen_matched": matched(chosen.detach(), rejected.detach()),
        "rejected_matched": matched(rejected.detach(), chosen.detach()),
        "margin_shifts": frozen - matched(policy, frozen),
        "reward_shift": mean_log_ratio(
            (x["log_probs"] - x["ref_log_probs"]).nan_to_num(), x["desirable"]
        ),
    }


def part(x: Pairs, rows: Tensor) -> Pairs:
    return {
        name: tensor if tensor.dim() == 0 else tensor[rows]
        for name, tensor in x.items()
    }


def leaves(x: Pairs) -> list[Tensor]:
    return [tensor for tensor in x.values() if tensor.requires_grad and tensor.is_leaf]


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
        expected = sum(
            (reference(x, i) / count for i in range(count)), torch.zeros(()).double()
        )
        assert float(result.loss.detach()) == pytest.approx(
            float(expected.detach()), abs=1e-6
        )
        for ours, wanted in zip(
            gradients(result.loss, x), gradients(expected, x), strict=True
        ):
            assert torch.allclose(ours, wanted, rtol=0, atol=1e-6)
        first = torch.tensor(
            data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        )
        shares = [loss(part(x, rows), **options) for rows in (first, ~first)]
        assert float(sum(s.loss.detach() for s in shares)) == pytest.approx(
            float(result.loss.detach()), abs=1e-9
        )
        metrics = finalize(add_metrics(shares[0].metrics, shares[1].metrics))
        assert metrics == pytest.approx(finalize(result.metrics), abs=1e-9)

    check()


@pytest.mark.parametrize("name", preference_losses)
@pytest.mark.parametrize("log_prob", [-1e5, 0.0])
def test_extremes_and_padding_stay_finite(name: str, log_prob: float):
    x = {
        key: value.detach().float() if value.is_floating_point() else value
        for key, value in pairs(3, 0).items()
    }
    for key in ("chosen_log_probs", "log_probs"):
        x[key] = torch.tensor([log_prob, -1.0, math.nan]).requires_grad_()
    x["rejected_log_probs"] = torch.tensor([-1.0, log_prob, math.nan]).requires_grad_()
    x["weights"] = torch.tensor([0.5, 0.5, 0.0])
    x["chosen_lengths"][1] = 0
    result = preference_losses.get(name)(with_log_ratios(x))
    assert torch.isfinite(result.loss) and all(
        torch.isfinite(m).all() for m in result.metrics.values()
    )
    assert all(torch.isfinite(g).all() for g in gradients(result.loss, x))


def one(name: str, **numbers: float) -> float:
    x = {
        key: torch.tensor([value], dtype=torch.float64)
        for key, value in numbers.items()
    }
    return float(
        preference_losses.get(name)({**x, "weights": torch.ones(1).double()}).loss
    )


def test_dpo_and_ipo_by_hand():
    same = {
        "chosen_log_probs": -5.0,
        "ref_chosen_log_probs": -5.0,
        "rejected_log_probs": -7.0,
    }
    assert one("dpo", **same, ref_rejected_log_probs=-7.0) == pytest.approx(math.log(2))
    # the rejected one fell by 10: margin 0.1 x 10
    assert one("dpo", **same, ref_rejected_log_probs=3.0) == pytest.approx(
        math.log(1 + math.exp(-1.0))
    )
    # h = 5 = 1 / (2 x 0.1): 0 - (-10) / 2 per token
    lengths = {"chosen_lengths": 4.0, "rejected_lengths": 2.0}
    assert one("ipo", **same, ref_rejected_log_probs=3.0, **lengths) == pytest.approx(
        0.0
    )


def test_simpo_and_orpo_by_hand():
    lengths = {"chosen_lengths": 2.0, "rejected_lengths": 4.0}
    assert one(
        "simpo", chosen_log_probs=-2.0, rejected_log_probs=-6.0, **lengths
    ) == pytest.approx(math.log(2))
    half = {
        "chosen_log_probs": 2 * math.log(0.5),
        "rejected_log_probs": 4 * math.log(0.25),
    }
    odds = -math.log(3 / (1 + 3))  # (0.5 / 0.5) / (0.25 / 0.75) = 3
    assert one("orpo", **half, **lengths) == pytest.approx(math.log(2) + 0.1 * odds)


def test_kto_by_hand():
    x = {
        "log_probs": torch.tensor([1.0, 1.0]),
        "ref_log_probs": torch.zeros(2),
        "weights": torch.tensor([1.0, 0.5]),
    }
    # A KL below 0 counts as 0.
    x |= {"desirable": torch.tensor([True, False]), "reference_kl": torch.tensor(-3.0)}
    result = preference_losses.get("kto")(x, beta=1.0)
    # sigmoid(-1), sigmoid(1).
    assert float(result.loss) == pytest.approx(
        1 / (1 + math.e) + 0.5 / (1 + 1 / math.e)
    )
    assert (
        float(kto_reference_kl(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0])))
        == 1.5
    )
    assert float(kto_reference_kl(torch.zeros(0), torch.zeros(0))) == 0.0


SIDES, OTHER = (
    {"chosen": "rejected", "rejected": "chosen"},
    re.compile("chosen|rejected"),
)


def test_ranks_and_means_by_hand():
    numbers = torch.tensor([3.0, 1.0, 2.0, 2.0])
    assert matched(numbers, torch.tensor([10.0, 40.0, 30.0, 20.0])).tolist() == [
        40.0,
        10.0,
        20.0,
        30.0,
    ]
    assert (
        matched(numbers, numbers).tolist() == numbers.tolist()
        and matched(numbers[:0], numbers[:0]).tolist() == []
    )
    right = torch.tensor([True, False, False, False])
    assert float(mean_log_ratio(numbers, right)) == pytest.approx((3 + 5 / 3) / 2)
    assert (
        float(mean_log_ratio(numbers, right | True)) == 2.0
        and float(mean_log_ratio(numbers[:0], right[:0])) == 0.0
    )


def test_what_is_known_of_the_relatives():
    """At a margin of 0; where a paper says that one is another; where a gradient has to vanish."""
    even = {"chosen_log_ratios": 2.0, "rejected_log_ratios": 2.0}
    assert one("hinge", **even) == 1.0 and one("apo_zero", **even) == 0.0
    assert one("robust", **even) == pytest.approx(math.log(2))
    assert one("discopop", **even) == pytest.approx(0.5 * math.log(2) + 0.5)
    win = {"chosen_log_ratios": 500.0, "rejected_log_ratios": -500.0}
    # H = +- eta / 2, and a margin of 100.
    assert one("sppo", **win) == 0.0 and one("hinge", **win) == 0.0
    assert one("exo", **win) == pytest.approx(-math.log(1 - 1e-3))

    x = pairs(5, 1)
    for name, options, twin, same in (
        ("f_dpo", {"divergence": "reverse_kl"}, "dpo", {}),
        ("alphapo", {"alpha": 0.0, **ALPHAPO}, "simpo", ALPHAPO),
        ("robust", {"label_smoothing": 0.0}, "dpo", {}),
    ):
        ours, theirs = (
            preference_losses.get(name)(x, **options).loss,
            preference_losses.get(twin)(x, **same).loss,
        )
        torch.testing.assert_close(ours, theirs)
    flipped = with_log_ratios(
        {OTHER.sub(lambda m: SIDES[m[0]], name): each for name, each in x.items()}
    )
    noisy = 0.8 * preference_losses.get("robust")(x, label_smoothing=0.2).loss
    noisy = (
        noisy + 0.2 * preference_losses.get("robust")(flipped, label_smoothing=0.2).loss
    )
    torch.testing.assert_close(
        noisy,
        preference_losses.get("dpo")(x).loss,
        msg="labels flipped by chance cost nothing",
    )


def test_response_log_probs_by_hand():
    sums, lengths = response_log_probs(
        torch.tensor([[-1.0, -2.0], [-4.0, math.nan], [math.nan] * 2]),
        torch.tensor([[1, 1], [1, 0], [0, 0]]).bool(),
    )
    assert sums.tolist() == [-3.0, -4.0, 0.0] and lengths.tolist() == [2, 1, 0]


def test_bradley_terry_by_hand():
    chosen, rejected = (
        torch.tensor([2.0, 0.0, math.nan]).requires_grad_(),
        torch.tensor([1.0, 1.0, math.nan]),
    )
    weights = torch.tensor([0.5, 0.5, 0.0])
    plain = bradley_terry(chosen, rejected, weights)
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(1))) / 2
    assert float(plain.loss.detach()) == pytest.approx(expected)
    assert finalize(plain.metrics)["preference_accuracy"] == 0.5
    (gradient,) = torch.autograd.grad(plain.loss, chosen)
    torch.testing.assert_close(
        gradient, -torch.tensor([1 / (1 + math.e), 1 / (1 + 1 / math.e), 0.0]) / 2
    )
    wide = bradley_terry(
        chosen, rejected, weights, torch.tensor([1.0, 0.0, math.nan]), center_coef=0.1
    )
    expected = (math.log(2) + 0.1 * 9 + math.log(1 + math.exp(1)) + 0.1) / 2
    assert float(wide.loss.detach()) == pytest.approx(expected)


# per token, from lists of probabilities
def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def jensen_shannon(s: list[float], t: list[float]) -> float:
    m = [0.3 * b + 0.7 * a for a, b in zip(s, t, strict=True)]
    return 0.3 * kl(t, m) + 0.7 * kl(s, m)


DIVERGENCES: dict[
    str, tuple[Callable[[list[float], list[float]], float], dict[str, float]]
] = {
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
            expected += (
                reference(student[i, t].exp().tolist(), teacher[i, t].exp().tolist())
                / 7.0
            )
        assert float(result.loss.detach()) == pytest.approx(expected, abs=1e-6)
        (gradient,) = torch.autograd.grad(result.loss, logits)
        assert torch.isfinite(gradient).all() and not gradient[~case.mask].any()

    check()


@pytest.mark.parametrize("name", divergences)
def test_gradients_of_divergences_by_finite_differences(name: str):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(
        1, 2, 3, generator=generator, dtype=torch.float64
    ).requires_grad_()
    teacher = torch.randn(
        1, 2, 3, generator=generator, dtype=torch.float64
    ).log_softmax(-1)
    function = divergences.get(name).function
    assert torch.autograd.gradcheck(
        lambda x: (
            distillation_loss(
                function(x.log_softmax(-1), teacher), torch.full((1, 2), 0.5).double()
            ).loss
        ),
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
    student, teacher = (
        logits.log_softmax(0),
        torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0),
    )
    inputs = {
        "rollout_log_probs": student.detach()[:, None],
        "ref_log_probs": teacher[:, None],
    }
    estimator = advantage_estimators.get("distillation")
    advantages = estimator(
        {**inputs, "response_mask": torch.ones(5, 1).bool()}
    ).advantages[:, 0]
    surrogate = (student.exp().detach() * advantages * student).sum()
    exact = -(student.exp() * (student - teacher)).sum()
    gradients = [
        torch.autograd.grad(value, logits, retain_graph=True)[0]
        for value in (surrogate, exact)
    ]
    torch.testing.assert_close(*gradients)
