"""Each loss against its equation in float64 (value and gradient), and against any split of the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megaverl.algorithms import (
    LossOutput,
    add_metrics,
    aggregations,
    combine,
    count_denominators,
    entropy_sum,
    episode_shares,
    finalize,
    kl_estimators,
    kl_loss,
    likelihood_sum,
    make_denominators,
    policy_losses,
    ppo_clip,
    value_losses,
)
from megaverl.errors import ConfigError
from tests.algorithms.strategies import PROPERTY, Case, cases

FIXED_LENGTH = 9  # as long as the longest response of a case
VALUE_LOSS = value_losses.get("clipped").function


def weights_of(
    mask: Tensor, mode: str = "token_mean", whole: Tensor | None = None
) -> Tensor:
    denominators = count_denominators(mask if whole is None else whole)
    options = {"max_tokens": FIXED_LENGTH} if mode == "fixed_length" else {}
    return aggregations.get(mode).function(
        mask, denominators, dtype=torch.float64, **options
    )


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def aggregate_reference(per_token: list[list[Tensor]], mode: str) -> Tensor:
    """The means and sums, from lists of the tokens that exist."""
    sequences = [tokens for tokens in per_token if tokens]
    if not sequences:
        return torch.zeros((), dtype=torch.float64)
    if mode == "token_mean":
        tokens = [token for sequence in sequences for token in sequence]
        return sum(tokens) / len(tokens)
    if mode == "token_sum":
        return sum(sum(sequence) for sequence in sequences)
    if mode == "fixed_length":
        return sum(sum(sequence) for sequence in sequences) / (
            len(sequences) * FIXED_LENGTH
        )
    if mode == "seq_mean_token_mean":
        return sum(sum(sequence) / len(sequence) for sequence in sequences) / len(
            sequences
        )
    return sum(sum(sequence) for sequence in sequences) / len(sequences)


def token_by_token(mask: Tensor, function) -> list[list[Tensor]]:
    return [
        [function(i, t) for t in range(mask.shape[1]) if mask[i, t]]
        for i in range(len(mask))
    ]


def assert_same(
    loss: Tensor, parameter: Tensor, expected: Tensor, reference: Tensor
) -> None:
    assert abs(float(loss) - float(expected)) < 1e-6
    (gradient,) = torch.autograd.grad(loss, parameter)
    if expected.requires_grad:
        (wanted,) = torch.autograd.grad(expected, reference)
        assert torch.allclose(gradient, wanted, rtol=0, atol=1e-6)
    else:
        assert not gradient.any()


def test_ppo_clip_by_hand():
    old = torch.zeros(1, 4)
    ratio = torch.tensor([[1.5, 1.5, 0.5, 1.1]])
    advantages = torch.tensor([[2.0, -2.0, -1.0, 3.0]])
    log_probs = leaf(ratio.log())
    mask = torch.ones(1, 4, dtype=torch.bool)
    result = ppo_clip(log_probs, old, advantages, weights_of(mask).float())
    # min(3, 1.2 * 2), min(-3, -2.4), min(-0.5, -0.8), 3.3: the first and the third are
    # clipped
    assert float(result.loss) == pytest.approx(-(2.4 - 3.0 - 0.8 + 3.3) / 4)
    result.loss.backward()
    torch.testing.assert_close(
        log_probs.grad, torch.tensor([[0.0, 3.0, 0.0, -3.3]]) / 4
    )
    metrics = finalize(result.metrics)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio"] == pytest.approx(1.15)
    assert metrics["approx_kl"] == pytest.approx(
        sum(r - 1 - math.log(r) for r in (1.5, 1.5, 0.5, 1.1)) / 4
    )


@PROPERTY
@given(
    cases(holes=True),
    st.sampled_from(aggregations.names()),
    st.floats(0.01, 0.5),
    st.floats(0.01, 0.5),
)
def test_ppo_clip_is_its_equation(case: Case, mode: str, low: float, high: float):
    new, old, advantages = case.normal(scale=0.5), case.normal(scale=0.5), case.normal()
    log_probs, reference = leaf(case.garbage(new)), leaf(new)

    def surrogate(i: int, t: int) -> Tensor:
        ratio = torch.exp(reference[i, t] - old[i, t])
        clipped = torch.clamp(ratio, 1 - low, 1 + high)
        return -torch.minimum(ratio * advantages[i, t], clipped * advantages[i, t])

    result = ppo_clip(
        log_probs,
        case.garbage(old),
        case.garbage(advantages),
        weights_of(case.mask, mode),
        clip_low=low,
        clip_high=high,
    )
    assert_same(
        result.loss,
        log_probs,
        aggregate_reference(token_by_token(case.mask, surrogate), mode),
        reference,
    )


@PROPERTY
@given(cases(), st.sampled_from(aggregations.names()), st.none() | st.floats(0.01, 1.0))
def test_value_loss_is_its_equation(case: Case, mode: str, clip: float | None):
    new, old, returns = case.normal(), case.normal(), case.normal()
    values, reference = leaf(case.garbage(new)), leaf(new)

    def squared(i: int, t: int) -> Tensor:
        error = (reference[i, t] - returns[i, t]) ** 2
        if clip is None:
            return error / 2
        near = torch.maximum(
            torch.minimum(reference[i, t], old[i, t] + clip), old[i, t] - clip
        )
        return torch.maximum(error, (near - returns[i, t]) ** 2) / 2

    result = VALUE_LOSS(
        values,
        case.garbage(old),
        case.garbage(returns),
        weights_of(case.mask, mode),
        clip_range=clip,
    )
    assert_same(
        result.loss,
        values,
        aggregate_reference(token_by_token(case.mask, squared), mode),
        reference,
    )


def test_value_loss_by_hand():
    # Moved by 1 towards a far target, where 0.2 is allowed: the clipped error counts,
    # without a gradient.
    values = leaf(torch.tensor([[1.0, 0.1]]))
    result = VALUE_LOSS(
        values, torch.zeros(1, 2), torch.tensor([[3.0, 3.0]]), torch.full((1, 2), 0.5)
    )
    assert float(result.loss) == pytest.approx(0.5 * (2.8**2 / 2 + 2.9**2 / 2))
    result.loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, -2.9 / 2]]))
    assert finalize(result.metrics)["value_clip_fraction"] == 0.5
    # V_old + (V - V_old) is not V to the last bit: a value that has hardly moved is not
    # one that was clipped
    near_zero = torch.randn(1, 200, generator=torch.Generator().manual_seed(0)) * 1e-3
    old = torch.full((1, 200), 0.05)
    result = VALUE_LOSS(near_zero, old, torch.zeros(1, 200), torch.full((1, 200), 0.5))
    assert finalize(result.metrics)["value_clip_fraction"] == 0.0


def test_kl_estimators_by_hand():
    policy, reference = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    values = {
        name: float(kl_estimators.get(name).function(policy, reference))
        for name in kl_estimators
    }
    assert values["k1"] == pytest.approx(math.log(2))
    assert values["k2"] == pytest.approx(math.log(2) ** 2 / 2)
    assert values["k3"] == pytest.approx(0.5 - 1 + math.log(2))
    assert values["abs"] == values["k1"] and values["low_variance"] == values["k3"]
    far = kl_estimators.get("low_variance").function(
        torch.tensor([-5.0]), torch.tensor([-0.1])
    )
    assert float(far) == 10.0


def test_k1_and_k3_are_unbiased():
    p, q = (
        torch.tensor([0.5, 0.3, 0.2]).double(),
        torch.tensor([0.2, 0.2, 0.6]).double(),
    )
    exact = float((p * (p / q).log()).sum())
    for name in ("k1", "k3"):
        assert float(
            (p * kl_estimators.get(name).function(p.log(), q.log())).sum()
        ) == pytest.approx(exact)


@PROPERTY
@given(
    cases(),
    st.sampled_from(aggregations.names()),
    st.sampled_from(["k1", "k2", "k3", "abs", "low_variance"]),
)
def test_kl_loss_is_its_equation(case: Case, mode: str, kind: str):
    new, ref = case.normal(), case.normal()
    log_probs, reference = leaf(case.garbage(new)), leaf(new)

    def estimate(i: int, t: int) -> Tensor:
        log_r = ref[i, t] - reference[i, t]
        k3 = torch.exp(log_r) - 1 - log_r
        return {
            "k1": -log_r,
            "k2": log_r**2 / 2,
            "k3": k3,
            "abs": log_r.abs(),
            "low_variance": k3.clamp(max=10),
        }[kind]

    result = kl_loss(
        log_probs, case.garbage(ref), weights_of(case.mask, mode), kind=kind
    )
    assert_same(
        result.loss,
        log_probs,
        aggregate_reference(token_by_token(case.mask, estimate), mode),
        reference,
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "low_variance"])
def test_straight_through_has_the_value_of_the_kind_and_the_gradient_of_the_kl(
    kind: str,
):
    """Summed over all tokens with their probability: exactly the gradient of KL(policy || reference)."""
    generator = torch.Generator().manual_seed(0)
    logits = leaf(torch.randn(6, generator=generator, dtype=torch.float64))
    policy, reference = (
        logits.log_softmax(0),
        torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0),
    )
    weights = policy.detach().exp()[None]
    result = kl_loss(
        policy[None], reference[None], weights, kind=kind, gradient="straight_through"
    )
    plain = kl_loss(policy[None], reference[None], weights, kind=kind)
    assert float(result.loss.detach()) == pytest.approx(float(plain.loss.detach()))
    exact = (policy.exp() * (policy - reference)).sum()
    gradients = [
        torch.autograd.grad(value, logits, retain_graph=True)[0]
        for value in (result.loss, exact)
    ]
    torch.testing.assert_close(*gradients)
    if kind == "k1":  # and without it: none
        (gradient,) = torch.autograd.grad(plain.loss, logits)
        assert torch.allclose(gradient, torch.zeros(6).double(), atol=1e-12)


@PROPERTY
@given(cases(holes=True), st.sampled_from(aggregations.names()))
def test_the_likelihood_of_right_responses_is_its_equation(case: Case, mode: str):
    """VAPO's positive-example loss."""
    new = case.normal()
    log_probs, reference = leaf(case.garbage(new)), leaf(new)
    result = likelihood_sum(log_probs, weights_of(case.mask, mode))
    per_token = token_by_token(case.mask, lambda i, t: -reference[i, t])
    assert_same(result.loss, log_probs, aggregate_reference(per_token, mode), reference)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_importance_weights_have_the_gradient_of_the_kl_on_samples_of_another_policy(
    kind: str,
):
    """Summed over all tokens with the old policy's probability; and from the equation with loops, token by token."""
    generator = torch.Generator().manual_seed(0)
    logits = leaf(torch.randn(6, generator=generator, dtype=torch.float64))
    policy = logits.log_softmax(0)
    old, reference = (
        torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
        for _ in range(2)
    )
    result = kl_loss(
        policy[None],
        reference[None],
        old.exp()[None],
        old[None],
        kind=kind,
        gradient="importance",
    )
    exact = (policy.exp() * (policy - reference)).sum()
    assert float(result.loss.detach()) == pytest.approx(float(exact.detach()))
    gradients = [
        torch.autograd.grad(value, logits, retain_graph=True)[0]
        for value in (result.loss, exact)
    ]
    torch.testing.assert_close(*gradients)


