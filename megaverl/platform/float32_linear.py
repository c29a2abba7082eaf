"""Output layer of a 16-bit model in float32: the products of `model.fp32_lm_head`, in engines and trainers.

Products of 16-bit matrices are rounded to 16 bits: a logit of 20 then has an error of up to 0.06 in bfloat16. Engine
and trainer round to different sides if their hidden states differ in a bit. MiniMax-M1 (arXiv 2506.13585) and ScaleRL
(arXiv 2510.13786) therefore compute the output layer in float32 on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from megaverl.platform import batch_invariant

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Bytes of the weight that exist in float32 at a time.
BLOCK_BYTES = 16 * 2**20


def float32_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x weight^T + bias in float32, with gradients from float32 products.

    The weight is converted block by block, in the forward and in the backward pass, and no copy of it is kept.

    Args:
        x: [..., k].
        weight: [n, k].
        bias: [n].

    Returns:
        [..., n] float32. Gradients have the dtypes of `x`, `weight` and `bias`.
    """
    product: torch.Tensor = _Float32Linear.apply(x, weight)  # type: ignore[no-untyped-call]  # torch leaves `apply` untyped
    return product if bias is None else product + bias.float()


class _Float32Linear(torch.autograd.Function):
    """Autograd function of x weight^T."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        if batch_invariant.is_batch_invariant() and x.device.type == "cpu":
            return batch_invariant.linear(x.float(), weight)
        rows = x.flatten(0, -2).float()
        product = rows.new_empty(len(rows), len(weight))
        for part, block in _blocks(weight):
            product[:, part] = F.linear(rows, block)
        return product.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad
        rows, by_product = x.flatten(0, -2).float(), grad.flatten(0, -2)
        by_rows = torch.zeros_like(rows) if for_x else None
        by_weight = torch.empty_like(weight) if for_weight else None
        for part, block in _blocks(weight):
            if by_rows is not None:
                by_rows.addmm_(by_product[:, part], block)
            if by_weight is not None:
                by_weight[part] = by_product[:, part].t() @ rows
        by_x = None if by_rows is None else by_rows.to(x.dtype).view_as(x)
        return by_x, by_weight


def _blocks(weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (rows of the weight, these rows in float32)."""
    step = max(1, BLOCK_BYTES // (4 * weight.shape[1]))
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        yield part, weight[part].float()


def compute_in_float32(
    model: PreTrainedModel, error: Callable[[str], Exception]
) -> None:
    """Let a model of transformers compute its logits in float32, in place. Weights and hooks of its layers stay.

    Args:
        error: creates the exception for a model whose output layer is no linear layer.
    """
    layer: nn.Module = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise error(
            f"model.fp32_lm_head: the output layer of transformers' {type(model).__name__} is no linear layer. Leave "
            "the key out."
        )

    def forward(input: torch.Tensor) -> torch.Tensor:
        # The weight is read in every pass, because FSDP replaces the parameter.
        return float32_linear(input, layer.weight, layer.bias)

    layer.forward = forward  # type: ignore[method-assign]  # of this layer alone
