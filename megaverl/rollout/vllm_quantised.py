"""A quantised vLLM engine whose weights come from an actor: how it is asked for, and where its numbers and scales lie.

What a kernel holds after loading is what a reshard writes to, in place: captured graphs keep its addresses. So only
kernels count that keep rows and columns as they are (read in vLLM 0.32, `process_weights_after_loading` of each):

- blocks (`kernels/linear/scaled_mm/`): `weight` [rows, columns] and float32 `weight_scale_inv`, one for 128 of each.
  CUTLASS, Triton and, on Hopper, DeepGEMM and FlashInfer's mix with it leave both; DeepGEMM's scales are powers of two
  by default (VLLM_USE_DEEP_GEMM_E8M0). On Blackwell DeepGEMM packs four scales into an int32: refused.
- one scale a matrix: `weight` [columns, rows], a transposed view, and `weight_scale` [1]. CUTLASS pads sizes that 16
  does not divide: refused.
- Marlin (before FP8 units), Humming, b12x and AMX kernels reorder the weights: refused.
- experts (`layers/fused_moe/oracle/fp8.py`): Triton and, on Hopper, DeepGEMM leave w13 as [gate; up]. FlashInfer's,
  which vLLM prefers for one scale a matrix and under expert parallelism, puts up before gate, and HPC folds scales into
  others that it computes once: refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from megaverl.errors import RolloutError
from megaverl.sharding.vllm import QUANTIZATIONS, QuantisedWeight, scale_shape

KEY = "rollout.vllm.quantization"
ROUTERS = r"re:.*\.gate$"
LINEAR_KERNELS = {
    True: (  # of blocks
        "DeepGemmFp8BlockScaledMMKernel",
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
        "CutlassFp8BlockScaledMMKernel",
        "TritonFp8BlockScaledMMKernel",
        "ReferenceBlockKernel",  # `platform/vllm_cpu.py`
    ),
    False: (
        "FlashInferFP8ScaledMMLinearKernel",
        "CutlassFP8ScaledMMLinearKernel",
        "PerTensorTorchFP8ScaledMMLinearKernel",
        "ChannelWiseTorchFP8ScaledMMLinearKernel",
    ),
}
EXPERT_BACKENDS = {True: ("TRITON", "BATCHED_TRITON", "DEEPGEMM", "BATCHED_DEEPGEMM"), False: ("TRITON",)}


def quantised_arguments(method: str) -> dict[str, Any]:
    """EngineArgs of an engine with this `rollout.vllm.quantization`.

    Raises:
        RolloutError: a quantisation whose weights no reshard can write.
    """
    if method not in QUANTIZATIONS:
        raise RolloutError(f"{KEY}={method}: weights that come from an actor can be {', '.join(QUANTIZATIONS)}.")
    return {
        # vLLM's own word for `fp8` where the folder is not quantised
        "quantization": "fp8_per_tensor" if method == "fp8" else method,
        # choosing experts in 8 bits would send tokens to others than in training
        "quantization_config": {"ignore": [ROUTERS]},
    }


def quantised_weights(model: nn.Module) -> dict[str, QuantisedWeight]:
    """The tensors of 8-bit numbers in vLLM's model, by name, as the layouts know them. None in most models.

    Raises:
        RolloutError: a kernel that holds them in another order, with its name and the way round it.
    """
    modules = dict(model.named_modules())
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float8_e4m3fn:
            owner, _, attribute = name.rpartition(".")
            found[name] = _weight(name, modules[owner], attribute)
    return found


def in_floating_point(weights: dict[str, QuantisedWeight], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """For every quantised tensor one of its shape, of the dtype in which it travels, that takes no memory."""
    return {name: torch.empty_like(w.numbers, dtype=dtype, device="meta") for name, w in weights.items()}


def is_scale(name: str) -> bool:
    """Whether a parameter of vLLM holds scales: made from weights, and not loaded by itself."""
    return name.endswith(("weight_scale", "weight_scale_inv"))


def _weight(name: str, module: Any, attribute: str) -> QuantisedWeight:
    numbers = getattr(module, attribute).detach()
    by_block = hasattr(module, f"{attribute}_scale_inv")
    scales = getattr(module, f"{attribute}_scale_inv" if by_block else f"{attribute}_scale").detach()
    method = module.quant_method
    if attribute == "weight":
        kernel, known = type(method.fp8_linear).__name__, LINEAR_KERNELS[by_block]
        way_round = "rollout.vllm.linear_backend=cutlass"
        # FlashInfer's kernel is a mix with DeepGEMM's, which says for both how scales are rounded
        says = getattr(method.fp8_linear, "fallback", method.fp8_linear)
        powers_of_two = bool(getattr(says, "use_deep_gemm_e8m0", False))
        numbers = numbers if by_block else numbers.t()
    else:
        kernel, known = method.fp8_backend.value, EXPERT_BACKENDS[by_block]
        way_round = "rollout.vllm.moe_backend=triton"
        powers_of_two = "DEEPGEMM" in kernel and _deep_gemm_rounds_scales()
    weight = QuantisedWeight(numbers, scales, QUANTIZATIONS["fp8_per_block"] if by_block else None, powers_of_two)
    problems = [*_problems(weight, kernel, known)]
    if problems:
        raise RolloutError(
            f"{KEY}: {name} cannot be written to by a reshard: {'; '.join(problems)}. Set {way_round}, choose another "
            f"{KEY}, or leave it out."
        )
    return weight


def _problems(weight: QuantisedWeight, kernel: str, known: tuple[str, ...]) -> Iterator[str]:
    if kernel not in known:
        yield f"vLLM's kernel {kernel} is none of those known to keep weights in their order ({', '.join(known)})"
    rows, columns = weight.numbers.shape[-2:]
    experts = weight.numbers.shape[:-2]
    one = scale_shape(rows, columns, weight.block)
    # experts have one number each without blocks
    wanted = (*experts, *(() if experts and weight.block is None else one))
    if tuple(weight.scales.shape) != wanted or weight.scales.dtype != torch.float32:
        yield (
            f"{kernel} keeps its scales as {weight.scales.dtype} {list(weight.scales.shape)}, not float32 "
            f"{list(wanted)}"
        )


def _deep_gemm_rounds_scales() -> bool:
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    return bool(is_deep_gemm_e8m0_used())
