"""silu(gate) * up, with a backward pass that writes both halves of the gradient in their places."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


class _GatedSilu(torch.autograd.Function):
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
        joined, active = ctx.saved_tensors
        gate, up = joined.chunk(2, dim=-1)
        result = torch.empty_like(joined, memory_format=torch.contiguous_format)
        by_gate, by_up = result.chunk(2, dim=-1)
        torch.mul(grad, active, out=by_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=by_gate)
        return result


def gated_silu(joined: torch.Tensor) -> torch.Tensor:
    """SwiGLU (arXiv 2002.05202, eq. 6): [..., 2 * ffn], gate before up -> [..., ffn]."""
    result: torch.Tensor = _GatedSilu.apply(joined)
    return result
