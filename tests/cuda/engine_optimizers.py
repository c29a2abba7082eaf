"""Transformer Engine's `pytorch.optimizers` in plain PyTorch, as megatron-core uses it: fused in name alone.

Names, arguments and the optimizer's state are those of Transformer Engine 2.20
(pytorch/optimizers/fused_adam.py, multi_tensor_apply.py, transformer_engine_torch's
multi_tensor functions).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Lists = Sequence[Sequence[torch.Tensor]]


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        assert adam_w_mode
        super().__init__(
            params,
            dict(
                lr=lr,
                bias_correction=bias_correction,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
            ),
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            correction1, correction2 = (
                1 - beta1 ** group["step"],
                1 - beta2 ** group["step"],
            )
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad.float()
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(parameter, dtype=torch.float32)
                first, second = state["exp_avg"], state["exp_avg_sq"]
                first.mul_(beta1).add_(gradient, alpha=1 - beta1)
                second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(
                    first / correction1,
                    (second / correction2).sqrt() + group["eps"],
                    value=-group["lr"],
                )


class FusedSGD(torch.optim.SGD):
    pass


def multi_tensor_applier(
    op: Callable[..., Any],
    noop_flag_buffer: torch.Tensor,
    tensor_lists: Lists,
    *args: Any,
) -> Any:
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    per_tensor: bool,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().unsqueeze(0), norms if per_tensor else None


def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float
) -> None:
    for source, into in zip(*tensor_lists, strict=True):
        into.copy_(source * scale)


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: torch.Tensor
) -> None:
    """With the factor on the device: what megatron-core 0.19 clips by."""
    for source, into in zip(*tensor_lists, strict=True):
        into.copy_(source * scale)
