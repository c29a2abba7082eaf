"""silu(gate) * up in one pass over memory, forward and backward; without the extension in PyTorch's operators."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megaverl.kernels.extension import in_threads, library

NAME_OF = {torch.float32: "float", torch.bfloat16: "bfloat16"}
CHUNK_ELEMENTS = 1 << 16  # of a thread at a time


def gated_silu(joined: torch.Tensor) -> torch.Tensor:
    """SwiGLU (arXiv 2002.05202, eq. 6): [..., 2 * ffn], gate before up -> [..., ffn]."""
    fits = joined.device.type == "cpu" and joined.dtype in NAME_OF and joined.is_contiguous()
    function = _GatedSilu if fits and library() is not None else _GatedSiluOfOperators
    result: torch.Tensor = function.apply(joined)
    return result


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(joined)
        result = joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)
        _call("gated_silu", joined, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        [joined] = ctx.saved_tensors
        result = torch.empty_like(joined)
        _call("gated_silu_grad", joined, grad.contiguous(), result)
        return result


def _call(name: str, *tensors: torch.Tensor) -> None:
    """A kernel over the rows of contiguous tensors, the first of which is [..., 2 * width]."""
    function = getattr(library(), f"{name}_{NAME_OF[tensors[0].dtype]}")
    function.restype = None
    width = tensors[0].shape[-1] // 2
    rows = tensors[0].numel() // max(1, 2 * width)
    step = rows if torch.get_num_threads() == 1 else max(1, CHUNK_ELEMENTS // max(1, width))

    def run(first: int) -> None:
        places = (x.data_ptr() + first * x.shape[-1] * x.element_size() for x in tensors)
        function(*map(ctypes.c_void_p, places), *map(ctypes.c_int64, (min(step, rows - first), width)))

    in_threads(functools.partial(run, first) for first in range(0, rows, max(1, step)))


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
