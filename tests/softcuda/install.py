"""Give this process CUDA devices whose memory and kernels are the host's, with values.

    from tests.softcuda import install
    install.install(folder)                 # of tests.softcuda.build, before torch is imported
    install.configure(Options(devices=2))   # at any time before the first use

torch's Python code for CUDA runs as it is. This module supplies what a build of torch
without CUDA leaves out of `torch._C`, and `nccl.py` what it leaves out of
`torch.distributed`. A child that is started with `environment(...)` has the same
devices: Python imports `site/sitecustomize.py` there. Nothing but the standard library
is imported here.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER, OPTIONS = "SOFTCUDA", "SOFTCUDA_OPTIONS"  # variables of the environment
CUDA = 1  # c10::DeviceType::CUDA
SUCCESS = 0
STACK_DEPTH = 7
CUDA_VERSION = "13.0"

library: Any = None  # ctypes.CDLL
extension: Any = None  # the module of nccl.cpp
_kept: list[Any] = []  # ctypes callbacks


@dataclass(frozen=True)
class Options:
    """What the devices are and which faults they look for.

    Attributes:
        devices: number of devices.
        memory: bytes of each device.
        tracks_order: report accesses that no wait orders, and memory that is used again too early.
        poisons: fill fresh and released device memory with NaN.
        shares_generator: let the device draw what the CPU would, to compare bits.
        strict_device: report memory on a device other than `LOCAL_RANK`.
        reports: folder in which each process appends what it reports to `PID.txt`; empty: standard error alone.
    """

    devices: int = 2
    memory: int = 8 << 30
    tracks_order: bool = False
    poisons: bool = False
    shares_generator: bool = False
    strict_device: bool = False
    reports: str = ""


options = Options()


def environment(folder: Path, chosen: Options) -> dict[str, str]:
    """Return the variables with which a child process has the devices of the libraries in `folder`."""
    paths = [str(HERE / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        FOLDER: str(folder),
        OPTIONS: json.dumps(asdict(chosen)),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in range(chosen.devices)),
        "TORCHDYNAMO_DISABLE": "1",  # nothing can be compiled for the device
    }


def install_from_environment() -> None:
    install(Path(os.environ[FOLDER]))
    global options
    options = Options(**json.loads(os.environ[OPTIONS]))


def install(folder: Path) -> None:
    """Arrange that `import torch` finds the devices of the libraries in `folder`."""
    assert "torch" not in sys.modules, "torch asks for devices as it is imported"
    sys.meta_path.insert(0, _TorchFinder(folder))


def configure(chosen: Options) -> None:
    """Use these options from now on: in a process that has not used its devices yet, such as a fresh copy."""
    global options
    options = chosen
    if library is None:
        return  # as torch is imported
    own_device = int(os.environ.get("LOCAL_RANK", -1)) if chosen.strict_device else -1
    flags = (chosen.tracks_order, chosen.poisons, chosen.shares_generator)
    library.soft_configure(chosen.devices, chosen.memory, *map(int, flags), own_device)
    if chosen.tracks_order or chosen.strict_device:
        library.soft_set_reporter(*_kept)
    import torch

    torch.cuda.default_generators = torch.cuda._software_generators[: chosen.devices]  # type: ignore[attr-defined]


class _TorchFinder(MetaPathFinder):
    """Loads the device before torch, and supplies `torch._C` before `torch.cuda` looks there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        if name == "torch.cuda":
            _complete_torch_c(sys.modules["torch._C"])
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            _load(self.folder)
            execute(module)
            sys.meta_path.remove(self)
            _complete_torch(module, self.folder)
            configure(options)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _load(folder: Path) -> None:
    global library
    torch_spec = PathFinder.find_spec("torch")
    assert torch_spec is not None and torch_spec.origin is not None
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(
            str(Path(torch_spec.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL
        )
    library = ctypes.CDLL(str(folder / "libsoftcuda.so"), mode=ctypes.RTLD_GLOBAL)
    integer = ctypes.c_int64
    for name in (
        "soft_current_stream",
        "soft_allocated",
        "soft_peak",
        "soft_num_allocations",
    ):
        getattr(library, name).restype = integer
    library.soft_kernel_counts.restype = ctypes.c_char_p
    library.soft_use_stream.argtypes = [integer, ctypes.c_int]
    library.soft_configure.argtypes = [ctypes.c_int, integer, *[ctypes.c_int] * 4]
    _kept.extend(
        (
            ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_report),
            ctypes.CFUNCTYPE(integer)(_stack_number),
        )
    )
    import atexit

    atexit.register(lambda: library.soft_set_reporter(None, None))


def kernel_counts() -> dict[str, int]:
    """Return how often each operator has run on this process's devices: `{"aten::mm": 3, ...}`."""
    return dict(json.loads(library.soft_kernel_counts()))


# ---- reports ---------------------------------------------------------------------------------------------------------

reports: list[str] = []
_stacks = ["(no Python frame)"]
_stack_numbers: dict[tuple[tuple[str, int, str], ...], int] = {(): 0}


def _stack_number() -> int:
    """Number the innermost frames that are not torch's."""
    frames: list[tuple[str, int, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < STACK_DEPTH:
        file = frame.f_code.co_filename
        if "/torch/" not in file and not file.startswith("<"):
            frames.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    key = tuple(frames)
    if key not in _stack_numbers:
        _stack_numbers[key] = len(_stacks)
        short = [
            (file.rpartition("/site-packages/")[2] or file, line, name)
            for file, line, name in frames
        ]
        _stacks.append(
            " < ".join(f"{file}:{line}:{name}" for file, line, name in short)
        )
    return _stack_numbers[key]


def _report(encoded: bytes) -> None:
    text = re.sub(
        r"@(\d+)",
        lambda match: f"\n      at {_stacks[int(match[1])]}",
        encoded.decode(),
    )
    if text in reports:
        return
    reports.append(text)
    line = f"softcuda[rank {os.environ.get('RANK', '0')}]: {text}\n"
    sys.stderr.write(line)
    if options.reports:
        with (Path(options.reports) / f"{os.getpid()}.txt").open(
            "a", encoding="utf-8"
        ) as file:
            file.write(line)


# ---- what a build of torch without CUDA lacks ------------------------------------------------------------------------


class _Names(ModuleType):
    """A namespace that TorchDynamo can hash, as it wants of whatever it has a rule for."""

    def __init__(self, **names: Any) -> None:
        super().__init__("software CUDA device")
        self.__dict__.update(names)


class DeviceProperties:
    """Stands for `torch._C._CudaDeviceProperties`."""

    def __init__(self, index: int) -> None:
        self.name = "Software CUDA device"
        self.major, self.minor = 9, 0
        self.total_memory = options.memory
        (
            self.multi_processor_count,
            self.warp_size,
            self.max_threads_per_multi_processor,
        ) = 132, 32, 2048
        self.regs_per_multiprocessor, self.L2_cache_size = 65536, 50 << 20
        self.shared_memory_per_block, self.shared_memory_per_block_optin = 49152, 232448
        self.is_integrated, self.is_multi_gpu_board, self.gcnArchName = False, False, ""
        self.uuid = f"00000000-0000-0000-0000-{index:012d}"
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = index, 0, 0


def _index(device: int | None) -> int:
    return (
        int(library.soft_current_device())
        if device is None or int(device) < 0
        else int(device)
    )


def _set_device(device: int) -> None:
    if device >= library.soft_num_devices():
        raise RuntimeError("CUDA error: invalid device ordinal")
    if device >= 0:
        library.soft_use_device(device)


def _exchange_device(device: int) -> int:
    before = _index(None)
    _set_device(device)
    return before


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    library.soft_use_device(device_index)
    library.soft_use_stream(stream_id, device_index)


def _memory_info(device: int | None = None) -> tuple[int, int]:
    return options.memory - library.soft_allocated(_index(device)), options.memory


def _memory_stats(device: int | None = None) -> dict[str, Any]:
    index = _index(device)
    now, peak, times = (
        library.soft_allocated(index),
        library.soft_peak(index),
        library.soft_num_allocations(index),
    )

    def by_pool(current: int, most: int) -> dict[str, dict[str, int]]:
        found = {"current": current, "peak": most, "allocated": 0, "freed": 0}
        return {
            "all": found,
            "small_pool": dict.fromkeys(found, 0),
            "large_pool": found,
        }

    in_use = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    unused = (
        "inactive_split_bytes",
        "segment",
        "active",
        "inactive_split",
        "oversize_allocations",
        "oversize_segments",
    )
    numbers = (
        "num_alloc_retries",
        "num_ooms",
        "num_sync_all_streams",
        "num_device_alloc",
        "num_device_free",
    )
    return {
        **{name: by_pool(now, peak) for name in in_use},
        **{name: by_pool(0, 0) for name in unused},
        **dict.fromkeys(numbers, 0),
        "allocation": by_pool(times, times),
        "max_split_size": -1,
    }


def _stream_and_event(torch_c: Any) -> tuple[type, type]:
    """Return what `torch.cuda.Stream` and `torch.cuda.Event` derive from."""

    class CudaStream(torch_c.Stream):  # type: ignore[misc]
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int = 0,
            device_index: int = 0,
            device_type: int = 0,
            stream_ptr: int = 0,
        ) -> Any:
            import torch

            if device_type:
                known = {
                    "stream_id": stream_id,
                    "device_index": device_index,
                    "device_type": device_type,
                }
                return torch_c.Stream.__new__(cls, **known)
            return torch_c.Stream.__new__(
                cls, device=torch.device("cuda", _index(None)), priority=priority
            )

        def __init__(self, *_: Any, **__: Any) -> None: ...

        cuda_stream = property(lambda self: self.stream_id)
        priority = property(lambda self: 0)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

    class CudaEvent(torch_c.Event):  # type: ignore[misc]
        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            import torch

            device = torch.device("cuda", _index(None))
            return torch_c.Event.__new__(
                cls, device=device, enable_timing=enable_timing, blocking=blocking
            )

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def record(self, stream: Any = None) -> None:
            self.recorded_at = time.perf_counter()
            torch_c.Event.record(self, stream)

        # torch.Event's own takes no subclass.
        def elapsed_time(self, end: Any) -> float:
            return 1e3 * (end.recorded_at - self.recorded_at)

        cuda_event = property(lambda self: self.event_id)

    return CudaStream, CudaEvent


def _complete_torch_c(torch_c: Any) -> None:
    """Supply what `torch.cuda` and megatron-core take from `torch._C`."""
    torch_c._CudaStreamBase, torch_c._CudaEventBase = _stream_and_event(torch_c)
    torch_c._CudaDeviceProperties = DeviceProperties
    torch_c._CUDAGraph = type("_CUDAGraph", (), {})  # nothing can be captured
    torch_c._graph_pool_handle = lambda: (0, 1)
    torch_c._cudart = _Names(
        cudaError=_Names(success=SUCCESS),
        cudaGetErrorString=lambda code: "software CUDA device",
        cudaMemGetInfo=_memory_info,
        cudaDeviceSynchronize=lambda: extension.synchronize(),
        **dict.fromkeys(("cudaProfilerStart", "cudaProfilerStop"), lambda: SUCCESS),
        **dict.fromkeys(("cudaHostRegister", "cudaHostUnregister"), lambda *_: SUCCESS),
        **dict.fromkeys(("cudaStreamCreate", "cudaStreamDestroy"), lambda *_: SUCCESS),
    )
    torch_c._nvtx = _Names(
        rangePushA=lambda message: 0,
        rangePop=lambda: 0,
        rangeStartA=lambda message: 0,
        rangeEnd=lambda number: None,
        markA=lambda message: None,
    )
    for name, function in _cuda_functions().items():
        setattr(torch_c, f"_cuda_{name}", function)


def _cuda_functions() -> dict[str, Callable[..., Any]]:
    """Return the functions of `torch._C` by name, without `_cuda_`."""

    def init() -> None:
        import torch

        torch.cuda._get_device_properties = DeviceProperties  # type: ignore[attr-defined]

    def nothing(*_: Any, **__: Any) -> None: ...

    no_effect = (
        "ipc_collect",
        "emptyCache",
        "resetAccumulatedMemoryStats",
        "setMemoryFraction",
        "record_memory_history",
        "record_memory_history_legacy",
        "set_sync_debug_mode",
        "lock_mutex",
        "unlock_mutex",
        "clearCublasWorkspaces",
        "sleep",
    )
    return {
        **dict.fromkeys(no_effect, nothing),
        "init": init,
        "getDeviceCount": lambda: library.soft_num_devices(),
        "getDevice": lambda: library.soft_current_device(),
        "setDevice": _set_device,
        "exchangeDevice": _exchange_device,
        "maybeExchangeDevice": _exchange_device,
        "canDeviceAccessPeer": lambda device, peer: True,
        "hasPrimaryContext": lambda device: True,
        "isInBadFork": lambda: False,
        "synchronize": lambda: extension.synchronize(),
        "getCurrentStream": lambda device: (
            library.soft_current_stream(_index(device)),
            _index(device),
            CUDA,
        ),
        "getDefaultStream": lambda device: (0, _index(device), CUDA),
        "getCurrentRawStream": lambda device: library.soft_current_stream(
            _index(device)
        ),
        "setStream": _set_stream,
        "isCurrentStreamCapturing": lambda: False,
        "memoryStats": _memory_stats,
        "resetPeakMemoryStats": lambda device: library.soft_reset_peak(_index(device)),
        "memorySnapshot": lambda *_: {
            "segments": [],
            "device_traces": [],
            "allocator_settings": {},
        },
        "getMemoryFraction": lambda device: 1.0,
        "getAllocatorBackend": lambda: "native",
        "getArchFlags": lambda: "sm_90",
        "get_sync_debug_mode": lambda: 0,
        "getCurrentBlasHandle": lambda: 0,
    }


def _complete_torch(torch: Any, folder: Path) -> None:
    """Replace what a build without CUDA has compiled out, and add NCCL."""
    torch.version.cuda = CUDA_VERSION
    torch._C._has_cuda = True
    torch.backends.cuda.is_built = lambda: True
    sys.path.insert(0, str(folder))
    global extension
    extension = importlib.import_module("softcuda_extension")
    sys.path.remove(str(folder))
    _complete_storages(torch)
    library.soft_register_kernels()
    library.soft_configure(64, 0, 0, 0, 0, -1)
    torch.cuda._software_generators = tuple(
        extension.default_generator(index) for index in range(64)
    )
    torch.cuda.nccl.version = lambda: (2, 29, 7)
    _complete_distributed(torch, extension.ProcessGroupNCCL)


def _complete_storages(torch: Any) -> None:
    storage = torch.UntypedStorage
    resize, new = storage.resize_, storage.__new__

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        extension.resize_storage(
            torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), int(size)
        )
        return self

    def make(cls: type, *arguments: Any, device: Any = None, **named: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return new(
                cls,
                *arguments,
                **named,
                **({} if device is None else {"device": device}),
            )
        size = arguments[0] if arguments else named.get("size", 0)
        if isinstance(size, int):
            return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        return torch.tensor(
            list(size), dtype=torch.uint8, device=device
        ).untyped_storage()

    storage.resize_, storage.__new__ = resize_, make
    _complete_sharing(torch)


def _complete_sharing(torch: Any) -> None:
    """Let a process open another's device memory: what is opened has the contents of that moment."""
    storage = torch.UntypedStorage
    libc = ctypes.CDLL(None, use_errno=True)

    class Span(ctypes.Structure):
        _fields_ = (("begin", ctypes.c_void_p), ("size", ctypes.c_size_t))

    def share(self: Any) -> tuple[Any, ...]:
        handle = struct.pack("QQ", os.getpid(), self.data_ptr())
        return _index(None), handle, self.nbytes(), 0, b"", 0, b"", False

    def open_shared(
        cls: Any, device: int, handle: bytes, nbytes: int, offset: int, *_: Any
    ) -> Any:
        pid, address = struct.unpack("QQ", handle)
        opened = torch.empty(
            nbytes, dtype=torch.uint8, device=torch.device("cuda", device)
        ).untyped_storage()
        here, there = Span(opened.data_ptr(), nbytes), Span(address + offset, nbytes)
        read = libc.process_vm_readv(
            ctypes.c_int(pid), ctypes.byref(here), 1, ctypes.byref(there), 1, 0
        )
        if read != nbytes:
            raise RuntimeError(f"CUDA error: {os.strerror(ctypes.get_errno())}")
        return opened

    storage._share_cuda_ = share
    storage._new_shared_cuda = classmethod(open_shared)
    storage._release_ipc_counter_cuda = staticmethod(lambda counter, place: None)


def _complete_distributed(torch: Any, group: Any) -> None:
    """Make `group` the `ProcessGroupNCCL` of torch.distributed."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    class Config:
        min_ctas = max_ctas = cga_cluster_size = -1
        net_name = None

    class GroupOptions:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self._timeout = timedelta(minutes=10)
            self.is_high_priority_stream = is_high_priority_stream
            self.config = Config()
            self.global_ranks_in_group: list[int] = []
            self.group_name, self.backend = "", "nccl"
            self.split_from, self.split_color = None, 0

    group.Options, group.NCCLConfig = GroupOptions, Config
    distributed_c10d._NCCL_AVAILABLE = True
    for module in (distributed_c10d, dist, torch._C._distributed_c10d):
        module.ProcessGroupNCCL = group
