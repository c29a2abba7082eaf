"""Norms of rows, and their gradients, with the kernel and without."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megaverl.kernels import extension
from megaverl.kernels.rms_norm import rms_norm

EPS = 1e-3


def example(dtype: torch.dtype, width: int = 37) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows that are not neighbours in memory, small and large ones, a weight, and a gradient."""
    torch.manual_seed(5)
    x = torch.randn(9, 2, 2 * width)[..., :width] * 0.1
    x[0] *= 1e4
    x[1, 0] = 0
    return (
        x.to(dtype).requires_grad_(),
        torch.randn(width).to(dtype).requires_grad_(),
        torch.randn(9, 2, width).to(dtype),
    )


def by_pytorch(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Values and gradients in float64."""
    exact_x, exact_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    y = F.rms_norm(exact_x, weight.shape, exact_weight, EPS)
    return y.detach(), *torch.autograd.grad(y, (exact_x, exact_weight), grad.double())


@pytest.mark.parametrize("with_kernel", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_pytorchs(
    dtype: torch.dtype, threads: int, with_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_kernel:
        monkeypatch.setattr(extension, "_load", lambda: (None, "left out"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(extension, "CHUNK_ELEMENTS", 150)  # four rows
    x, weight, grad = example(dtype)
    expected = by_pytorch(x, weight, grad)
    y = rms_norm(x, weight, EPS)
    for mine, exact in zip((y, *torch.autograd.grad(y, (x, weight), grad)), expected, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - exact).norm() < 1.5 * torch.finfo(dtype).eps * exact.norm()


def test_a_weight_may_be_wider_than_what_it_multiplies() -> None:
    x, weight, grad = example(torch.bfloat16)
    factor = (1 + weight.detach().float() / 1000).requires_grad_()  # 16 bits would lose it
    y, _, by_factor = by_pytorch(x, factor, grad)
    found = rms_norm(x, factor, EPS)
    assert found.dtype == torch.bfloat16
    assert (found.double() - y).norm() < 0.005 * y.norm()
    [found_grad] = torch.autograd.grad(found, factor, grad)
    assert found_grad.dtype == torch.float32
    torch.testing.assert_close(found_grad.double(), by_factor, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(bool(extension.why_not()), reason=extension.why_not())
def test_the_kernel_takes_what_it_can() -> None:
    for dtype, node in ((torch.bfloat16, "_RMSNormBackward"), (torch.float64, "_RMSNormOfOperatorsBackward")):
        x, weight, _ = example(dtype)
        assert type(rms_norm(x, weight, EPS).grad_fn).__name__ == node
    x, weight, _ = example(torch.float32)
    assert rms_norm(x[:0], weight, EPS).shape == (0, 2, 37)


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "CHUNK_ELEMENTS", 150)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        x, weight, grad = example(torch.float32)
        y = rms_norm(x, weight, EPS)
        found.append([y, *torch.autograd.grad(y, (x, weight), grad)])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_no_number_spoils_its_own_row_alone(dtype: torch.dtype) -> None:
    x, weight, _ = example(dtype)
    with torch.no_grad():
        x[3, 1, 4] = torch.nan
    rows = rms_norm(x, weight, EPS).isnan().all(dim=-1).nonzero().tolist()
    assert rows == [[3, 1]]
    assert not rms_norm(x, weight, EPS)[[0, 1, 2, 4]].isnan().any()
