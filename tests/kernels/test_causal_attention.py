"""The kernel of packed bfloat16 rows beside the equation in float64."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.kernels import causal_attention, extension
from megaverl.kernels.causal_attention import fits, packed_causal_attention
from megaverl.kernels.extension import why_not
from megaverl.models.attention import CausalAttention
from megaverl.models.packing import Packing, pack

needs_kernel = pytest.mark.skipif(bool(why_not()), reason=f"the kernel cannot be used here: {why_not()}")
# Weights and the gradients of scores are rounded to 8 bits before they are multiplied, the results once more.
TOLERANCE = 2**-7


@pytest.fixture(autouse=True, scope="module", params=["registers", "tiles"])
def products(request: pytest.FixtureRequest) -> Iterator[None]:
    """How matrices are multiplied: the one that every processor has that the kernel runs on, and AMX's."""
    if request.param == "tiles" and not extension.has_tiles():
        pytest.skip("this processor has no AMX")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_attention, "has_tiles", lambda: request.param == "tiles")
        yield


# groups of sequences: (tokens that all of a group share, [tokens of each one's own])
GROUPS = st.lists(
    st.tuples(st.integers(0, 90), st.lists(st.integers(1, 150), min_size=1, max_size=3)), min_size=1, max_size=3
)


def packing_of(groups: list[tuple[int, list[int]]], multiple_of: int = 1) -> Packing:
    lengths = [common + tokens for common, own in groups for tokens in own]
    shared = [common for common, own in groups for _ in own]
    numbers = [number for number, (_, own) in enumerate(groups) for _ in own]
    return pack(lengths, shared, numbers, width=max(lengths), multiple_of=multiple_of)


def drawn(tokens: int, heads: int, kv_heads: int, dim: int, spread: float = 1.5) -> tuple[torch.Tensor, ...]:
    """Query, key and value as megatron-core has them: parts of one projection, and so with gaps."""
    joined = (spread * torch.randn(tokens, heads + 2 * kv_heads, dim)).bfloat16()
    return joined.split([heads, kv_heads, kv_heads], dim=1)


