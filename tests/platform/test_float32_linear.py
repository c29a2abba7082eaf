"""Logits in float32 from weights of 16 bits, whole and in chunks, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megaverl.models import vocab_parallel
from megaverl.models.vocab_parallel import vocab_parallel_log_probs
from megaverl.platform import float32_linear as module
from megaverl.platform.float32_linear import float32_linear
from tests.models.test_vocab_parallel import Largest

VOCAB, PADDED, HIDDEN, ROWS = 300, 320, 64, 50


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of the weight, the last one shorter, and several chunks of rows."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 4 * HIDDEN * 90)
    monkeypatch.setattr(vocab_parallel, "CHUNK_BYTES", 1)


def example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden [2, ROWS / 2, HIDDEN], weight [PADDED, HIDDEN], targets [ROWS]); logits have a deviation of 8."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, ROWS // 2, HIDDEN, generator=generator).bfloat16()
    weight = torch.randn(PADDED, HIDDEN, generator=generator).bfloat16()
    return hidden, weight, torch.randint(0, VOCAB, (ROWS,), generator=generator)


@pytest.mark.parametrize("chunked", [False, True])
def test_log_probs_and_gradients_are_those_of_float64(chunked: bool) -> None:
    hidden, weight, targets = example()
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    logits = (exact[0] @ exact[1].t()).flatten(0, 1)[:, :VOCAB] / 0.7
    distribution = logits.log_softmax(-1)
    expected = distribution.gather(1, targets[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    (expected.sin() + 0.3 * entropy).sum().backward()

    ours = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    rows, of_layer = (
        (ours[0].float(), ours[1]) if chunked else (float32_linear(*ours), None)
    )
    found, found_entropy = vocab_parallel_log_probs(
        rows,
        targets,
        weight=of_layer,
        vocab_size=VOCAB,
        temperature=0.7,
        with_entropy=True,
    )
    (found.sin() + 0.3 * found_entropy).sum().backward()

    # Products of 16-bit matrices that are rounded are wrong by 0.1 here.
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(found_entropy.double(), entropy, atol=1e-5, rtol=1e-6)
    for tensor, reference in zip(ours, exact, strict=True):
        assert tensor.grad is not None and reference.grad is not None
        assert tensor.grad.dtype == torch.bfloat16
        # Rounded once, where 0.08 of the elements are right with products in bfloat16.
        is_same = tensor.grad == reference.grad.bfloat16()
        assert is_same.double().mean() > 0.97


def test_bias_and_frozen_weight() -> None:
    hidden, weight, _ = example()
    bias = torch.linspace(-1, 1, PADDED).bfloat16().requires_grad_()
    found = float32_linear(hidden, weight, bias)
    torch.testing.assert_close(
        found, F.linear(hidden.float(), weight.float(), bias.float())
    )
    found.sum().backward()
    assert weight.grad is None and bias.grad is not None
    assert bias.grad.dtype == torch.bfloat16


def test_no_float32_copy_of_the_weight() -> None:
    hidden, weight, _ = example()
    with Largest() as seen:
        logits = float32_linear(hidden[:, :2], weight.requires_grad_())
        logits.backward(torch.ones_like(logits))
    assert weight.grad is not None
    assert max(seen.made.values()) == weight.grad.nbytes
