"""vLLM's parameters in a process that writes them: which there are, when they are there, whether they still are what
was loaded, and which of them its sleep need not keep."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megaverl.errors import RolloutError
from megaverl.rollout.vllm_quantised import is_scale

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
        if name.rpartition(".")[0] not in derived and not is_scale(name):
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