@PROPERTY
@given(cases(holes=True), st.sampled_from(aggregations.names()))
def test_kl_gradients_are_their_equations(case: Case, mode: str):
    """The importance-weighted KL of DeepSeek-V3.2, and the score-function gradient of the KL of whole responses."""
    new, old, ref = case.normal(), case.normal(), case.normal()
    weights = weights_of(case.mask, mode)
    for kind, gradient in (("k3", "importance"), ("k1", "score")):
        log_probs, reference = leaf(case.garbage(new)), leaf(new)
        inputs = (log_probs, case.garbage(ref), weights, case.garbage(old))
        found = torch.autograd.grad(
            kl_loss(*inputs, kind=kind, gradient=gradient).loss, log_probs
        )[0]
        wanted = torch.zeros(()).double()
        for i, t in case.mask.nonzero().tolist():
            log_r = ref[i, t] - reference[i, t]
            if gradient == "importance":
                ratio = torch.exp(reference[i, t] - old[i, t])
                wanted = wanted + weights[i, t] * ratio * (torch.exp(log_r) - log_r - 1)
            else:
                after = [s for s in range(t, case.mask.shape[1]) if case.mask[i, s]]
                wanted = wanted + reference[i, t] * sum(
                    float(weights[i, s] * (new[i, s] - ref[i, s])) for s in after
                )
        expected = (
            torch.autograd.grad(wanted, reference)[0]
            if wanted.requires_grad
            else torch.zeros_like(new)
        )
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        plain = kl_loss(*inputs, kind=kind)
        if gradient == "score":
            same = kl_loss(*inputs, kind=kind, gradient=gradient)
            assert torch.equal(same.loss, plain.loss)


