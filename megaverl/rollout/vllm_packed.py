"""Weights of vLLM in compressed-tensors formats with groups (INT4, MXFP8, NVFP4), written in place by a reshard.

vLLM creates such a layer with the tensors of a compressed-tensors folder, and its kernel
rearranges them after loading: vLLM's CPU kernel interleaves 16 rows, Marlin has tiles.
A reshard therefore writes a matrix by the way of a load:

1. `loading_parameters_kept` records the parameters of each layer before the kernel's `process_weights_after_loading`.
2. `_Layer.load` gives the layer parameters like these with new contents, and lets the kernel process them.
3. The result is copied to the tensors that the kernel held before, whose addresses captured graphs read.

So no order of a kernel is described here. A kernel must keep all that depends on weights
in parameters of the layer, as those of `KERNELS` do (read in vLLM 0.32,
`model_executor/kernels/linear/`). Others are refused by name. The extra memory is one
layer's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megaverl.errors import RolloutError
from megaverl.sharding.quantization import GROUP_FORMATS, GroupFormat, compressed_config
from megaverl.sharding.vllm import PackedWeight

KEY = "rollout.vllm.quantization"
# Attribute of a layer with its `_Layer`.
LAYER = "megaverl_packed"
# Kinds of a format -> kernels that have been read to keep all that they derive from
# weights in a layer's parameters. Only those of a CPU have been run.
KERNELS = {
    "int4": (
        "CPUInt4Kernel",  # vLLM's CPUWNA16LinearKernel, by `platform/vllm_cpu.py`
        "ReferenceInt4Kernel",  # `platform/vllm_cpu.py`
        "MarlinLinearKernel",
        "MacheteLinearKernel",
    ),
    "mxfp8": (
        "EmulationMxfp8LinearKernel",
        "FlashInferCutlassMxfp8LinearKernel",
    ),
    "nvfp4": (
        "ReferenceNvfp4Kernel",  # `platform/vllm_cpu.py`
        "MarlinNvFp4LinearKernel",
    ),
}
# Kernels that also permute a layer's bias. A reshard writes biases in their own order, and
# every load would permute them again.
PERMUTES_BIAS = ("MarlinLinearKernel", "MarlinNvFp4LinearKernel")
# Parameters of an attention layer that compressed-tensors folders may have for its cache,
# and that vLLM removes after loading -> their values where a folder has none. Then vLLM
# takes scales of 1.
OF_CACHE = {
    **dict.fromkeys(("q_scale", "k_scale", "v_scale", "prob_scale"), -1.0),
    **dict.fromkeys(("q_zero_point", "k_zero_point", "v_zero_point"), 0.0),
}


def packed_arguments(method: str, *, load_weights: bool) -> dict[str, Any]:
    """Return the EngineArgs of an engine with weights in a format of `GROUP_FORMATS`.

    The format is set as if the model's config.json named it.

    Raises:
        RolloutError: the engine is to read the folder's weights, which are not in this format.
    """
    if load_weights:
        raise RolloutError(
            f"{KEY}={method}: only weights that come from an actor are quantised in groups, and this engine reads its "
            "weights from the model's folder. Leave the key out, or use fp8_per_block, which vLLM also makes of a "
            "folder."
        )
    return {
        "quantization": None,
        "hf_overrides": {"quantization_config": compressed_config(method)},
    }


@contextmanager
def loading_parameters_kept() -> Iterator[None]:
    """Record the parameters of packed layers of an engine made inside, before kernels rearrange them."""
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading

    def record_and_process(model: nn.Module, *args: Any, **options: Any) -> None:
        for module in model.modules():
            if is_packed(module):
                setattr(module, LAYER, _Layer.of(module))
            # Without weight files, vLLM fills the scales of an attention's cache with
            # noise.
            for name, parameter in module.named_parameters(recurse=False):
                if name in OF_CACHE:
                    parameter.data.fill_(OF_CACHE[name])
        process(model, *args, **options)

    base_loader.process_weights_after_loading = record_and_process
    try:
        yield
    finally:
        base_loader.process_weights_after_loading = process


def is_packed(module: nn.Module) -> bool:
    """Return whether a layer of vLLM has weights of a compressed-tensors scheme."""
    return hasattr(module, "scheme") and hasattr(module, "quant_method")


def packed_weights(model: nn.Module) -> dict[str, PackedWeight]:
    """Return vLLM's packed matrices by the names that they have in floating point. Most models have none.

    Raises:
        RolloutError: a kernel is not known to keep what it derives from weights in parameters, or the columns of a rank
            are not whole groups.
    """
    weights = {}
    for name, module in model.named_modules():
        layer: _Layer | None = getattr(module, LAYER, None)
        if layer is not None:
            weights[f"{name}.weight"] = layer.weight(f"{name}.weight")
    return weights


class _Recorded(NamedTuple):
    """A parameter as it is loaded: its class and attributes, which kernels read."""

    kind: type
    attributes: dict[str, Any]
    shape: torch.Size
    dtype: torch.dtype


class _Layer:
    """One packed layer of vLLM, whose matrix can be loaded again.

    Args:
        module: vLLM's linear layer.
        recorded: its parameters before its kernel processed them, without its bias.
    """

    def __init__(self, module: Any, recorded: Mapping[str, _Recorded]) -> None:
        self._module, self._recorded = module, recorded

    @classmethod
    def of(cls, module: nn.Module) -> _Layer:
        """Record a layer that has not been processed yet."""
        recorded = {
            name: _Recorded(
                type(parameter), dict(vars(parameter)), parameter.shape, parameter.dtype
            )
            for name, parameter in module.named_parameters(recurse=False)
            if name != "bias"
        }
        return cls(module, recorded)

    def weight(self, name: str) -> PackedWeight:
        """Return the place of the layer's matrix, called `name` in messages."""
        module, form_name = self._module, self._format()
        form = GROUP_FORMATS[form_name]
        kernel = type(module.scheme.kernel).__name__
        if kernel not in KERNELS[form.kind]:
            raise RolloutError(
                f"{KEY}={form_name}: {name} cannot be written to by a reshard: vLLM's kernel {kernel} is none of those "
                f"known to keep all that they derive from a weight in parameters ({', '.join(KERNELS[form.kind])}). "
                f"Set rollout.vllm.linear_backend, choose another {KEY}, or leave it out."
            )
        if kernel in PERMUTES_BIAS and module.bias is not None:
            raise RolloutError(
                f"{KEY}={form_name}: {name} has a bias, which vLLM's kernel {kernel} keeps in another order than a "
                f"reshard writes. Set rollout.vllm.linear_backend, or leave {KEY} out."
            )
        rows, columns = (
            module.output_size_per_partition,
            module.input_size_per_partition,
        )
        if columns % form.group:
            raise RolloutError(
                f"{KEY}={form_name}: {name} has {columns} columns on a rank, which are not whole groups of "
                f"{form.group}. Use a smaller group or another rollout.tp."
            )
        scale = self._recorded["weight_scale"]
        return PackedWeight(
            (rows, columns), form_name, scale.dtype, self.load, _over_engine_ranks()
        )

    def _format(self) -> str:
        scheme = self._module.scheme
        if "weight_global_scale" in self._recorded:
            return "nvfp4"
        if "weight_packed" not in self._recorded:
            return "mxfp8"
        form = GroupFormat("int4", scheme.group_size, scheme.symmetric)
        return next(name for name, known in GROUP_FORMATS.items() if known == form)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a matrix, given as the tensors of a compressed-tensors folder, to the kernel's tensors in place."""
        module = self._module
        parameters = module._parameters
        held = {
            name: parameter
            for name, parameter in parameters.items()
            if name != "bias" and parameter is not None
        }
        for name in held:
            del parameters[name]
        for name, recorded in self._recorded.items():
            # A fused layer has a global scale for each of its parts.
            data = tensors[name].expand(recorded.shape).contiguous()
            made = nn.Parameter(data.to(recorded.dtype), requires_grad=False)
            made.__class__, made.__dict__ = recorded.kind, dict(recorded.attributes)
            module.register_parameter(name, made)
        module.quant_method.process_weights_after_loading(module)
        for name, parameter in held.items():
            parameter.data.copy_(parameters[name].data)
        for name in [name for name in parameters if name != "bias"]:
            del parameters[name]
        parameters.update(held)


def _over_engine_ranks() -> Callable[[torch.Tensor], torch.Tensor] | None:
    from vllm.distributed import get_tp_group

    tp = get_tp_group()
    return None if tp.world_size == 1 else functools.partial(_largest, tp.device_group)


def _largest(group: dist.ProcessGroup, value: torch.Tensor) -> torch.Tensor:
    """Return the largest of the ranks' values. Collective over the group."""
    dist.all_reduce(value, dist.ReduceOp.MAX, group)
    return value
