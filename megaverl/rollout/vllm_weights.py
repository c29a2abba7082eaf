"""vLLM's parameters in a process that writes them.

The module finds the parameters that a reshard writes, reports them as soon as a model
is loaded, checks that vLLM does not rearrange them after loading, and keeps vLLM's
sleep from copying those that will be overwritten. For a quantised engine it also builds
the EngineArgs and finds numbers and scales.

A reshard writes to the tensors that a kernel holds after loading, in place, since
captured graphs keep their addresses. So quantised weights are supported only with
kernels that keep rows and columns in order (read in vLLM 0.32,
`process_weights_after_loading` of each):

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

import functools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from megaverl.errors import RolloutError
from megaverl.rollout.vllm_packed import (
    OF_CACHE,
    is_packed,
    packed_arguments,
    packed_weights,
)
from megaverl.sharding.quantization import FORMATS, GROUP_FORMATS, BlockFormat
from megaverl.sharding.vllm import EngineWeight, QuantisedWeight

KEY = "rollout.vllm.quantization"
FP8_BLOCK = 128
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
EXPERT_BACKENDS = {
    True: ("TRITON", "BATCHED_TRITON", "DEEPGEMM", "BATCHED_DEEPGEMM"),
    False: ("TRITON",),
}


def quantised_arguments(method: str, *, load_weights: bool) -> dict[str, Any]:
    """Return the EngineArgs of an engine with this `rollout.vllm.quantization`.

    Args:
        load_weights: whether the engine reads its weights from the model's folder.

    Raises:
        RolloutError: a reshard cannot write weights of this quantisation, or a folder's cannot be read in it.
    """
    if method not in FORMATS:
        raise RolloutError(
            f"{KEY}={method}: weights that come from an actor can be {', '.join(FORMATS)}."
        )
    if method in GROUP_FORMATS:
        return packed_arguments(method, load_weights=load_weights)
    return {
        # vLLM's name of `fp8` for a folder that is not quantised.
        "quantization": "fp8_per_tensor" if method == "fp8" else method,
        # Routers in 8 bits would send tokens to other experts than in training.
        "quantization_config": {"ignore": [ROUTERS]},
    }


def quantised_weights(model: nn.Module) -> dict[str, EngineWeight]:
    """Return vLLM's quantised matrices by name, with their scales. Most models have none.

    Raises:
        RolloutError: a kernel holds them in another order; names the kernel and a setting that avoids it.
    """
    modules = dict(model.named_modules())
    weights_by_name: dict[str, EngineWeight] = {**packed_weights(model)}
    for name, parameter in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        if parameter.dtype == torch.float8_e4m3fn and not is_packed(modules[owner]):
            weights_by_name[name] = _weight(name, modules[owner], attribute)
    return weights_by_name


def in_floating_point(
    weights: Mapping[str, EngineWeight], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return, for every quantised tensor, a meta tensor of its shape in the dtype in which it is sent."""
    return {
        name: torch.empty(weight.shape, dtype=dtype, device="meta")
        for name, weight in weights.items()
    }


def _weight(name: str, module: Any, attribute: str) -> QuantisedWeight:
    numbers = getattr(module, attribute).detach()
    # Scales by block have the suffix `_inv`.
    by_block = hasattr(module, f"{attribute}_scale_inv")
    scales = getattr(
        module, f"{attribute}_scale_inv" if by_block else f"{attribute}_scale"
    ).detach()
    method = module.quant_method
    if attribute == "weight":
        kernel, known = type(method.fp8_linear).__name__, LINEAR_KERNELS[by_block]
        way_round = "rollout.vllm.linear_backend=cutlass"
        # FlashInfer's kernel falls back to DeepGEMM's, whose setting decides for both
        # how scales are rounded.
        deciding_kernel = getattr(method.fp8_linear, "fallback", method.fp8_linear)
        powers_of_two = bool(getattr(deciding_kernel, "use_deep_gemm_e8m0", False))
        # [rows, columns] in both cases: kernels with one scale per matrix hold the
        # transposed view.
        numbers = numbers if by_block else numbers.t()
    else:
        kernel, known = method.fp8_backend.value, EXPERT_BACKENDS[by_block]
        way_round = "rollout.vllm.moe_backend=triton"
        powers_of_two = "DEEPGEMM" in kernel and _deep_gemm_rounds_scales()
    weight = QuantisedWeight(
        numbers,
        scales,
        FP8_BLOCK if by_block else None,
        powers_of_two,
    )
    problems = [*_problems(weight, kernel, known)]
    if problems:
        raise RolloutError(
            f"{KEY}: {name} cannot be written to by a reshard: {'; '.join(problems)}. Set {way_round}, choose another "
            f"{KEY}, or leave it out."
        )
    return weight