@PROPERTY
@given(cases(), st.sampled_from(aggregations.names()), st.data())
def test_any_split_adds_up_to_the_same_loss_and_metrics(
    case: Case, mode: str, data: st.DataObject
):
    """Rows dealt to any number of micro-batches, each trimmed or widened: sums and gradients stay."""
    tensors = [case.normal(scale=0.5) for _ in range(6)]
    parameter = leaf(tensors[0])

    def losses(rows: list[int], width: int) -> LossOutput:
        def cut(tensor: Tensor) -> Tensor:
            room = torch.nn.functional.pad(
                tensor[rows], (0, max(0, width - tensor.shape[1]))
            )
            return room[:, :width]

        new, old, advantages, reference, entropy, returns = map(
            cut, [parameter, *tensors[1:]]
        )
        weights = weights_of(cut(case.mask), mode, whole=case.mask)
        return combine(
            (1.0, ppo_clip(new, old, advantages, weights)),
            (0.3, kl_loss(new, reference, weights)),
            (-0.1, entropy_sum(entropy, weights)),
            (0.5, VALUE_LOSS(new, old, returns, weights)),
        )

    count = data.draw(st.integers(1, 4))
    owners = data.draw(
        st.lists(
            st.integers(0, count - 1), min_size=len(case.mask), max_size=len(case.mask)
        )
    )
    whole = losses(list(range(len(case.mask))), case.mask.shape[1])
    total, metrics = torch.zeros((), dtype=torch.float64), {}
    for part in range(count):
        rows = [row for row, owner in enumerate(owners) if owner == part]
        longest = max([int(case.mask[row].sum()) for row in rows], default=0)
        width = longest + data.draw(st.integers(0, 3))
        share = losses(rows, width)
        total, metrics = total + share.loss, add_metrics(metrics, share.metrics)

    assert_same(total, parameter, whole.loss, parameter)
    assert finalize(metrics) == pytest.approx(finalize(whole.metrics), abs=1e-9)


