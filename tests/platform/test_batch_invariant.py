"""Products, attention and sums whose bits for a token do not depend on the rest of its batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megaverl.models.attention import attend_rows
from megaverl.models.vocab_parallel import vocab_parallel_log_probs
from megaverl.platform import batch_invariant as invariant
from megaverl.platform.vllm_batch_invariant import ADAPTATIONS, NEGLIGIBLE


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_list_is_whole_and_says_why() -> None:
    assert [adaptation.name for adaptation in ADAPTATIONS] == [
        "products in tiles",
        "norms of the trainer",
        "SiLU of exact parts",
        "rotary embeddings in separate operations",
        "attention by blocks of keys",
        "log-probs of the trainer",
    ]
    assert all(len(adaptation.reason) > 20 for adaptation in ADAPTATIONS)


@pytest.mark.parametrize("inner", [1, 37, 64, 500])
@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
def test_a_row_s_product_is_its_own(inner: int, width: int) -> None:
    x, weight, bias = normal(41, inner), normal(width, inner, seed=1), normal(width)
    whole = invariant.linear(x, weight, bias)
    expected = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), expected, atol=1e-4, rtol=1e-4)
    for rows in (slice(0, 1), slice(40, 41), slice(3, 20)):
        assert torch.equal(invariant.linear(x[rows], weight, bias), whole[rows])
    # A layer's columns may be a part of a wider layer of the other side.
    columns = slice(width // 3, width)
    part = invariant.linear(x, weight[columns], bias[columns])
    assert torch.equal(part, whole[:, columns])
    # Leading dimensions, and rows that are not contiguous.
    strided = x.t().contiguous().t()[None]
    assert torch.equal(invariant.linear(strided, weight, bias), whole[None])


@pytest.mark.parametrize("count", [1, 17, 64, 65, 150])
@pytest.mark.parametrize("window", [None, 9])
def test_a_query_s_attention_is_its_own(count: int, window: int | None) -> None:
    q, k, v = normal(2, 6, count, 32), normal(2, 2, count, 32, seed=1), normal(2, 2, count, 32, seed=2)  # fmt: skip
    look = torch.ones(count, count, dtype=torch.bool).tril()
    if window is not None:
        look = look.triu(1 - window)
    look = look[None, None]
    whole = invariant.attend(q, k, v, look, None)
    exact = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=look, enable_gqa=True
    )
    torch.testing.assert_close(whole.double(), exact, atol=1e-5, rtol=1e-5)
    # The last query, as an engine decodes it, beside a sequence of another length.
    longer = normal(2, 2, 40, 32, seed=3)
    keys, values = (torch.cat([x, longer], dim=2) for x in (k, v))
    last = F.pad(look[:, :, -1:], (0, 40))
    decoded = invariant.attend(q[:, :, -1:], keys, values, last, None)
    assert torch.equal(decoded, whole[:, :, -1:])
    # One sequence by itself, and only some queries of it.
    part = invariant.attend(
        q[1:, :, count // 2 :], k[1:], v[1:], look[:, :, count // 2 :], None
    )
    assert torch.equal(part, whole[1:, :, count // 2 :])


def test_many_queries_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = normal(1, 2, 100, 32), normal(1, 2, 100, 32, seed=1), normal(1, 2, 100, 32, seed=2)  # fmt: skip
    look = torch.ones(100, 100, dtype=torch.bool).tril()[None, None]
    whole = invariant.attend(q, k, v, look, 0.3)
    monkeypatch.setattr(invariant, "LARGEST_COPIES", 1)
    assert torch.equal(invariant.attend(q, k, v, look, 0.3), whole)


def test_gradient_of_attention() -> None:
    inputs = [
        normal(2, heads, 30, 32, seed=heads).requires_grad_() for heads in (4, 2, 2)
    ]
    grad = normal(2, 4, 30, 32, seed=9)
    expected = torch.autograd.grad(attend_rows(*inputs, None, None, None), inputs, grad)
    with invariant.batch_invariant(True):
        output = attend_rows(*inputs, None, None, None)
        found = torch.autograd.grad(output, inputs, grad)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert output.grad_fn is not None and not invariant.is_batch_invariant()


def test_silu_and_rms_do_not_depend_on_the_place() -> None:
    x = normal(1000) * 5
    whole = invariant.silu(x)
    torch.testing.assert_close(whole, F.silu(x), atol=1e-6, rtol=1e-6)
    for start in range(0, 40, 3):
        for length in (1, 7, 15, 33):
            part = slice(start, start + length)
            assert torch.equal(invariant.silu(x[part].clone()), whole[part])
    rows = normal(50, 100)
    inverse = invariant.inverse_rms(rows, 1e-6, torch.float32)
    for row in (0, 49):
        alone = invariant.inverse_rms(rows[row : row + 1], 1e-6, torch.float32)
        assert torch.equal(alone, inverse[row : row + 1])


@pytest.mark.parametrize("vocab_size", [7, 150, 40_000])
def test_log_probs_are_those_of_the_trainer(vocab_size: int) -> None:
    logits = normal(5, vocab_size) * 3
    targets = torch.arange(5)
    with invariant.batch_invariant(True):
        engine = invariant.log_softmax(logits / 0.7, NEGLIGIBLE)
        ours, _ = vocab_parallel_log_probs(
            logits, targets, vocab_size=vocab_size, temperature=0.7
        )
        alone, _ = vocab_parallel_log_probs(
            logits[3:4], targets[3:4], vocab_size=vocab_size, temperature=0.7
        )
    assert torch.equal(engine.gather(1, targets[:, None])[:, 0], ours)
    assert torch.equal(alone, ours[3:4])