def _problems(
    weight: QuantisedWeight, kernel: str, known: tuple[str, ...]
) -> Iterator[str]:
    if kernel not in known:
        yield f"vLLM's kernel {kernel} is none of those known to keep weights in their order ({', '.join(known)})"
    rows, columns = weight.numbers.shape[-2:]
    experts = weight.numbers.shape[:-2]
    expert_shape = BlockFormat(weight.block).scale_shape(rows, columns)
    # Without blocks, each expert has a single scale.
    wanted = (*experts, *(() if experts and weight.block is None else expert_shape))
    if tuple(weight.scales.shape) != wanted or weight.scales.dtype != torch.float32:
        yield (
            f"{kernel} keeps its scales as {weight.scales.dtype} {list(weight.scales.shape)}, not float32 "
            f"{list(wanted)}"
        )


def _deep_gemm_rounds_scales() -> bool:
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    return bool(is_deep_gemm_e8m0_used())


# vLLM's tags of its allocations (0.24 to 0.33: v1/worker/gpu_worker.py).
WEIGHTS, CACHE = "weights", "kv_cache"
WRITTEN_ANEW = "megaverl: written anew"
SAMPLES = 1024  # elements of a parameter that are compared


@contextmanager
def model_loaded(then: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Call `then` with an engine's model as soon as it has its weights, before it is profiled or captured.

    The call happens inside vLLM's memory pool for weights, which returns freed memory
    to the device when it is left. So a parameter that moves to other storage leaves no
    memory behind. Until then, its own weights exist beside the others.
    """
    from vllm.v1.worker.gpu_worker import Worker

    load_model = Worker.load_model

    def load_and_tell(self: Any, **options: Any) -> None:
        runner = self.model_runner
        # The model is loaded inside vLLM's memory pool.
        load_inside = runner.load_model  # called in the pool

        def load_and_tell_inside(*args: Any, **options: Any) -> None:
            load_inside(*args, **options)
            then(runner.get_model())

        runner.load_model = load_and_tell_inside
        try:
            load_model(self, **options)
        finally:
            # The instance's attribute hides the method.
            del runner.load_model

    Worker.load_model = load_and_tell
    try:
        yield
    finally:
        Worker.load_model = load_model


@functools.cache
def drafts_from_their_folder() -> None:
    """Let vLLM load a draft model's weights from its folder.

    vLLM loads a draft model like the main model, which here waits for a reshard (0.32:
    unlike other drafters, `DraftModelProposer._get_model` asks for no load
    configuration of its own).
    """
    from vllm.config import LoadConfig
    from vllm.config.utils import replace
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    create = DraftModelProposer._create_draft_vllm_config

    def create_to_load(self: Any) -> Any:
        return replace(create(self), load_config=LoadConfig())

    DraftModelProposer._create_draft_vllm_config = create_to_load


@functools.cache
def heads_keep_their_weights() -> None:
    """Let a head keep an output layer and embeddings that are in its folder.

    vLLM replaces them by the model's if both are equal (0.32:
    `SpecDecodeBaseProposer._maybe_share_lm_head`, and `_should_share` of the V2
    runner). Weights that a reshard writes into one would then appear in the other.
    """
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.worker.gpu.spec_decode.eagle import utils

    utils._should_share = lambda head, flag, *weights: not getattr(head, flag, False)

    for method, is_own in (
        ("_maybe_share_lm_head", "has_own_lm_head"),
        ("_maybe_share_embeddings", "has_own_embed_tokens"),
    ):
        share = getattr(EagleProposer, method)

        def share_if_absent(
            self: Any, target: Any, share: Any = share, is_own: str = is_own
        ) -> None:
            if not getattr(self.model, is_own, False):
                share(self, target)

        setattr(EagleProposer, method, share_if_absent)


def with_derived_weights(model: torch.nn.Module) -> dict[str, Any]:
    """Return the modules whose own parameters vLLM computes from others (multi-head latent attention), by name."""
    from vllm.model_executor.layers.attention import MLAAttention

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MLAAttention)
    }


def remake_derived(
    model: torch.nn.Module, dtype: torch.dtype, *, may_move: bool
) -> None:
    """Recompute the parameters of `with_derived_weights`.

    vLLM copies them in place (0.32: mla_attention.py), or makes views of the weight
    that they come from (0.24).

    Args:
        dtype: dtype of activations.
        may_move: whether their addresses may change: no captured graph holds them.

    Raises:
        RolloutError: an address changed that a captured graph reads.
    """
    for name, module in with_derived_weights(model).items():
        before = _addresses(module)
        # Recomputed from weights that have just been written.
        module.process_weights_after_loading(dtype)
        moved = [
            tensor_name
            for tensor_name, address in _addresses(module).items()
            if before.get(tensor_name, address) != address
        ]
        if moved and not may_move:
            raise RolloutError(
                f"{name}: vLLM made {', '.join(moved)} again at an address that its captured CUDA graphs do not read. "
                "Set rollout.vllm.enforce_eager=true."
            )


def _addresses(module: torch.nn.Module) -> dict[str, int]:
    """Return the addresses of a module's own tensors, parameters or not."""
    # Derived tensors are plain attributes, not parameters.
    tensors = {**vars(module), **dict(module.named_parameters(recurse=False))}
    return {
        name: tensor.data_ptr()
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }


