"""vLLM on the software device: the classes of its CPU build, on tensors of the device.

vLLM's CPU worker, model runner, attention and operators compute with the device's
tensors, so that megaverl's CUDA branch meets a real engine. Its GPU worker, its
kernels, CUDA graphs and its memory pool are not in here. `_sleep` keeps two rules of
that pool: what is asleep has no memory, and waking brings it back in the same tensors.

Each function below changes one module of vLLM as it is imported. `install` must come
before vLLM.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.softcuda.rewriting import rewrite

Change = Callable[[Any], None]
_changes: dict[str, Change] = {}
# megaverl's adaptations of vLLM's CPU build that its classes need on any device
ADAPTATIONS = (
    "kernels in vLLM's modules alone",
    "no sgl kernels",
    "norms in one kernel",
    "rotary embeddings of all heads",
    "attention without a wrapper",
    "images without torchvision",
    "no ranks of drawn tokens",
    "sampling of drafts by definition",
)


def install() -> None:
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        change = _changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _changes_module(name: str) -> Callable[[Change], Change]:
    def add(change: Change) -> Change:
        _changes[name] = change
        return change

    return add


def _device() -> Any:
    import torch

    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


# vLLM's CPU worker takes streams, events and page-locked memory away from all of torch
# as it is imported.
@_changes_module("vllm.v1.worker.cpu.shm")
def _keep_torch(module: Any) -> None:
    for owner, name, value in _kept:
        setattr(owner, name, value)


_kept: list[tuple[Any, str, Any]] = []


@_changes_module("vllm.utils.torch_utils")
def _remember_torch(module: Any) -> None:
    import torch

    names = [
        (torch, "Event"),
        (torch.Tensor, "pin_memory"),
        (torch.Tensor, "record_stream"),
        (module, "async_tensor_h2d"),
    ]
    names += [
        (torch.cuda, name)
        for name in ("Event", "Stream", "set_stream", "current_stream", "stream")
    ]
    names += [(torch.accelerator, "synchronize")]
    _kept.extend(
        (owner, name, getattr(owner, name))
        for owner, name in names
        if hasattr(owner, name)
    )


@_changes_module("vllm.platforms.cpu")
def _platform(module: Any) -> None:
    import torch

    platform = module.CpuPlatform
    platform.device_type = platform.device_name = "cuda"
    platform.dispatch_key, platform.dist_backend = "CUDA", "nccl"
    check = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        config.device_config.device_type = "cpu"
        check(cls, config)
        config.device_config.device_type = "cuda"

    communicator = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    platform.check_and_update_config = classmethod(check_and_update_config)
    platform.set_device = classmethod(lambda cls, device: torch.cuda.set_device(device))
    platform.get_device_communicator_cls = classmethod(lambda cls: communicator)
    platform.is_sleep_mode_available = lambda self: True


@_changes_module("vllm.distributed.parallel_state")
def _groups(module: Any) -> None:
    module._platform_device_type = lambda: "cuda"
    module.GroupCoordinator.device = property(
        lambda self: _device(), lambda self, value: None
    )


@_changes_module("vllm.v1.worker.cpu_worker")
def _worker(module: Any) -> None:
    worker = module.CPUWorker
    rewrite(
        module,
        worker,
        "init_device",
        (
            'torch.device("cpu")',
            'torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))',
        ),
    )
    worker.sleep, worker.wake_up = _sleep, _wake_up


# Addresses of storages that engines have adopted from actors: vLLM's pool does not know
# them, so sleep leaves them.
_of_actors: set[int] = set()


@_changes_module("megaverl.workers.weight_sync")
def _note_adopted(module: Any) -> None:
    adopt = module.adopt

    def adopt_and_note(plan: Any, source: Any, *others: Any) -> Any:
        _of_actors.update(
            tensor.data.untyped_storage().data_ptr() for tensor in source.values()
        )
        return adopt(plan, source, *others)

    module.adopt = adopt_and_note


@_changes_module("vllm.device_allocator")
def _empty_pool(module: Any) -> None:
    module.get_mem_allocator_instance = lambda: SimpleNamespace(pointer_to_data={})


def _sleep(self: Any, level: int = 1) -> None:
    """Copy the weights to the host and give up their memory, and drop the cache."""
    import torch

    runner = self.model_runner
    asleep: dict[str, list[tuple[torch.UntypedStorage, torch.Tensor | None, int]]] = {
        "weights": [],
        "kv_cache": [],
    }
    known: set[int] = set()
    tensors = [
        ("weights", tensor)
        for tensor in (*runner.model.parameters(), *runner.model.buffers())
    ]
    tensors += [("kv_cache", cache) for cache in runner.kv_caches]
    for tag, tensor in tensors:
        storage = tensor.data.untyped_storage()
        address = storage.data_ptr()
        if (
            not address
            or address in known
            or not storage.nbytes()
            or address in _of_actors
        ):
            continue
        known.add(address)
        values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        asleep[tag].append(
            (storage, values.cpu() if tag == "weights" else None, storage.nbytes())
        )
        del values
        storage.resize_(0)
    self.asleep = asleep


def _wake_up(self: Any, tags: list[str] | None = None) -> None:
    import torch

    for tag in tags or ["weights", "kv_cache"]:
        for storage, values, nbytes in self.asleep[tag]:
            storage.resize_(nbytes)
            target = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
                storage
            )
            target.zero_() if values is None else target.copy_(values)
        self.asleep[tag] = []


@_changes_module("vllm.v1.worker.cpu_model_runner")
def _runner(module: Any) -> None:
    runner = module.CPUModelRunner
    rewrite(
        module,
        runner,
        "__init__",
        ('assert device == torch.device("cpu")', ""),
        ("with _torch_cuda_wrapper():", "if True:"),
        ("_set_torch_accelerator_to_noop()", ""),
        ("self._postprocess_tensors()", ""),
    )
    del runner._to_list, runner._sync_device


@_changes_module("vllm.v1.sample.ops.topk_topp_sampler")
def _sampler(module: Any) -> None:
    rewrite(
        module,
        module.TopKTopPSampler,
        "forward_cpu",
        ("generator=gen, dtype=torch.long", "generator=gen, device=gen.device"),
        ("(logits_f32, seeds)", "(logits_f32, seeds.to(logits_f32.device))"),
    )


@_changes_module("vllm.model_executor.layers.utils")
def _linear(module: Any) -> None:
    import torch

    def keep_weight(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = keep_weight


@_changes_module("megaverl.platform")
def _adapt_vllm(module: Any) -> None:
    def adapt_vllm(self: Any) -> None:
        from megaverl.platform.vllm_cpu import ADAPTATIONS as known

        for adaptation in known:
            if adaptation.name in ADAPTATIONS:
                adaptation.apply()

    module.Platform.adapt_vllm = adapt_vllm
