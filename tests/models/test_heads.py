"""Log-probabilities over a cut and padded vocabulary against torch's own in float64; the value head."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.models.layers import ValueHead
from megaverl.models.vocab_parallel import vocab_parallel_log_probs
from tests.launcher import Launcher

PADDED = 24


def reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    weights: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    top_k: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probs, entropies, gradient of their weighted sum) in float64, by the book.

    Args:
        top_k: of each row, so many of its likeliest tokens, and its target; 0: all.
    """
    logits = logits.double().detach().requires_grad_()
    divisor = (
        temperature[:, None].double()
        if isinstance(temperature, torch.Tensor)
        else temperature
    )
    scaled = logits[:, :vocab_size] / divisor
    out = torch.zeros_like(scaled, dtype=torch.bool)
    for row, count in enumerate(top_k):
        if count:
            out[row] = True
            out[row, scaled[row].topk(min(count, vocab_size)).indices] = False
            out[row, targets[row]] = False
    distribution = torch.log_softmax(scaled.masked_fill(out, -torch.inf), dim=-1)
    log_probs = distribution.gather(1, targets[:, None])[:, 0]
    # a token of probability zero adds nothing to the entropy
    entropy = -(distribution.exp() * distribution.clamp(min=-1e300)).sum(dim=-1)
    (weights[0].double() * log_probs + weights[1].double() * entropy).sum().backward()
    assert logits.grad is not None
    return log_probs.detach(), entropy.detach(), logits.grad


def example(
    rows: int, vocab_size: int, seed: int, scale: float = 3.0
) -> tuple[torch.Tensor, ...]:
    """(logits [rows, PADDED], targets [rows], weights [2, rows])."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, PADDED, generator=generator) * scale
    targets = torch.randint(0, vocab_size, (rows,), generator=generator)
    return logits, targets, torch.randn(2, rows, generator=generator)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)


@settings(deadline=None)
@given(
    rows=st.integers(1, 5),
    vocab_size=st.integers(1, PADDED),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    temperature=st.sampled_from([1.0, 0.6, 2.0]),
)
def test_values_and_gradients_are_torchs_own(
    rows: int, vocab_size: int, seed: int, scale: float, temperature: float
) -> None:
    logits, targets, weights = example(rows, vocab_size, seed, scale)
    given_logits = logits.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(
        given_logits,
        targets,
        vocab_size=vocab_size,
        temperature=temperature,
        with_entropy=True,
    )
    (weights[0] * log_probs + weights[1] * entropy).sum().backward()
    expected = reference(logits, targets, vocab_size, weights, temperature)
    # at this scale a logit is near 100 and float32 keeps 7 digits of it
    scale_of = max(1.0, float(logits.abs().max()) / temperature)
    for found, wanted in zip(
        (log_probs, entropy, given_logits.grad), expected, strict=True
    ):
        assert found is not None
        assert_close(found / scale_of, wanted / scale_of)
    assert torch.equal(given_logits.detach(), logits), (
        "the caller's logits stay as they were"
    )


def test_padding_of_the_vocabulary_has_no_probability_and_no_gradient() -> None:
    logits, targets, _ = example(4, 10, seed=1)
    logits[:, 10:] = 1000.0  # would drown every real token
    logits.requires_grad_()
    log_probs, _ = vocab_parallel_log_probs(logits, targets, vocab_size=10)
    log_probs.sum().backward()
    assert_close(log_probs, reference(logits, targets, 10, torch.zeros(2, 4))[0])
    assert logits.grad is not None
    assert logits.grad[:, 10:].abs().max() == 0
    assert logits.grad[:, :10].abs().max() > 0


def test_without_entropy_the_second_result_is_zero_and_takes_no_gradient() -> None:
    logits, targets, weights = example(3, PADDED, seed=2)
    one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(one, targets, vocab_size=PADDED)
    assert torch.equal(entropy, torch.zeros(3))
    (log_probs.sum() + (weights[1] * entropy).sum()).backward()
    vocab_parallel_log_probs(other, targets, vocab_size=PADDED)[0].sum().backward()
    assert one.grad is not None and other.grad is not None
    assert torch.equal(one.grad, other.grad)


def test_sixteen_bit_logits_are_computed_in_float32() -> None:
    logits, targets, weights = example(4, 20, seed=3)
    half = logits.bfloat16()
    log_probs, entropy = vocab_parallel_log_probs(
        half, targets, vocab_size=20, with_entropy=True
    )
    assert log_probs.dtype == entropy.dtype == torch.float32
    expected = reference(half, targets, 20, weights)
    assert_close(log_probs, expected[0])
    assert_close(entropy, expected[1])


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_rows_at_all(with_entropy: bool) -> None:
    """A data-parallel rank may hold padding only."""
    logits = torch.empty(0, PADDED, requires_grad=True)
    values = vocab_parallel_log_probs(
        logits,
        torch.empty(0, dtype=torch.int64),
        vocab_size=20,
        with_entropy=with_entropy,
    )
    assert [tuple(value.shape) for value in values] == [(0,), (0,)]
    (values[0].sum() + values[1].sum()).backward()
    assert logits.grad is not None and logits.grad.shape == (0, PADDED)


def test_two_shards_give_what_one_gives(launch: Launcher) -> None:
    """Each row drawn in its own way; targets are among those that could be drawn, or were so once."""
    temperature, top_k = (
        torch.tensor([0.7, 1.0, 0.3, 2.0, 1.0, 0.7]),
        [0, 3, 2, 1, 50, 8],
    )
    cases, wanted = [], []
    # Whole, cut in the second shard, just before it, in the first.
    for vocab_size in (24, 20, 12, 7):
        logits, targets, weights = example(6, vocab_size, seed=4)
        targets[0], targets[1] = 0, vocab_size - 1
        wanted.append(
            reference(logits, targets, vocab_size, weights, temperature, top_k)
        )
        case = {
            "logits": logits.tolist(),
            "targets": targets.tolist(),
            "weights": weights.tolist(),
        }
        cases.append({**case, "vocab_size": vocab_size})
    options = {
        "temperature": temperature.tolist(),
        "top_k": top_k,
        "with_entropy": True,
    }
    results = launch.world(
        2, "tests.models.head_ranks:log_probs_of_all", cases=cases, **options
    )
    for found, expected in zip(zip(*results, strict=True), wanted, strict=True):
        for rank in found:
            assert_close(torch.tensor(rank["values"][0]), expected[0])
            assert_close(torch.tensor(rank["values"][1]), expected[1])
        assert_close(
            torch.cat([torch.tensor(rank["grad"]) for rank in found], dim=1),
            expected[2],
        )


def test_the_value_head_is_linear_in_float32_and_starts_at_zero() -> None:
    config = SimpleNamespace(
        hidden_size=8, params_dtype=torch.bfloat16, sequence_parallel=False
    )
    head = ValueHead(config, tp_group=None)  # type: ignore[arg-type]
    hidden = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    values, bias = head(hidden)
    assert bias is None and values.dtype == torch.float32
    assert torch.equal(values, torch.zeros(5, 2, 1))
    with torch.no_grad():
        head.weight.copy_(torch.arange(8.0))
    expected = (hidden.double() * torch.arange(8.0).double()).sum(dim=-1, keepdim=True)
    torch.testing.assert_close(head(hidden)[0].double(), expected, atol=1e-4, rtol=1e-5)
    assert (
        head.weight.dtype == torch.bfloat16 and head.weight.sequence_parallel is False
    )
