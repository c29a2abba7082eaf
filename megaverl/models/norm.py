"""RMSNorm for megatron-core's local layer spec."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (arXiv 1910.07467, eq. 4).

    megatron-core's own wrapper refuses sequence parallelism; this one marks its weight, so that
    `finalize_model_grads` sums the gradient over the tensor-parallel ranks, each of which saw its part of
    the sequence. With `layernorm_zero_centered_gamma` (Gemma) the factor is 1 + weight, added in float32: the
    weight holds the small difference, which 16 bits beside a one would lose.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.hidden_size = (hidden_size,)
        self.zero_centred = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centred else torch.ones
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> the same shape and dtype."""
        factor = 1.0 + self.weight.float() if self.zero_centred else self.weight
        if hidden.device.type == "cpu":
            return rms_norm(hidden, factor, self.eps)
        if self.zero_centred:
            return F.rms_norm(hidden.float(), self.hidden_size, factor, self.eps).to(hidden.dtype)
        return F.rms_norm(hidden, self.hidden_size, factor, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * weight / rms(x) over the last dimension (arXiv 1910.07467, eq. 4) on a CPU, computed in float32 or wider.

    Args:
        x: [..., width]. weight: [width], of the dtype of `x` or wider.
        eps: added to the mean of squares.

    Returns:
        [..., width], dtype of `x`.
    """
    result: torch.Tensor = _RMSNorm.apply(x, weight, eps)
    return result


class _RMSNorm(torch.autograd.Function):
    """With n = x / rms(x) and h = dL/dy * weight: dL/dx = (h - n mean(h n)) / rms(x), and dL/dweight = sum dL/dy n.

    PyTorch has no kernel for it on a CPU and takes eight operators forward and more backward: here are half of them,
    that write over what they read.
    """

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
