"""vLLM's parameters in a process that writes them: which there are, when they are there, whether they still are what
was loaded, and which of them its sleep need not keep; and of a quantised engine, whose weights come from an actor, how
it is asked for, and where its numbers and scales lie.

What a kernel holds after loading is what a reshard writes to, in place: captured graphs keep its addresses. So of
quantised ones only kernels count that keep rows and columns as they are (read in vLLM 0.32,
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
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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


# vLLM's tags of what it allocates (0.24 to 0.33: v1/worker/gpu_worker.py)
WEIGHTS, CACHE = "weights", "kv_cache"
WRITTEN_ANEW = "megaverl: written anew"
SAMPLES = 1024  # elements of a parameter that are looked at


@contextmanager
def model_loaded(then: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Call `then` with an engine's model as soon as it has its weights, before it is profiled or captured.

    Inside vLLM's memory pool for weights, which gives back, as it is left, what has been freed in it: where a
    parameter takes other storage, nothing of its own stays behind. Before, its weights are there beside the others.
    """
    from vllm.v1.worker.gpu_worker import Worker

    load_model = Worker.load_model

    def load_and_tell(self: Any, **options: Any) -> None:
        runner = self.model_runner
        load_inside = runner.load_model  # called in the pool

        def load_and_tell_inside(*args: Any, **options: Any) -> None:
            load_inside(*args, **options)
            then(runner.get_model())

        runner.load_model = load_and_tell_inside
        try:
            load_model(self, **options)
        finally:
            del runner.load_model

    Worker.load_model = load_and_tell
    try:
        yield
    finally:
        Worker.load_model = load_model


@functools.cache
def drafts_from_their_folder() -> None:
    """vLLM loads a draft model as it loads the one that it drafts for, which here waits for a reshard (0.32:
    `DraftModelProposer._get_model`, unlike other drafters, asks for no load configuration of its own)."""
    from vllm.config import LoadConfig
    from vllm.config.utils import replace
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    create = DraftModelProposer._create_draft_vllm_config

    def create_to_load(self: Any) -> Any:
        return replace(create(self), load_config=LoadConfig())

    DraftModelProposer._create_draft_vllm_config = create_to_load


def with_derived_weights(model: torch.nn.Module) -> dict[str, Any]:
    """Modules whose own parameters vLLM computes from others': multi-head latent attention, by name."""
    from vllm.model_executor.layers.attention import MLAAttention

    return {name: module for name, module in model.named_modules() if isinstance(module, MLAAttention)}


def remake_derived(model: torch.nn.Module, dtype: torch.dtype, *, may_move: bool) -> None:
    """Compute what `with_derived_weights` says anew.

    vLLM copies it in place (0.32: mla_attention.py), or makes views of the weight that it comes from (0.24).

    Args:
        dtype: of activations.
        may_move: no captured graph holds its address.

    Raises:
        RolloutError: it has another address than a captured graph reads.
    """
    for name, module in with_derived_weights(model).items():
        before = _addresses(module)
        module.process_weights_after_loading(dtype)
        moved = [own for own, address in _addresses(module).items() if before.get(own, address) != address]
        if moved and not may_move:
            raise RolloutError(
                f"{name}: vLLM made {', '.join(moved)} anew at another address than its captured graphs read. "
                "Set rollout.vllm.enforce_eager=true."
            )


def _addresses(module: torch.nn.Module) -> dict[str, int]:
    """Of a module's own tensors, parameters or not."""
    own = {**vars(module), **dict(module.named_parameters(recurse=False))}
    return {name: tensor.data_ptr() for name, tensor in own.items() if isinstance(tensor, torch.Tensor)}


def loaded_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """What `load_weights` fills."""
    derived = with_derived_weights(model)
    for name, parameter in model.named_parameters():
        is_scale = name.endswith(("weight_scale", "weight_scale_inv"))  # made from weights
        if name.rpartition(".")[0] not in derived and not is_scale:
            yield name, parameter


