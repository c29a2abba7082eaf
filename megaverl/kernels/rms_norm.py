"""Root-mean-square norms in one pass over memory, forward and backward; else in PyTorch's operators."""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megaverl.kernels.extension import TYPE_NAMES, chunk_rows, kernel, library, over_rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * weight / rms(x) over the last dimension (arXiv 1910.07467, eq. 4), computed in float32 or wider.

    Args:
        x: [..., width], on a CPU. weight: [width], of the dtype of `x` or wider.
        eps: added to the mean of squares.

    Returns:
        [..., width], dtype of `x`.
    """
    fits = x.dtype in TYPE_NAMES and weight.dtype in TYPE_NAMES and library() is not None
    result: torch.Tensor = (_RMSNorm if fits else _RMSNormOfOperators).apply(x, weight, eps)
    return result


class _RMSNorm(torch.autograd.Function):
    """With n = x / rms(x) and h = dL/dy * weight: dL/dx = (h - n mean(h n)) / rms(x), and dL/dweight = sum dL/dy n.
    That sum is taken over chunks of rows, then over the chunks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        width = x.shape[-1]
        rows = x.reshape(-1, width)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        factor, inverses = weight.float().contiguous(), torch.empty(len(rows))
        y = torch.empty(x.shape, dtype=x.dtype)
        function = kernel(f"rms_norm_{TYPE_NAMES[x.dtype]}", *[c_void_p] * 4, *[c_int64] * 3, c_float)

        def run(first: int, count: int) -> None:
            place = first * width * x.element_size()
            function(
                rows.data_ptr() + first * rows.stride(0) * x.element_size(),
                factor.data_ptr(),
                y.data_ptr() + place,
                inverses.data_ptr() + first * 4,
                *(count, width, rows.stride(0), eps),
            )

        over_rows(len(rows), width, run)
        ctx.save_for_backward(rows, factor, inverses)
        ctx.weight_dtype = weight.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        rows, factor, inverses = ctx.saved_tensors
        grad = grad.contiguous()
        width = grad.shape[-1]
        x_grad = torch.empty_like(grad)
        weight_grads = torch.zeros(-(-len(rows) // chunk_rows(width)), width)
        function = kernel(f"rms_norm_grad_{TYPE_NAMES[rows.dtype]}", *[c_void_p] * 6, *[c_int64] * 3)

        def run(first: int, count: int) -> None:
            place = first * width * grad.element_size()
            function(
                rows.data_ptr() + first * rows.stride(0) * rows.element_size(),
                factor.data_ptr(),
                inverses.data_ptr() + first * 4,
                grad.data_ptr() + place,
                x_grad.data_ptr() + place,
                weight_grads[first // chunk_rows(width)].data_ptr(),
                *(count, width, rows.stride(0)),
            )

        over_rows(len(rows), width, run)
        by_weight = weight_grads.sum(0).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        return x_grad, by_weight, None


class _RMSNormOfOperators(torch.autograd.Function):
    """The same. PyTorch has no kernel for it on a CPU and takes eight operators forward and more backward: here are
    half of them, that write over what they read."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_wide(x))
        inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return _scaled(x, inverse).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        normed, wide = _scaled(x, inverse), grad.to(_wide(grad))
        product = (wide * normed).reshape(-1, x.shape[-1])
        by_weight = product.sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        mean = product.mv(weight.to(product.dtype)).div_(x.shape[-1]).view_as(inverse)
        by_x = (wide * weight).sub_(normed.mul_(mean)).mul_(inverse)
        return by_x.to(x.dtype), by_weight, None


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """A new tensor of the dtype of `factor`, float32 or wider: x * factor."""
    return x * factor if x.dtype == factor.dtype else x.to(factor.dtype).mul_(factor)
