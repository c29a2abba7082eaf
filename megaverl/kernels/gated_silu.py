"""silu(gate) * up in one pass over memory, forward and backward; without the extension in PyTorch's operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megaverl.kernels.extension import CHUNK_ELEMENTS, TYPE_NAMES, kernel, library, over_rows


def gated_silu(joined: torch.Tensor) -> torch.Tensor:
    """SwiGLU (arXiv 2002.05202, eq. 6): [..., 2 * ffn], gate before up -> [..., ffn]."""
    fits = joined.device.type == "cpu" and joined.dtype in TYPE_NAMES and joined.is_contiguous()
    if not fits or library() is None:
        result: torch.Tensor = _GatedSiluOfOperators.apply(joined)
    elif joined.requires_grad and torch.is_grad_enabled():
        result = _GatedSilu.apply(joined)
    else:
        result = _gated(joined)
    return result


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(joined)
        return _gated(joined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        [joined] = ctx.saved_tensors
        result = torch.empty_like(joined)
        _call("gated_silu_grad", joined, grad.contiguous(), result)
        return result


def _gated(joined: torch.Tensor) -> torch.Tensor:
    width = joined.shape[-1] // 2
    result = torch.empty(*joined.shape[:-1], width, dtype=joined.dtype)
    if result.numel() <= CHUNK_ELEMENTS:  # as in decoding, where what is around the kernel takes longer than it
        _kernel("gated_silu", joined.dtype)(
            joined.data_ptr(), result.data_ptr(), result.numel() // max(1, width), width
        )
    else:
        _call("gated_silu", joined, result)
    return result


@functools.cache
def _kernel(name: str, dtype: torch.dtype) -> Callable[..., None]:
    num_tensors = {"gated_silu": 2, "gated_silu_grad": 3}[name]
    return kernel(f"{name}_{TYPE_NAMES[dtype]}", *[c_void_p] * num_tensors, c_int64, c_int64)


def _call(name: str, *tensors: torch.Tensor) -> None:
    """A kernel over the rows of contiguous tensors, the first of which is [..., 2 * width]."""
    function = _kernel(name, tensors[0].dtype)
    width = tensors[0].shape[-1] // 2
    row_bytes = [x.shape[-1] * x.element_size() for x in tensors]

    def run(first: int, rows: int) -> None:
        places = (x.data_ptr() + first * size for x, size in zip(tensors, row_bytes, strict=True))
        function(*places, rows, width)

    over_rows(tensors[0].numel() // max(1, 2 * width), width, run)


class _GatedSiluOfOperators(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: torch.Tensor) -> torch.Tensor:
        gate, up = joined.chunk(2, dim=-1)
        active = F.silu(gate)
        if not ctx.needs_input_grad[0]:
            return active.mul_(up)
        ctx.save_for_backward(joined, active)
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Writes both halves of the gradient in their places."""
        joined, active = ctx.saved_tensors
        gate, up = joined.chunk(2, dim=-1)
        result = torch.empty_like(joined, memory_format=torch.contiguous_format)
        by_gate, by_up = result.chunk(2, dim=-1)
        torch.mul(grad, active, out=by_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=by_gate)
        return result