def by_the_equation(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(q k^T * scale) v in float64, segment by segment; [t, heads, d]."""
    result = torch.zeros_like(query)
    for beginning, common, start, count in segments.tolist():
        seen = [*range(beginning, beginning + common), *range(start, start + count)]
        repeats = query.shape[1] // key.shape[1]
        k, v = (x[seen].repeat_interleave(repeats, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start : start + count], k) * scale
        hidden = torch.ones(count, common + count, dtype=torch.bool).triu(common + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        own = torch.einsum("hqk,khd->qhd", weights, v)
        result = result.index_add(0, torch.arange(start, start + count), own)
    return result


def computed(
    tensors: tuple[torch.Tensor, ...], segments: torch.Tensor, grad: torch.Tensor, scale: float | None = None
) -> list[torch.Tensor]:
    """The kernel's output and gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = packed_causal_attention(*leaves, segments, scale)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Beside what is expected, and not less than a half each: of few keys, gradients of scores cancel."""
    return float((found.double() - expected).norm() / (expected.norm() + 0.5 * expected.numel() ** 0.5))


@needs_kernel
@settings(max_examples=40, deadline=None)
@given(
    groups=GROUPS,
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (3, 3), (8, 2)]),
    dim=st.sampled_from([16, 32, 48, 64, 80, 128]),
    scale=st.sampled_from([None, 0.07]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_the_equations(
    groups: list[tuple[int, list[int]]], heads: tuple[int, int], dim: int, scale: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    packing = packing_of(groups, multiple_of=8)
    tokens = len(packing.source)
    tensors = drawn(tokens, *heads, dim)
    grad = torch.randn(tokens, heads[0], dim).bfloat16()
    assert fits(*tensors, packing.segments)
    output, *grads = computed(tensors, packing.segments, grad, scale)

    exact = [x.double().requires_grad_() for x in tensors]
    expected = by_the_equation(*exact, packing.segments, scale or dim**-0.5)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    assert output.dtype == torch.bfloat16 and relative_error(output, expected.detach()) < TOLERANCE
    for found, wanted in zip(grads, expected_grads, strict=True):
        assert found.dtype == torch.bfloat16 and relative_error(found, wanted) < TOLERANCE
    filling = tokens - int(packing.segments[:, 3].sum())
    if filling:
        assert not any(x[-filling:].any() for x in (output, *grads))


@needs_kernel
def test_pytorchs_products_find_their_tiles_as_they_left_them() -> None:
    packing = packing_of([(40, [60, 5, 90])])
    tensors = drawn(len(packing.source), 4, 2, 32)
    left, right = torch.randn(100, 72).bfloat16(), torch.randn(72, 40).bfloat16()
    product = left @ right
    output = packed_causal_attention(*tensors, packing.segments)
    assert torch.equal(left @ right, product)
    assert torch.equal(packed_causal_attention(*tensors, packing.segments), output)


@needs_kernel
def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    packing = packing_of([(3, [200, 90])])
    tensors = drawn(len(packing.source), 4, 2, 32, spread=30.0)
    output = packed_causal_attention(*tensors, packing.segments)
    expected = by_the_equation(*(x.double() for x in tensors), packing.segments, 32**-0.5)
    assert relative_error(output, expected) < TOLERANCE


@needs_kernel
def test_the_same_bits_in_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = packing_of([(40, [60, 5, 90]), (0, [33, 130]), (17, [1, 2]), (70, [64])])
    tensors, grad = drawn(len(packing.source), 8, 2, 32), torch.randn(len(packing.source), 8, 32).bfloat16()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = computed(tensors, packing.segments, grad)
    for threads in (2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert all(map(torch.equal, computed(tensors, packing.segments, grad), alone))


@needs_kernel
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_what_is_no_number_stays_none(which: str) -> None:
    packing = packing_of([(0, [100, 20])])
    tensors = dict(zip(("query", "key", "value"), drawn(120, 2, 2, 16), strict=True))
    tensors[which] = tensors[which].clone()
    tensors[which][50, 1, 3] = torch.nan
    output = packed_causal_attention(**tensors, segments=packing.segments)
    touched = torch.zeros(120, 2, 16, dtype=torch.bool)
    touched[50 : 51 if which == "query" else 100, 1, 3 if which == "value" else slice(None)] = True
    assert output.isnan()[touched].all()
    if which == "value":  # beside what a query does not see, weights are 0, and 0 times no number is none
        touched[:100, 1, 3] = True
    assert not output.isnan()[~touched].any()


@needs_kernel
def test_what_it_does_not_compute_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = packing_of([(0, [5])]).segments
    query, key, value = drawn(5, 4, 2, 32)
    assert fits(query, key, value, segments)
    assert not fits(query.float(), key.float(), value.float(), segments)
    assert not fits(query[..., :24], key[..., :24], value[..., :24], segments)
    assert not fits(query, key, value[..., :16], segments)
    assert not fits(*(x.to("meta") for x in (query, key, value)), segments)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)  # two heads of one sequence: most threads would idle
    assert not fits(query, key, value, segments)


@pytest.mark.parametrize("window", [None, 30])
def test_a_layer_computes_the_same_with_and_without_it(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    packing = packing_of([(40, [60, 5, 90]), (0, [33])], multiple_of=4)
    layer = CausalAttention(
        SimpleNamespace(window_size=None if window is None else (window - 1, 0)), 1, None, "self", softmax_scale=0.2
    )
    tensors = [x.unsqueeze(1) for x in drawn(len(packing.source), 4, 2, 32)]
    calls = []
    kernel = causal_attention.packed_causal_attention
    monkeypatch.setattr(causal_attention, "packed_causal_attention", lambda *args: [calls.append(1), kernel(*args)][1])
    found = layer(*tensors, None, packed_seq_params=packing)
    assert len(calls) == (window is None and not why_not())
    monkeypatch.setattr(extension, "_load", lambda: (None, "left out"))
    without = layer(*tensors, None, packed_seq_params=packing)
    real = int(packing.segments[:, 3].sum())
    assert found.shape == without.shape == (len(packing.source), 1, 4 * 32)
    assert relative_error(found[:real], without[:real].double()) < TOLERANCE
