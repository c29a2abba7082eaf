"""Log-probs straight from hidden states: the numbers and gradients of whole logits, which never exist."""

from __future__ import annotations

from collections.abc import Callable
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

VOCAB, PADDED, HIDDEN = 50, 64, 24


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 rows at a time, the fewest."""
    monkeypatch.setattr(vocab_parallel, "CHUNK_BYTES", 1)


def example(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden [rows, HIDDEN], weight [PADDED, HIDDEN], index [n], targets [n])"""
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (
        torch.randn(size, HIDDEN, generator=generator) for size in (rows, PADDED)
    )
    index = torch.randperm(rows, generator=generator)[: rows * 2 // 3]
    return (
        hidden,
        weight,
        index,
        torch.randint(0, VOCAB, (len(index),), generator=generator),
    )


@pytest.mark.parametrize(
    ("with_entropy", "softcap"), [(False, None), (True, None), (True, 3.0)]
)
def test_what_whole_logits_give(
    small_chunks: None, with_entropy: bool, softcap: float | None
) -> None:
    hidden, weight, index, targets = example(60)
    drawn = {
        "temperature": torch.linspace(0.5, 1.5, len(index)),
        "top_k": torch.arange(len(index)) % 7,
    }
    options: dict[str, Any] = {"index": index, "vocab_size": VOCAB, **drawn}
    options["softcap"] = softcap
    found = []
    for function in (
        lambda h, w: vocab_parallel_log_probs(
            h @ w.t(), targets, with_entropy=with_entropy, **options
        ),
        lambda h, w: vocab_parallel_log_probs(
            h, targets, weight=w, with_entropy=with_entropy, **options
        ),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        log_probs, entropy = function(h, w)
        (log_probs.sin() + (0.3 * entropy if with_entropy else 0.0)).sum().backward()
        found.append((log_probs, entropy, h.grad, w.grad))
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    squares = vocab_parallel_squared_probs(hidden, targets, weight=weight, **options)
    for ours, theirs in zip(
        squares,
        vocab_parallel_squared_probs(hidden @ weight.t(), targets, **options),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_no_tensor_as_large_as_the_logits(small_chunks: None) -> None:
    hidden, weight, index, targets = example(600)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    with Largest() as seen:
        log_probs, _ = vocab_parallel_log_probs(
            h, targets, weight=w, index=index, vocab_size=VOCAB
        )
        log_probs.sum().backward()
    assert seen.numel <= max(hidden.numel(), weight.numel()) < len(index) * PADDED


def test_a_frozen_weight_gets_no_gradient(small_chunks: None) -> None:
    hidden, weight, index, targets = example(30)
    h = hidden.requires_grad_()
    vocab_parallel_log_probs(h, targets, weight=weight, index=index, vocab_size=VOCAB)[
        0
    ].sum().backward()
    assert h.grad is not None and weight.grad is None


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return result