@pytest.mark.parametrize("gap", [1e4, -1e4, float("inf"), -float("inf")])
@pytest.mark.parametrize("advantage", [3.0, -3.0, 0.0])
def test_huge_log_ratios_stay_finite(gap, advantage):
    log_probs = leaf(torch.tensor([[gap, -1.0]]))
    old, advantages = torch.tensor([[-2.0, -1.0]]), torch.full((1, 2), advantage)
    weights = torch.full((1, 2), 0.5)
    for loss in (
        ppo_clip(log_probs, old, advantages, weights),
        kl_loss(log_probs, old, weights, kind="k3"),
    ):
        if gap == float("inf") and "kl_loss" in loss.metrics:
            # A log-prob of +inf does not exist, and k3 without a bound below says so.
            continue
        assert torch.isfinite(loss.loss) and all(
            torch.isfinite(m).all() for m in loss.metrics.values()
        )
        (gradient,) = torch.autograd.grad(loss.loss, log_probs)
        assert torch.isfinite(gradient).all()


def test_a_mini_batch_without_a_token_has_loss_zero():
    mask = torch.zeros(2, 3, dtype=torch.bool)
    log_probs = leaf(torch.full((2, 3), torch.nan))
    for mode in aggregations:
        result = ppo_clip(
            log_probs,
            torch.zeros(2, 3),
            torch.zeros(2, 3),
            weights_of(mask, mode).float(),
        )
        (gradient,) = torch.autograd.grad(result.loss, log_probs)
        assert float(result.loss) == 0.0 and not gradient.any()
        assert finalize(result.metrics)["ratio"] == 0.0


