"""Every policy loss: by hand, against its equation (value and gradient), and against any split of the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaverl.algorithms import (
    LossOutput,
    add_metrics,
    aggregations,
    binary_kl,
    covariances,
    finalize,
    gmpo,
    gspo,
    highest_entropies,
    policy_losses,
    token_selectors,
)
from tests.algorithms.references import REFERENCES, Inputs, inputs_of
from tests.algorithms.references import gspo as gspo_sequence
from tests.algorithms.strategies import PROPERTY, Case, cases
from tests.algorithms.test_losses import (
    aggregate_reference,
    assert_same,
    token_by_token,
    weights_of,
)

QUICK = settings(PROPERTY, max_examples=25)


def call(
    name: str,
    x: Inputs,
    weights: Tensor,
    more: dict[str, Tensor] | None = None,
    **options: float | str | None,
) -> LossOutput:
    """Call the registered loss, with NaN wherever the weights say that nobody may look.

    Args:
        more: optional inputs, such as `correction_factors`.
    """

    def hidden(values: Tensor) -> Tensor:
        return torch.where(weights != 0, values, torch.nan)

    tensors = {
        "log_probs": hidden(x.new),
        "old_log_probs": hidden(x.old),
        "rollout_log_probs": hidden(x.old),
        "advantages": hidden(x.advantages),
        "weights": weights,
        "selected": x.selected,
        **(more or {}),
    }
    return policy_losses.get(name)(tensors, **options)


def test_every_loss_has_a_reference():
    assert set(REFERENCES) == set(policy_losses)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_loss_is_its_equation(name: str):
    objective, options, per_response = REFERENCES[name]

    @QUICK
    @given(cases(holes=True), st.sampled_from(aggregations.names()))
    def check(case: Case, mode: str) -> None:
        x = inputs_of(case, per_response=per_response)
        result = call(name, x, weights_of(case.mask, mode), **options)
        per_token = token_by_token(case.mask, lambda i, t: -objective(x, i, t))
        assert_same(result.loss, x.new, aggregate_reference(per_token, mode), x.new)

    check()


@pytest.mark.parametrize("name", REFERENCES)
def test_any_split_adds_up(name: str):
    _, options, per_response = REFERENCES[name]

    @QUICK
    @given(cases(), st.sampled_from(aggregations.names()), st.data())
    def check(case: Case, mode: str, data: st.DataObject) -> None:
        x = inputs_of(case, per_response=per_response)
        count = data.draw(st.integers(1, 4))
        owners = data.draw(
            st.lists(
                st.integers(0, count - 1),
                min_size=len(case.mask),
                max_size=len(case.mask),
            )
        )

        def part(rows: list[int], width: int) -> LossOutput:
            pad = (0, max(0, width - case.mask.shape[1]))
            cut = Inputs(
                *(torch.nn.functional.pad(tensor[rows], pad)[:, :width] for tensor in x)
            )
            return call(
                name, cut, weights_of(cut.mask, mode, whole=case.mask), **options
            )

        whole = part(list(range(len(case.mask))), case.mask.shape[1])
        total, metrics = torch.zeros((), dtype=torch.float64), {}
        for index in range(count):
            rows = [row for row, owner in enumerate(owners) if owner == index]
            width = max(
                [int(case.mask[row].sum()) for row in rows], default=0
            ) + data.draw(st.integers(0, 3))
            share = part(rows, width)
            total, metrics = total + share.loss, add_metrics(metrics, share.metrics)
        assert_same(total, x.new, whole.loss, x.new)
        assert finalize(metrics) == pytest.approx(finalize(whole.metrics), abs=1e-9)

    check()


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize("advantage", [3.0, -3.0, 0.0])
def test_huge_log_ratios_stay_finite(name: str, gap: float, advantage: float):
    new = torch.tensor([[-2.0, -1.0], [-1e4, -1e-9]])
    old = torch.tensor([[-2.0 - gap, -1.0], [-1.0, -50.0]]).clamp(max=0.0)
    x = Inputs(
        new.requires_grad_(),
        old,
        torch.full((2, 2), advantage),
        torch.ones(2, 2).bool(),
        torch.ones(2, 2).bool(),
    )
    result = call(name, x, torch.full((2, 2), 0.25))
    (gradient,) = torch.autograd.grad(result.loss, x.new)
    assert torch.isfinite(result.loss) and torch.isfinite(gradient).all()
    assert all(torch.isfinite(metric).all() for metric in result.metrics.values())


@pytest.mark.parametrize("name", REFERENCES)
def test_no_token_at_all_gives_zero(name: str):
    nothing = torch.zeros(2, 3)
    x = Inputs(
        nothing.clone().requires_grad_(),
        nothing,
        nothing,
        nothing.bool(),
        nothing.bool(),
    )
    result = call(name, x, nothing)
    (gradient,) = torch.autograd.grad(result.loss, x.new)
    assert float(result.loss.detach()) == 0.0 and not gradient.any()


@pytest.mark.parametrize("name", sorted(set(REFERENCES) - {"kl_cov", "dro"}))
def test_a_factor_on_the_advantages_is_a_factor_on_the_loss(name: str):
    """What a rollout correction counts on."""
    x = inputs_of(
        Case(torch.ones(3, 4).bool(), torch.Generator().manual_seed(0)),
        per_response=True,
    )
    weights = torch.full((3, 4), 1 / 12).double()
    once, thrice = (
        call(name, x._replace(advantages=x.advantages * factor), weights)
        for factor in (1.0, 3.0)
    )
    assert float(thrice.loss.detach()) == pytest.approx(3 * float(once.loss.detach()))


def of(
    ratios: list[list[float]],
    advantages: list[list[float]],
    selected: list[list[int]] | None = None,
) -> Inputs:
    new = torch.tensor(ratios, dtype=torch.float64).log()
    chosen = (
        torch.zeros_like(new).bool()
        if selected is None
        else torch.tensor(selected).bool()
    )
    mask = torch.ones_like(new).bool()
    return Inputs(
        new.requires_grad_(),
        torch.zeros_like(new),
        torch.tensor(advantages).double(),
        chosen,
        mask,
    )


def value(name: str, x: Inputs, **options: float) -> float:
    return float(
        call(
            name, x, weights_of(x.mask, "seq_mean_token_mean"), **options
        ).loss.detach()
    )


def test_dual_clip_by_hand():
    # min(5 * -1, 1.2 * -1) = -5 is below 3 * -1: the floor; a positive advantage has
    # none: min(5, 1.2)
    assert value("dual_clip", of([[5.0, 5.0]], [[-1.0, 1.0]])) == pytest.approx(
        (3.0 - 1.2) / 2
    )
    x = of([[5.0]], [[-1.0]])
    result = call("dual_clip", x, torch.ones(1, 1).double())
    (gradient,) = torch.autograd.grad(result.loss, x.new)
    assert not gradient.any() and finalize(result.metrics)["dual_clip_fraction"] == 1.0


def test_cispo_by_hand():
    x = of([[8.0, 0.5]], [[1.0, 2.0]])
    result = call("cispo", x, torch.ones(1, 2).double())  # limited to 5 and left at 0.5
    assert float(result.loss.detach()) == pytest.approx(
        -5 * math.log(8) - 0.5 * 2 * math.log(0.5)
    )
    result.loss.backward()
    # Both still learn.
    torch.testing.assert_close(x.new.grad, torch.tensor([[-5.0, -1.0]]).double())


def test_sapo_by_hand():
    assert value("sapo", of([[1.0, 1.0]], [[1.0, -1.0]])) == pytest.approx(
        (-2.0 + 2 / 1.05) / 2
    )
    x = of([[1.0, 1.0]], [[1.0, -1.0]])
    (gradient,) = torch.autograd.grad(
        call("sapo", x, torch.ones(1, 2).double()).loss, x.new
    )
    # At r = 1 it is the policy gradient.
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, 1.0]]).double())


def test_gspo_by_hand():
    # the ratio of the response is sqrt(4 * 0.25) = 1, whatever its tokens do
    assert value("gspo", of([[4.0, 0.25]], [[1.0, 1.0]])) == pytest.approx(-1.0)
    assert value("gspo", of([[1.1, 1.1]], [[1.0, 1.0]])) == pytest.approx(-1.0004)
    assert value("gspo", of([[1.1, 1.1]], [[-1.0, -1.0]])) == pytest.approx(1.1)


@QUICK
@given(cases())
def test_gspo_of_one_advantage_per_response_is_its_sequence_form(case: Case):
    x = inputs_of(case, per_response=True)
    weights = weights_of(case.mask, "seq_mean_token_mean")
    result = gspo(x.new, x.old, x.advantages, weights, clip_low=0.1, clip_high=0.1)
    per_token = token_by_token(case.mask, lambda i, t: -gspo_sequence(x, i, t))
    assert_same(
        result.loss, x.new, aggregate_reference(per_token, "seq_mean_token_mean"), x.new
    )


def test_gmpo_by_hand():
    # e^0.4 is the most that one token may give where the advantage is positive: (e^0.4
    # * 1)^(1/2)
    assert value("gmpo", of([[9.0, 1.0]], [[1.0, 1.0]])) == pytest.approx(
        -math.exp(0.2)
    )
    assert value("gmpo", of([[9.0, 1.0]], [[-1.0, -1.0]])) == pytest.approx(3.0)
    x = of([[9.0, 1.0]], [[1.0, 1.0]])
    (gradient,) = torch.autograd.grad(
        gmpo(x.new, x.old, x.advantages, torch.full((1, 2), 0.5).double()).loss, x.new
    )
    torch.testing.assert_close(
        gradient, torch.tensor([[0.0, -math.exp(0.2) / 2]]).double()
    )


@QUICK
@given(cases(holes=True), st.floats(-2.0, 2.0))
def test_gmpo_of_rejected_tokens_is_gmpo_without_them(case: Case, bar: float):
    """A correction rejects a token by a factor of 0."""
    x, rejected = inputs_of(case, per_response=True), case.normal() > bar
    weights = weights_of(case.mask, "seq_mean_token_mean")
    result = call("gmpo", x, weights, {"correction_factors": 1.0 - rejected.double()})
    remaining = weights_of(
        case.mask & ~rejected, "seq_mean_token_mean", whole=case.mask
    )
    assert_same(result.loss, x.new, call("gmpo", x, remaining).loss, x.new)


@QUICK
@given(cases(holes=True), st.floats(-2.0, 2.0))
def test_gspo_of_rejected_tokens_has_the_ratio_of_those_that_remain(
    case: Case, bar: float
):
    x, rejected = inputs_of(case, per_response=True), case.normal() > bar
    weights = weights_of(case.mask, "seq_mean_token_mean")
    result = call("gspo", x, weights, {"correction_factors": 1.0 - rejected.double()})
    assert_same(
        result.loss,
        x.new,
        call("gspo", x, weights.masked_fill(rejected, 0.0)).loss,
        x.new,
    )


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_a_ratio_of_responses_is_bounded_after_its_mean(name: str):
    """One token of ten at -50: the geometric mean is e^-5, whatever a bound on single ratios would make of it."""
    x = of([[1.0] * 10], [[1.0] * 10])
    with torch.no_grad():
        x.new[0, 3] = -50.0
    assert value(name, x) == pytest.approx(-math.exp(-5))
    (gradient,) = torch.autograd.grad(
        call(name, x, weights_of(x.mask, "seq_mean_token_mean")).loss, x.new
    )
    torch.testing.assert_close(
        gradient, torch.full((1, 10), -math.exp(-5) / 10).double()
    )


def test_kl_cov_pulls_back_from_any_distance():
    x = of([[1.0, 1.0]], [[0.0, 0.0]], selected=[[1, 1]])
    with torch.no_grad():
        x.new[0] = torch.tensor([-50.0, 50.0])
    result = call("kl_cov", x, torch.ones(1, 2).double(), penalty=0.5)
    (gradient,) = torch.autograd.grad(result.loss, x.new)
    assert float(result.loss.detach()) == pytest.approx(50.0) and gradient.tolist() == [
        [-0.5, 0.5]
    ]


def test_dppo_by_hand():
    new, mu = (
        torch.tensor([[0.9, 0.02, 0.3]]).log(),
        torch.tensor([[0.6, 0.01, 0.5]]).log(),
    )
    x = Inputs(
        new.requires_grad_(),
        mu,
        torch.ones(1, 3),
        torch.zeros(1, 3).bool(),
        torch.ones(1, 3).bool(),
    )
    # 0.9 is 0.3 away and goes on outwards; 0.02 is twice 0.01 and yet near; 0.3 is far, but on its way back
    result = call("dppo_tv", x, torch.ones(1, 3))
    assert float(result.loss.detach()) == pytest.approx(-(2.0 + 0.6), rel=1e-5)
    assert finalize(result.metrics)["clip_fraction"] == pytest.approx(1 / 3)
    blocked = call("dppo_kl", x, torch.ones(1, 3))
    assert float(blocked.loss.detach()) == pytest.approx(-(2.0 + 0.6), rel=1e-5)


def test_binary_kl_by_hand_and_at_its_ends():
    pi, mu = (
        torch.tensor([0.25, 1.0, 1e-30, 0.5]).double().log(),
        torch.tensor([0.5, 1.0, 1.0, 0.0]).double().log(),
    )
    result = binary_kl(pi, mu.clamp(min=-700))
    assert float(result[0]) == pytest.approx(
        0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    )
    assert float(result[1]) == 0.0
    assert float(result[2]) == pytest.approx(30 * math.log(10))
    assert float(result[3]) == pytest.approx(math.log(2))


def test_kl_cov_and_clip_cov_by_hand():
    x = of([[2.0, 2.0]], [[1.0, 1.0]], selected=[[0, 1]])
    assert value("kl_cov", x, penalty=0.5) == pytest.approx(
        -(2.0 + 2.0 - 0.5 * math.log(2)) / 2
    )
    assert value("clip_cov", x, clip_high=4.0) == pytest.approx(-1.0)
    metrics = finalize(call("clip_cov", x, torch.ones(1, 2).double()).metrics)
    assert metrics["selected_fraction"] == 0.5


@QUICK
@given(cases(holes=True))
def test_covariances_are_their_equation(case: Case):
    log_probs, advantages = case.normal(), case.normal()
    tokens = [
        (i, t)
        for i in range(len(case.mask))
        for t in range(case.mask.shape[1])
        if case.mask[i, t]
    ]
    result = covariances(case.garbage(log_probs), case.garbage(advantages), case.mask)
    assert not result[~case.mask].any()
    for i, t in tokens:
        mean_p = sum(float(log_probs[k]) for k in tokens) / len(tokens)
        mean_a = sum(float(advantages[k]) for k in tokens) / len(tokens)
        expected = (float(log_probs[i, t]) - mean_p) * (
            float(advantages[i, t]) - mean_a
        )
        assert float(result[i, t]) == pytest.approx(expected, abs=1e-6)


@QUICK
@given(cases(holes=True), st.floats(0.0, 1.0))
def test_kl_cov_takes_the_largest(case: Case, fraction: float):
    log_probs, advantages = case.normal(), case.normal()
    selected = token_selectors.get("kl_cov")(
        {"log_probs": log_probs, "advantages": advantages, "response_mask": case.mask},
        fraction=fraction,
    )
    values = covariances(log_probs, advantages, case.mask)
    number = int(case.mask.sum())
    assert int(selected.sum()) == min(max(int(fraction * number), 1), number)
    assert not (selected & ~case.mask).any()
    rest = case.mask & ~selected
    if selected.any() and rest.any():
        assert values[selected].min() >= values[rest].max()


def test_clip_cov_draws_within_its_band():
    generator = torch.Generator().manual_seed(1)
    log_probs, advantages = (torch.randn(8, 50, generator=generator) for _ in range(2))
    mask = torch.ones(8, 50).bool()
    draws = torch.rand(8, 50, generator=generator)
    inputs = {
        "log_probs": log_probs,
        "advantages": advantages,
        "response_mask": mask,
        "draws": draws,
    }
    selector = token_selectors.get("clip_cov")
    selected = selector(inputs, fraction=0.05, covariance_low=0.5, covariance_high=2.0)
    values = covariances(log_probs, advantages, mask)
    assert int(selected.sum()) == 20
    assert bool(((values[selected] > 0.5) & (values[selected] < 2.0)).all())
    assert not torch.equal(
        selected,
        selector({**inputs, "draws": 1 - draws}, fraction=0.05, covariance_low=0.5),
    )
    # Nobody is in the band.
    assert not selector(inputs, covariance_low=1e9, covariance_high=2e9).any()


@QUICK
@given(cases(holes=True), st.floats(0.01, 0.99))
def test_the_highest_entropies_are_those_above_a_quantile_of_the_whole_mini_batch(
    case: Case, fraction: float
):
    """The top-entropy token mask of arXiv 2506.01939."""
    entropies = case.normal().abs()
    chosen = highest_entropies(case.garbage(entropies), case.mask, fraction=fraction)
    count = int(case.mask.sum())
    assert (
        int(chosen.sum()) == (max(int(fraction * count), 1) if count else 0)
        and not chosen[~case.mask].any()
    )
    left = entropies[case.mask & ~chosen]
    assert not len(left) or float(entropies[chosen].min()) >= float(left.max())