def loaded_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What `load_weights` may write to: the same, and buffers that are no parameters of another name."""
    found: dict[str, torch.Tensor] = dict(loaded_parameters(model))
    kept, derived = {id(tensor) for tensor in model.parameters()}, with_derived_weights(model)
    for name, buffer in model.named_buffers():
        if id(buffer) not in kept and name.rpartition(".")[0] not in derived:
            found[name] = buffer
    return found


@contextmanager
def order_kept() -> Iterator[None]:
    """Refuse an engine, made inside to be written to, whose weights vLLM rearranges between loading and running.

    Kernels want weights in an order of their own: a fused mixture of experts under FlashInfer is permuted, in place
    (0.33: fused_moe/oracle/unquantized.py), quantised linear layers are transposed or packed. What is written to them
    later, in the order of the layouts, would be read as something else. Shape, stride and dtype say so, and a sample
    of the elements.

    Raises:
        RolloutError: with the first of them, its layer, and the setting that keeps it.
    """
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading

    def process_and_compare(model: torch.nn.Module, *args: Any, **options: Any) -> None:
        before = {name: _Seen.of(parameter) for name, parameter in loaded_parameters(model)}
        process(model, *args, **options)
        _check_order(model, before)

    base_loader.process_weights_after_loading = process_and_compare
    try:
        yield
    finally:
        base_loader.process_weights_after_loading = process


class _Seen(NamedTuple):
    """What tells a parameter from another order of its elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    sample: torch.Tensor

    @classmethod
    def of(cls, parameter: torch.Tensor) -> _Seen:
        step = max(1, parameter.numel() // SAMPLES)
        sample = parameter.detach().flatten()[::step].to("cpu", copy=True).view(torch.uint8)  # bits, as NaN is no NaN
        return cls(tuple(parameter.shape), parameter.stride(), parameter.dtype, sample)


def _check_order(model: torch.nn.Module, before: dict[str, _Seen]) -> None:
    after = {name: _Seen.of(parameter) for name, parameter in loaded_parameters(model)}
    changed = {
        name: change for name in before | after if (change := _change(before.get(name), after.get(name))) is not None
    }
    if not changed:
        return
    name, change = next(iter(changed.items()))
    module = type(model.get_submodule(name.rpartition(".")[0])).__name__
    of_experts = name.endswith(("w13_weight", "w2_weight"))
    fix = "Set rollout.vllm.moe_backend=triton" if of_experts else "Leave rollout.vllm.linear_backend out"
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
    return None if torch.equal(before.sample, after.sample) else "holds its elements in another order"


def _described(seen: _Seen) -> str:
    return f"{list(seen.shape)} {str(seen.dtype).removeprefix('torch.')} with strides {list(seen.stride)}"


@contextmanager
def contents_dropped(parameters: Collection[torch.Tensor]) -> Iterator[int]:
    """Inside, vLLM's sleep of level 1 copies to the host what it would, but not what these parameters hold.

    vLLM's level 2 drops all that was allocated while the model was loaded: with the weights, the state that the V2
    model runner keeps of its sampler and its model; it saves the model's registered buffers and nothing else (0.24 to
    0.33: v1/worker/gpu_worker.py, v1/worker/gpu/model_runner.py). So it is level 1, and an allocation of the pool that
    holds nothing but these parameters goes under a tag that it does not name, for as long as the body runs. Yields the
    bytes of those. Storage that is not the pool's, an actor's, is left alone by either.
    """
    if not parameters:
        yield 0
        return
    from vllm.device_allocator import get_mem_allocator_instance

    held: dict[int, Any] = get_mem_allocator_instance().pointer_to_data  # type: ignore[attr-defined]
    allocations = [held[address] for address in _filled_segments(parameters) if address in held]
    dropped = [allocation for allocation in allocations if allocation.tag == WEIGHTS]
    for allocation in dropped:
        allocation.tag = WRITTEN_ANEW
    try:
        yield sum(allocation.handle[1] for allocation in dropped)
    finally:
        for allocation in dropped:
            allocation.tag = WEIGHTS


def _filled_segments(parameters: Iterable[torch.Tensor]) -> Iterator[int]:
    """Addresses of what torch's allocator took from the device and gave to these parameters alone."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (p.untyped_storage() for p in parameters)}
    addresses = sorted(storages)
    for segment in torch.cuda.memory_snapshot():
        start: int = segment["address"]
        inside = addresses[bisect_left(addresses, start) : bisect_left(addresses, start + segment["total_size"])]
        if inside and sum(storages[address] for address in inside) == segment["requested_size"]:
            yield start
