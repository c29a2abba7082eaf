"""What megatron-core's modules see as `torch.cuda` on a machine without a GPU.

`megatron_cpu.py` points their uses of `torch.cuda` here; `torch.cuda` itself is left alone, so other
libraries (vLLM among them) notice nothing. A CPU executes in program order, so streams and events are
empty; the only device is `cpu`, and its random generator is torch's default one. Whatever is not
redefined here is `torch.cuda`'s own.

At the end: how changes that megatron-core and vLLM need on such a machine are named and made.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch


def __getattr__(name: str) -> Any:
    return getattr(torch.cuda, name)


def current_device() -> torch.device:
    """The compute device; callers pass it on as `device=`."""
    return torch.device("cpu")


def device_count() -> int:
    """One CPU process is one device."""
    return 1


def nothing(*args: Any, **kwargs: Any) -> None:
    """There is one device, whose work is complete when its call returns, in program order; its allocator keeps no
    cache, and no memory is reused early; no NVIDIA profiler is attached."""


set_device = synchronize = empty_cache = record_stream = nothing


def memory_allocated(device: Any = None) -> int:
    """Bytes held by the device allocator: none here."""
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated


class Event:
    """A point in a stream: on a CPU, a moment in time, which has passed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    wait = synchronize = nothing

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two recorded events."""
        return (end.time - self.time) * 1e3


class Stream:
    """A queue of device work: on a CPU, the program itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = current_device()

    wait_stream = wait_event = synchronize = nothing

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


_stream = Stream()


def current_stream(device: Any = None) -> Stream:
    """The one stream there is."""
    return _stream


default_stream = current_stream
stream = device = nullcontext  # the body runs where everything runs


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
    """`torch.cuda.nvtx`."""

    range_push = range_pop = staticmethod(nothing)
    range = nullcontext


def _lazy_call(function: Callable[[], None], **kwargs: Any) -> None:
    """torch.cuda queues these until CUDA starts, which here it never does."""
    function()


def uncompiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Stands for `torch.compile`: the function as it is; given options alone, what decorates one so."""
    return uncompiled if function is None else function


class Adaptation(NamedTuple):
    """A named change to megatron-core or vLLM, made once and only where no CUDA device is.

    `apply` is safe to call before the library is imported and touches nothing but that library.
    """

    name: str
    reason: str
    apply: Callable[[], None]


def adaptation(every: list[Adaptation], name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """What decorates a function that makes such a change, its docstring being the reason, and adds it to `every`."""

    def add(change: Callable[[], None]) -> Callable[[], None]:
        once = functools.cache(change)
        every.append(Adaptation(name, inspect.cleandoc(change.__doc__ or ""), once))
        return once

    return add


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """What decorates a function that takes the place of `owner.name`, which it gets as its first argument."""
    original = getattr(owner, name)

    def put(function: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, call)

    return put
