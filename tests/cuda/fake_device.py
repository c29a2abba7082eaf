"""A CUDA device without a GPU: tensors on it have shapes and dtypes, no values; what the host asks of it is counted.

`fake_device.cpp` makes a build of torch without CUDA believe in the device, so that
torch's `FakeTensorMode` computes on it, gradients too. Tensors on the host stay real:
the code between kernels runs as it is, on real numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).parent
NUM_DEVICES = 8
OF_THE_RIG = (
    "/tests/cuda/",
    "/torch/utils/_python_dispatch.py",
    "/torch/_subclasses/",
    "/torch/_dynamo/",
    "/torch/_compile.py",
)


def build(folder: Path) -> Path:
    """Compile the device for this interpreter's torch; some seconds, once for each version."""
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    torch_folder = Path(found.origin).parent
    library = (
        folder / f"fake_device-{version('torch')}-{sys.implementation.cache_tag}.so"
    )
    if (
        library.exists()
        and library.stat().st_mtime > (HERE / "fake_device.cpp").stat().st_mtime
    ):
        return library
    made = library.with_suffix(".new")
    lib = torch_folder / "lib"
    subprocess.run(
        [
            "g++",
            "-shared",
            "-fPIC",
            "-O0",
            "-std=c++20",
            str(HERE / "fake_device.cpp"),
            "-o",
            str(made),
        ]
        + [
            f"-I{torch_folder / 'include'}",
            f"-L{lib}",
            "-ltorch_cpu",
            "-lc10",
            f"-Wl,-rpath,{lib}",
        ],
        check=True,
    )
    return made.replace(library)


def install(library: Path) -> None:
    """Give this process such devices, the first being the current one. Before torch is imported, which asks then."""
    assert "torch" not in sys.modules
    device = ctypes.CDLL(str(library))
    import torch
    from torch._subclasses import fake_tensor

    torch.cuda.is_available = lambda: True
    for name, function in _functions(device).items():
        setattr(torch.cuda, name, function)
    torch.tensor = partial(_from_host, torch.tensor)  # type: ignore[assignment]
    torch._C._cuda_getDevice = torch.cuda.current_device  # type: ignore[attr-defined]
    torch.cuda.default_generators = (torch.default_generator,) * NUM_DEVICES
    # Nothing real is made there.
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)
    address = torch.UntypedStorage.data_ptr
    torch.UntypedStorage.data_ptr = (  # type: ignore[method-assign]
        lambda self: self._cdata if self.device.type == "meta" else address(self)
    )
    fake_tensor.FakeTensor.data_ptr = lambda self: (
        self.untyped_storage().data_ptr() + self.storage_offset() * self.element_size()
    )
    torch.nn.Module._apply = _apply  # type: ignore[method-assign,assignment]
    fake_tensor.FakeTensor.record_stream = lambda self, stream: None
    fake_tensor.FakeTensor.tolist = lambda self: self.cpu().tolist()


def _from_host(
    make: Callable[..., Any], data: Any, *, device: Any = None, **options: Any
) -> Any:
    """`torch.tensor`, which makes its tensor on the host and sends it from there; in
    threads of autograd too, where torch's own option for that
    (`_set_only_lift_cpu_tensors`) is not set.
    """
    requires_grad = options.pop("requires_grad", False)
    made = make(data, **options)
    return (made if device is None else made.to(device)).requires_grad_(requires_grad)


def _apply(module: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
    """`torch.nn.Module._apply` for tensors that cannot be exchanged in place: what changes becomes a new parameter."""
    import torch

    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        moved = function(parameter.data)
        if (moved.device, moved.dtype) != (parameter.device, parameter.dtype):
            module._parameters[name] = torch.nn.Parameter(
                moved, parameter.requires_grad
            )
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


class Stream:
    """A stream of a device that has done everything at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        import torch

        self.device = torch.device("cuda", torch.cuda.current_device())

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None:
        HostReads.count("stream.synchronize")


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        HostReads.count("event.synchronize")


def _functions(library: Any) -> dict[str, Any]:
    import torch

    memory = 80 << 30
    return {
        "current_device": lambda: library.current_device(),
        "set_device": lambda device: library.use_device(
            torch.device("cuda", torch.device(device).index or 0).index
        ),
        "device_count": lambda: NUM_DEVICES,
        "device": contextlib.nullcontext,
        "is_bf16_supported": lambda *a: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *a: (9, 0),
        "get_device_name": lambda *a: "NVIDIA H100 80GB HBM3",
        "mem_get_info": lambda *a: (memory, memory),
        "memory_reserved": lambda *a: 0,
        "memory_allocated": lambda *a: 0,
        "max_memory_allocated": lambda *a: 0,
        "reset_peak_memory_stats": lambda *a: None,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "synchronize": lambda *a: HostReads.count("torch.cuda.synchronize"),
        "Stream": Stream,
        "Event": Event,
        "stream": contextlib.nullcontext,
        "current_stream": Stream,
        "default_stream": Stream,
        "manual_seed": lambda seed: None,
        "get_rng_state": lambda *a: torch.get_rng_state(),
        "set_rng_state": lambda *a, **k: None,
        "_lazy_call": lambda call, **k: None,
    }


class HostReads:
    """Where the host waited for the device, and how often: by the nearest function that is ours or Megatron's.

    The device runs behind the host; each of these makes the host wait until it has
    caught up, and with it for the collectives that were launched before. `unknown` are
    those that the watch would take for work: the lines that ask. `sent` are copies the
    other way: one that is not `non_blocking` waits as a read does, and one from
    pageable memory may (CUDA's "API synchronization behavior").
    """

    found: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    unknown: set[str] = set()

    @classmethod
    def count(cls, what: str, *, waits: bool = True) -> None:
        cls.found[what, _caller()] += 1
        if waits:
            from megaverl.distributed.heartbeat import place

            where, waits_for = place(_asking())
            cls.unknown |= set() if waits_for else {where}

    @classmethod
    def count_sent(cls, how: str) -> None:
        cls.sent[f"copy to the device{how}", _caller()] += 1

    @classmethod
    def take(cls) -> dict[str, int]:
        """`{"file.py:function: what": times}`, and begin anew."""
        return cls._taken(cls.found)

    @classmethod
    def take_sent(cls) -> dict[str, int]:
        return cls._taken(cls.sent)

    @staticmethod
    def _taken(counted: Counter[tuple[str, str]]) -> dict[str, int]:
        found = {
            f"{where}: {what}": times
            for (what, where), times in sorted(counted.items())
        }
        counted.clear()
        return found

    @classmethod
    def take_unknown(cls) -> list[str]:
        found = sorted(cls.unknown)
        cls.unknown.clear()
        return found


def _asking() -> FrameType | None:
    """The innermost frame of the code under test: on a GPU it would be in this call until the device has caught up."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and any(
        part in frame.f_code.co_filename for part in OF_THE_RIG
    ):
        frame = frame.f_back
    return frame


def _caller() -> str:
    for frame in reversed(traceback.extract_stack()[:-2]):
        if frame.name.startswith("<") or frame.name in (
            "to_device",
            "page_locked",
        ):  # a comprehension: up to Python 3.11 a function
            continue
        for package in ("megaverl", "megatron"):
            place = frame.filename.rpartition(f"/{package}/")[2]
            # A clone is called megaverl, too, and holds all other packages in its .venv.
            if "site-packages/" in place or "/tests/" in frame.filename:
                continue
            if place != frame.filename:
                return f"{package}/{place}:{frame.name}"
    return "?"
