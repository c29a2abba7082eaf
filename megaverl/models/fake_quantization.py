"""Fake quantisation of an actor's linear layers, so that it trains the weights that its engine samples with.

With `actor.fake_quantization`, every forward pass multiplies with the weights of a
quantised engine: rounded to its format and back. The optimizer's weights are not
rounded. Gradients reach them unchanged (`weights/low_precision.py:fake_quantise`).

The layers are those that the engine quantises: linear layers of the decoder, without
embeddings, output layer and routers. A scale belongs to columns of one row, so that
splitting rows over ranks, or interleaving them, changes nothing. Columns are split in
whole groups (`config/grids.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megaverl.errors import ModelError
from megaverl.models.options import uses_transformer_engine
from megaverl.sharding.quantization import GROUP_FORMATS
from megaverl.weights.low_precision import fake_quantise

KEY = "fake_quantization"

Rounding = Callable[[torch.Tensor], torch.Tensor]


def round_megatron_layers(
    chunks: Iterable[nn.Module],
    parameters: Iterable[torch.Tensor],
    method: str,
    tp_group: dist.ProcessGroup,
    role: str,
) -> None:
    """Let megatron-core's linear layers multiply with rounded weights.

    Args:
        chunks: the rank's model chunks.
        parameters: weights of the layers to round. Each belongs to one layer of the local spec.
        method: name in `GROUP_FORMATS`.
        tp_group: ranks that hold parts of a matrix. NVFP4's scale of a whole matrix is common to them, so that every
            forward pass reduces a number over them.
        role: for messages.

    Raises:
        ModelError: Transformer Engine's layers are used, which take no other weight than their own.
    """
    if uses_transformer_engine():
        raise ModelError(
            f"{role}.{KEY}={method}: Transformer Engine's linear layers multiply with their own weights only. Use "
            f"{role}.engine=fsdp, or an environment without Transformer Engine."
        )
    rounding = rounding_of(method, tp_group)
    wanted = {id(parameter) for parameter in parameters}
    for chunk in chunks:
        for module in chunk.modules():
            if id(getattr(module, "weight", None)) in wanted:
                _multiply_rounded(module, rounding)


def _multiply_rounded(module: Any, rounding: Rounding) -> None:
    # Both of megatron-core's parallel layers call this method with the weight
    # (`tensor_parallel/layers.py`, 0.16 to 0.19).
    multiply = module._forward_impl

    def multiply_rounded(
        input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        return multiply(input, rounding(weight), *args, **options)

    module._forward_impl = multiply_rounded


def round_hf_layers(model: nn.Module, method: str) -> None:
    """Let the linear layers of a transformers model multiply with rounded weights, before FSDP2 shards it.

    FSDP2 gathers a layer's weight, in the dtype of the computation, before it runs.
    """
    rounding = rounding_of(method, None)
    output_layer = model.get_output_embeddings()  # type: ignore[operator]
    for name, module in model.named_modules():
        stays = module is output_layer or name.endswith(".gate")
        if isinstance(module, nn.Linear) and not stays:
            _run_rounded(module, rounding)


def _run_rounded(module: nn.Linear, rounding: Rounding) -> None:
    def forward(input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, rounding(module.weight), module.bias)

    module.forward = forward  # type: ignore[method-assign]


def rounding_of(method: str, tp_group: dist.ProcessGroup | None) -> Rounding:
    """Return the function that rounds a weight [rows, columns] to a format of `GROUP_FORMATS` and back.

    Its gradient is the identity. With nvfp4 it is collective over `tp_group`.
    """
    form = GROUP_FORMATS[method]

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        largest = None
        if form.kind == "nvfp4":
            largest = weight.detach().abs().amax().float()
            if tp_group is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX, tp_group)
        return fake_quantise(weight, form, scale_dtype=weight.dtype, largest=largest)

    return rounded


def quantised_locals(
    names: Collection[str], by_tensor: dict[str, list[Any]]
) -> set[str]:
    """Return the local tensors that hold any of these global tensors, by a layout's `by_tensor`."""
    return {piece.local for name in names for piece in by_tensor.get(name, ())}