def loaded_parameters(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters that `load_weights` fills, without packed matrices, which `packed_weights` has."""
    derived = with_derived_weights(model)
    packed = {name for name, module in model.named_modules() if is_packed(module)}
    for name, parameter in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        # Scales are computed from weights when these are quantised.
        is_scale = attribute in ("weight_scale", "weight_scale_inv", *OF_CACHE)
        is_of_packed = owner in packed and attribute != "bias"
        if owner not in derived and not is_scale and not is_of_packed:
            yield name, parameter


def loaded_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that `load_weights` may write: parameters, and buffers that are not also a parameter."""
    tensors: dict[str, torch.Tensor] = dict(loaded_parameters(model))
    kept, derived = (
        {id(tensor) for tensor in model.parameters()},
        with_derived_weights(model),
    )
    for name, buffer in model.named_buffers():
        if id(buffer) not in kept and name.rpartition(".")[0] not in derived:
            tensors[name] = buffer
    return tensors


@contextmanager
def order_kept() -> Iterator[None]:
    """Refuse an engine whose weights vLLM rearranges between loading and running, if a reshard is to write them.

    Some kernels want weights in their own order: FlashInfer permutes a fused mixture of
    experts in place (0.33: fused_moe/oracle/unquantized.py), and quantised linear
    layers are transposed or packed. Weights written later, in the order of the layouts,
    would be misread. The check compares shape, stride, dtype and a sample of the
    elements.

    Raises:
        RolloutError: names the first such parameter, its layer, and a setting that keeps its order.
    """
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading

    def process_and_compare(model: torch.nn.Module, *args: Any, **options: Any) -> None:
        before = {
            name: _Seen.of(parameter) for name, parameter in loaded_parameters(model)
        }
        process(model, *args, **options)
        _check_order(model, before)

    base_loader.process_weights_after_loading = process_and_compare
    try:
        yield
    finally:
        base_loader.process_weights_after_loading = process


class _Seen(NamedTuple):
    """Properties of a parameter that change if its elements are rearranged."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    sample: torch.Tensor

    @classmethod
    def of(cls, parameter: torch.Tensor) -> _Seen:
        # A sample is enough: kernels reorder all of a matrix.
        step = max(1, parameter.numel() // SAMPLES)
        # Compare bits, since NaN is not equal to itself.
        sample = (
            parameter.detach().flatten()[::step].to("cpu", copy=True).view(torch.uint8)
        )
        return cls(tuple(parameter.shape), parameter.stride(), parameter.dtype, sample)


def _check_order(model: torch.nn.Module, before: dict[str, _Seen]) -> None:
    after = {name: _Seen.of(parameter) for name, parameter in loaded_parameters(model)}
    changed = {
        name: change
        for name in before | after
        if (change := _change(before.get(name), after.get(name))) is not None
    }
    if not changed:
        return
    name, change = next(iter(changed.items()))
    module = type(model.get_submodule(name.rpartition(".")[0])).__name__
    of_experts = name.endswith(("w13_weight", "w2_weight"))
    fix = (
        "Set rollout.vllm.moe_backend=triton"
        if of_experts
        else "Leave rollout.vllm.linear_backend out"
    )
    raise RolloutError(
        f"vLLM rearranges {len(changed)} of {len(before)} parameters after loading, where a reshard cannot follow: "
        f"{name} of {module} {change}. {fix}, or choose another kernel for this layer (docs/gpu.md)."
    )


def _change(before: _Seen | None, after: _Seen | None) -> str | None:
    if after is None:
        return "is gone"
    if before is None:
        return "is computed from others"
    if before[:3] != after[:3]:
        return f"is {_described(after)} and was {_described(before)}"
    return (
        None
        if torch.equal(before.sample, after.sample)
        else "holds its elements in another order"
    )


def _described(seen: _Seen) -> str:
    return f"{list(seen.shape)} {str(seen.dtype).removeprefix('torch.')} with strides {list(seen.stride)}"


@contextmanager
def contents_dropped(parameters: Collection[torch.Tensor]) -> Iterator[int]:
    """Keep vLLM's level-1 sleep from copying these parameters to the host while the block runs; yield their bytes.

    vLLM's level-2 sleep is not used, since it drops everything that was allocated while
    the model was loaded. That includes state that the V2 model runner keeps of its
    sampler and model; only registered buffers are saved (0.24 to 0.33:
    v1/worker/gpu_worker.py, v1/worker/gpu/model_runner.py). Instead, allocations of the
    pool that hold nothing but these parameters get a tag that level 1 does not name.
    Storage outside the pool, such as an actor's, is unaffected.
    """
    if not parameters:
        yield 0
        return
    from vllm.device_allocator import get_mem_allocator_instance

    held: dict[int, Any] = get_mem_allocator_instance().pointer_to_data
    # Addresses outside the pool belong to somebody else, such as an actor.
    allocations = [
        held[address] for address in _filled_segments(parameters) if address in held
    ]
    dropped = [allocation for allocation in allocations if allocation.tag == WEIGHTS]
    for allocation in dropped:
        # Level 1 copies allocations with vLLM's tag, and drops all others.
        allocation.tag = WRITTEN_ANEW
    try:
        yield sum(allocation.handle[1] for allocation in dropped)
    finally:
        for allocation in dropped:
            allocation.tag = WEIGHTS


def _filled_segments(parameters: Iterable[torch.Tensor]) -> Iterator[int]:
    """Yield the addresses of device segments that torch's allocator gave to these parameters alone."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (p.untyped_storage() for p in parameters)
    }
    addresses = sorted(storages)
    # Segments as torch's allocator has taken them from the device.
    for segment in torch.cuda.memory_snapshot():
        start: int = segment["address"]
        inside = addresses[
            bisect_left(addresses, start) : bisect_left(
                addresses, start + segment["total_size"]
            )
        ]
        if (
            # Only segments without any other tensor may be dropped.
            inside
            and sum(storages[address] for address in inside)
            == segment["requested_size"]
        ):
            yield start