def test_weights_of_the_aggregations_by_hand():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    expected = {
        "token_mean": [1 / 4, 1 / 4],
        "seq_mean_token_mean": [1 / 6, 1 / 2],
        "seq_mean_token_sum": [1 / 2] * 2,
        "token_sum": [1, 1],
        # Two responses that are not empty, nine tokens each.
        "fixed_length": [1 / 18] * 2,
    }
    assert set(aggregations) == set(expected)
    for mode, (first, second) in expected.items():
        weights = torch.tensor([[first] * 3, [second, 0, 0], [0, 0, 0]]).double()
        torch.testing.assert_close(weights_of(mask, mode), weights, atol=1e-7, rtol=0)


@PROPERTY
@given(cases(holes=True), st.sampled_from(aggregations.names()), st.data())
def test_an_episode_weighs_as_one_sequence_however_its_rows_are_split(
    case: Case, mode: str, data: st.DataObject
):
    """In each mini-batch sum_i v_i / n_i over sum_i 1 / n_i, n_i the rows of row i's
    episode in all mini-batches, v_i the row's mean or sum over tokens; what is counted
    by tokens stays.
    """
    rows, count = len(case.mask), st.integers(0, 2)
    episodes = data.draw(st.lists(count, min_size=rows, max_size=rows))
    parts = data.draw(st.lists(count, min_size=rows, max_size=rows))
    values, num_tokens = leaf(case.normal()), case.mask.sum(dim=1)
    shares = episode_shares(num_tokens, torch.tensor(episodes))
    entry, options = (
        aggregations.get(mode),
        {"max_tokens": FIXED_LENGTH} if mode == "fixed_length" else {},
    )
    for part in set(parts):
        mine = [row for row in range(rows) if parts[row] == part]
        mask = case.mask * torch.tensor([[each == part] for each in parts])
        inputs = {
            "response_mask": mask,
            "denominators": make_denominators(num_tokens[mine], shares[mine]),
            "episode_shares": shares,
        }
        weights = entry(inputs, dtype=torch.float64, **options)
        tokens = token_by_token(mask, lambda i, t: values[i, t])
        if mode in ("token_mean", "token_sum"):
            reference = aggregate_reference(tokens, mode)
        else:
            each = {
                i: aggregate_reference([row], mode)
                for i, row in enumerate(tokens)
                if row
            }
            whole = [
                sum(
                    other == episodes[i] and bool(num_tokens[n])
                    for n, other in enumerate(episodes)
                )
                for i in each
            ]
            total = sum(
                value / n for value, n in zip(each.values(), whole, strict=True)
            )
            reference = (
                total / sum(1 / n for n in whole) if each else torch.zeros(()).double()
            )
        assert_same((weights * values).sum(), values, reference, values)


def test_a_term_with_coefficient_zero_has_metrics_and_no_gradient():
    parameter = leaf(torch.tensor([[0.3]]))
    weights = torch.ones(1, 1)
    total = combine(
        (1.0, ppo_clip(parameter, torch.zeros(1, 1), torch.ones(1, 1), weights)),
        (0.0, kl_loss(parameter, torch.zeros(1, 1), weights)),
    )
    assert set(total.metrics) == {"kl_loss", "clip_fraction", "approx_kl", "ratio"}
    total.loss.backward()
    assert not parameter.grad.any()  # clipped, and the KL is switched off
    with pytest.raises(ValueError, match="at least one loss"):
        combine()


def test_unknown_kl_lists_the_nearest():
    with pytest.raises(
        ConfigError, match=r"unknown KL estimator 'k_3' \(did you mean 'k3'"
    ):
        kl_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), kind="k_3")


def test_policy_loss_can_be_called_from_a_batch_by_name():
    batch = {
        name: torch.zeros(1, 2)
        for name in ("log_probs", "old_log_probs", "advantages", "weights", "values")
    }
    assert float(policy_losses.get("ppo_clip")(batch, clip_low=0.1).loss) == 0.0
