"""Parts of a GPTModel that are ours: RMSNorm, a biased router, value heads, hooks, and sums over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (arXiv 1910.07467, eq. 4).

    megatron-core's own wrapper refuses sequence parallelism; this one marks its weight, so that
    `finalize_model_grads` sums the gradient over the tensor-parallel ranks, each of which saw its part of
    the sequence. With `layernorm_zero_centered_gamma` (Gemma) the factor is 1 + weight, added in float32: the
    weight holds the small difference, which 16 bits beside a one would lose.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
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


class BiasedRouter(TopKRouter):
    """megatron-core's router with DeepSeek-V3's bias (arXiv 2412.19437, eq. 16): it takes part in choosing the
    experts, not in weighing them.

    megatron-core keeps the bias as a buffer, which it moves after every batch by the load that it saw. Here it is
    a weight like the others, loaded, resharded and saved, but held still: the engine samples with the same one, and
    the loss says nothing about it.
    """

    def __init__(self, config: TransformerConfig, **others: Any) -> None:
        """others: process groups, and what later versions of megatron-core say of the layer."""
        super().__init__(config=config, **others)
        bias = torch.zeros(config.num_moe_experts, dtype=torch.float32)
        self.expert_bias = nn.Parameter(bias, requires_grad=False)


class ValueHead(nn.Module):
    """A linear map from hidden states to values at every position, in place of GPTModel's output layer.

    One value, or one for each of several agents. Its weight [num_values, hidden] is the same on every tensor-parallel
    rank and is computed in float32.
    """

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup, num_values: int = 1) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        # Zero: before any training the critic predicts nothing, whatever the backbone's scale.
        self.weight = nn.Parameter(torch.zeros(num_values, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """[s, b, hidden] -> ([s, b, num_values] float32, no bias), the signature of ColumnParallelLinear."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None


class ValuesBesideLogits(ValueHead):
    """A value head that sees the hidden states of a model's output layer, which stays as it is.

    One forward pass of the model then gives logits, and `take` the values to them.
    """

    def __init__(
        self, config: TransformerConfig, tp_group: dist.ProcessGroup, output_layer: nn.Module, num_values: int = 1
    ) -> None:
        super().__init__(config, tp_group, num_values)
        self._seen: torch.Tensor | None = None
        output_layer.register_forward_pre_hook(self._look)

    def _look(self, layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._seen = args[0]

    @property
    def waits(self) -> bool:
        """Whether the values of the last forward pass were not taken."""
        return self._seen is not None

    def take(self) -> torch.Tensor:
        """[b, s, num_values] float32: the values of the last forward pass, once."""
        assert self._seen is not None, "there was no forward pass, or its values were taken"
        hidden, self._seen = self._seen, None
        return self(hidden)[0].transpose(0, 1)


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


class _SumValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def sum_values(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The ranks' values, added up; backward, each rank's get the gradient of the sum, which is the same on all."""
    if dist.get_world_size(group) == 1:
        return values
    summed: torch.Tensor = _SumValues.apply(values, group)
    return summed


class HiddenHead:
    """In the place of an output layer's `forward`: gives the hidden states on, and keeps the weight for later.

    Backward, their gradient is summed over the tensor-parallel ranks, as the layer itself would.
    """

    def __init__(self, layer: Any, group: dist.ProcessGroup) -> None:
        self._layer, self._group = layer, group
        self._tied: torch.Tensor | None = None
        layer.forward = self

    @property
    def weight(self) -> torch.Tensor:
        """[padded_vocab / tp, hidden], as of the last forward pass."""
        weight: torch.Tensor = self._layer.weight if self._tied is None else self._tied
        return weight

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """[s, b, hidden] -> (the same of the whole sequence, no bias), the signature of ColumnParallelLinear."""
        self._tied = weight
        if self._layer.sequence_parallel:
            whole = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self._group)
        else:
            whole = sum_gradients(hidden, self._group)
        return whole, None


class AtPositions:
    """Hooks of rotary embeddings, that give those of the tokens' own positions instead of 0, 1, 2, ...

    Attributes:
        positions: [t] int64 of the packed row that is computed now, or of a context-parallel rank's tokens; None: a
            row is one sequence.
    """

    def __init__(self) -> None:
        self.positions: torch.Tensor | None = None

    def attach(self, rotary: torch.nn.Module) -> None:
        rotary.register_forward_pre_hook(self._whole, with_kwargs=True)
        rotary.register_forward_hook(self)

    def _whole(self, module: object, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """megatron-core would cut the embeddings over context-parallel ranks, as it cuts a row that is one sequence."""
        return None if self.positions is None else (args, {**options, "packed_seq": True})

    @contextmanager
    def at(self, positions: torch.Tensor | None) -> Iterator[None]:
        """Inside, forward passes read a row of tokens at these positions."""
        self.positions = positions
        try:
            yield
        finally:
            self.positions = None

    def __call__(self, module: object, args: object, output: Any) -> Any:
        if self.positions is None:
            return output
        if isinstance(output, tuple):  # YaRN: a factor follows
            return output[0].index_select(0, self.positions), *output[1:]
        return output.index_select(0, self.positions)


def as_one_row(module: object, args: object, output: torch.Tensor) -> torch.Tensor:
    """A forward hook of embeddings: [t, 1, hidden] with the strides of a tensor made so.

    A transposed [1, t, hidden] has others, though it is as contiguous; where its weights are frozen, `torch.matmul`
    then multiplies token by token.
    """
    return output.squeeze(1).unsqueeze(1) if output.shape[1] == 1 else output
