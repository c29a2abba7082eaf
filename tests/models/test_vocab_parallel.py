"""Log-probs in pieces: chunks, rows by index, squared probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megaverl.models import vocab_parallel
from megaverl.models.vocab_parallel import (
    vocab_parallel_log_probs,
    vocab_parallel_squared_probs,
)
from tests.models.test_heads import PADDED, assert_close, example, reference


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows at a time, whatever their number."""
    monkeypatch.setattr(vocab_parallel, "SMALLEST_CHUNK", 3 * PADDED)
    monkeypatch.setattr(vocab_parallel, "LARGEST_CHUNK", 3 * PADDED)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_chunks_give_what_the_whole_gives(small_chunks: None, rows: int) -> None:
    logits, targets, weights = example(rows, 20, seed=5)
    given, top_k = (
        logits.clone().requires_grad_(),
        torch.tensor([4, 0, 1, 30, 2, 0, 7, 3])[:rows],
    )
    log_probs, entropy = vocab_parallel_log_probs(
        given, targets, vocab_size=20, temperature=0.7, top_k=top_k, with_entropy=True
    )
    (weights[0] * log_probs + weights[1] * entropy).sum().backward()
    expected = reference(logits, targets, 20, weights, 0.7, top_k.tolist())
    for found, wanted in zip((log_probs, entropy, given.grad), expected, strict=True):
        assert found is not None
        assert_close(found, wanted)


def test_rows_by_index_of_a_batch_of_sequences(small_chunks: None) -> None:
    logits, targets, weights = example(12, 20, seed=6)
    index = torch.tensor([10, 0, 3, 7, 4])
    expected = reference(logits[index], targets[index], 20, weights[:, index])
    given = logits.view(3, 4, PADDED).clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(
        given, targets[index], vocab_size=20, with_entropy=True, index=index
    )
    (weights[0, index] * log_probs + weights[1, index] * entropy).sum().backward()
    assert_close(log_probs, expected[0])
    assert_close(entropy, expected[1])
    assert given.grad is not None
    gradient = given.grad.view(12, PADDED)
    assert_close(gradient[index], expected[2])
    others = [row for row in range(12) if row not in index.tolist()]
    assert not gradient[others].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_soft_cap(small_chunks: None, dtype: torch.dtype) -> None:
    """Before the temperature and the choice of the likeliest tokens; half of the logits are above it."""
    logits, targets, weights = example(8, 20, seed=9)
    given = logits.to(dtype).requires_grad_()
    top_k = torch.tensor([4, 0, 1, 30, 2, 0, 7, 3])
    log_probs, entropy = vocab_parallel_log_probs(
        given,
        targets,
        vocab_size=20,
        temperature=0.7,
        top_k=top_k,
        with_entropy=True,
        softcap=2.0,
    )
    (weights[0] * log_probs + weights[1] * entropy).sum().backward()
    plain = given.detach().double().requires_grad_()
    capped = 2.0 * torch.tanh(plain / 2.0)
    *expected, by_capped = reference(capped, targets, 20, weights, 0.7, top_k.tolist())
    assert_close(log_probs, expected[0])
    assert_close(entropy, expected[1])
    (gradient,) = torch.autograd.grad(capped, plain, by_capped)
    assert given.grad is not None
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        given.grad.double(), gradient, atol=tolerance, rtol=tolerance
    )
    again, _ = vocab_parallel_squared_probs(
        given, targets, vocab_size=20, softcap=2.0, temperature=0.7, top_k=top_k
    )
    assert_close(again, expected[0])


def test_impossible_tokens_do_no_harm() -> None:
    logits, targets, weights = example(2, PADDED, seed=7)
    logits[0, 5:] = -torch.inf
    targets[0] = 2
    given = logits.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(
        given, targets, vocab_size=PADDED, with_entropy=True
    )
    (weights[0] * log_probs + weights[1] * entropy).sum().backward()
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert_close(entropy, -(expected.exp() * expected.clamp(min=-1e300)).sum(-1))
    assert given.grad is not None and torch.isfinite(given.grad).all()


def test_squared_probs_by_the_book(small_chunks: None) -> None:
    logits, targets, _ = example(7, 20, seed=8)
    log_probs, squares = vocab_parallel_squared_probs(
        logits, targets, vocab_size=20, temperature=2.0
    )
    expected = torch.log_softmax(logits[:, :20].double() / 2.0, dim=-1)
    assert_close(log_probs, expected.gather(1, targets[:, None])[:, 0])
    assert_close(squares, expected.exp().square().sum(-1))


class Largest(TorchDispatchMode):
    """The storages that operations make, by their size in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.made[tensor.untyped_storage().data_ptr()] = (
                    tensor.untyped_storage().nbytes()
                )
        return result


def test_nothing_of_the_size_of_the_logits_is_made_but_their_gradient() -> None:
    logits = (
        torch.randn(256, 16384, generator=torch.Generator().manual_seed(0))
        .bfloat16()
        .requires_grad_()
    )
    targets = torch.arange(256)
    size = logits.numel() * logits.element_size()
    with Largest() as found:
        log_probs, entropy = vocab_parallel_log_probs(
            logits, targets, vocab_size=16384, with_entropy=True
        )
        (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    others = {
        logits.untyped_storage().data_ptr(),
        logits.grad.untyped_storage().data_ptr(),
    }
    assert found.made[logits.grad.untyped_storage().data_ptr()] == size
    rest = [made for address, made in found.made.items() if address not in others]
    assert max(rest) <= size / 8, "a float32 copy of a sixteenth of them"
