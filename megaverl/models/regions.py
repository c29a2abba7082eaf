"""Where tensor-parallel ranks go apart in a forward pass, and their gradients come together again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous()
        if dist.get_world_size(ctx.group) > 1:
            dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_gradients(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The same values, which are equal on all ranks; backward, the ranks' gradients are added up.

    megatron-core's `copy_to_tensor_model_parallel_region` (0.16) leaves a gradient that is not contiguous, as that of
    a transposed tensor is, as it came.
    """
    summed: torch.Tensor = _SumGradients.apply(values, group)
    return summed
