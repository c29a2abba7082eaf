"""What megatron-core's modules see as `torch.cuda` on a machine without a GPU.

`megatron_cpu.py` points their uses of `torch.cuda` here; `torch.cuda` itself is left alone, so other
libraries (vLLM among them) notice nothing. A CPU executes in program order, so streams and events are
empty; the only device is `cpu`, and its random generator is torch's default one. Whatever is not
redefined here is `torch.cuda`'s own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def __getattr__(name: str) -> Any:
    return getattr(torch.cuda, name)


def current_device() -> torch.device:
    """The compute device; callers pass it on as `device=`."""
    return torch.device("cpu")


def device_count() -> int:
    """One CPU process is one device."""
    return 1


def set_device(device: Any) -> None:
    """Nothing to choose: there is one device."""


def synchronize(device: Any = None) -> None:
    """CPU work is complete when its call returns."""


def empty_cache() -> None:
    """The CPU allocator keeps no cache that could be given back."""


def memory_allocated(device: Any = None) -> int:
    """Bytes held by the device allocator: none here."""
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated


class Event:
    """A point in a stream: on a CPU, a moment in time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """The event has passed: execution is in program order."""

    def synchronize(self) -> None:
        """The event has passed: execution is in program order."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two recorded events."""
        return (end.time - self.time) * 1e3


class Stream:
    """A queue of device work: on a CPU, the program itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = current_device()

    def wait_stream(self, stream: Any) -> None:
        """Program order already is the order."""

    def wait_event(self, event: Any) -> None:
        """Program order already is the order."""

    def synchronize(self) -> None:
        """Nothing is outstanding."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


_stream = Stream()


def current_stream(device: Any = None) -> Stream:
    """The one stream there is."""
    return _stream


default_stream = current_stream


@contextmanager
def stream(chosen: Any) -> Iterator[None]:
    """Run the body where everything runs."""
    yield


@contextmanager
def device(chosen: Any) -> Iterator[None]:
    """Run the body on the one device."""
    yield


class _Generators:
    """Stands for `torch.cuda.default_generators`: every index is the CPU's generator."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


default_generators = _Generators()


def manual_seed(seed: int) -> None:
    """Seed the compute device's generator."""
    torch.manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of the compute device's generator."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Restore the compute device's generator."""
    torch.set_rng_state(state)


class random:
    """`torch.cuda.random` over the CPU's generator."""

    get_rng_state = staticmethod(get_rng_state)
    set_rng_state = staticmethod(set_rng_state)


class nvtx:
    """Profiler ranges: no NVIDIA profiler is attached to a CPU run."""

    @staticmethod
    def range_push(message: str) -> int:
        return 0

    @staticmethod
    def range_pop() -> int:
        return 0

    @staticmethod
    @contextmanager
    def range(message: str) -> Iterator[None]:
        yield


def _lazy_call(function: Callable[[], None], **kwargs: Any) -> None:
    """torch.cuda queues these until CUDA starts, which here it never does."""
    function()


def record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """Memory is not reused before the program says so."""


def uncompiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Stands for `torch.compile`: the function as it is; given options alone, what decorates one so."""
    return uncompiled if function is None else function
