"""Substitute for `torch.cuda` in megatron-core's modules on a machine without a GPU.

`megatron_cpu.py` redirects their uses of `torch.cuda` here. `torch.cuda` itself is
unchanged, so other libraries such as vLLM notice nothing. A CPU executes in program
order, so streams and events are empty; the only device is `cpu`, and its random
generator is torch's default one. Names that are not defined here are `torch.cuda`'s
own.

The end of the module defines how adaptations of megatron-core and vLLM are named and
applied.
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
    """Return the compute device, which callers pass as `device=`."""
    return torch.device("cpu")


def device_count() -> int:
    """Return 1: a CPU process is one device."""
    return 1


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing.

    There is one device, whose work is complete when a call returns. Its allocator keeps
    no cache and reuses no memory early, and no NVIDIA profiler is attached.
    """


set_device = synchronize = empty_cache = record_stream = nothing


def memory_allocated(device: Any = None) -> int:
    """Return the bytes held by the device allocator: none here."""
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated


class Event:
    """Point in a stream: on a CPU, a moment in time that has passed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    wait = synchronize = nothing

    def record(self, stream: Any = None) -> None:
        """Store the time."""
        self.time = time.perf_counter()

    def query(self) -> bool:
        """Return True: all earlier work is complete."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds between two recorded events."""
        return (end.time - self.time) * 1e3


class Stream:
    """Queue of device work: on a CPU, the program itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = current_device()

    wait_stream = wait_event = synchronize = nothing

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event recorded now."""
        event = event or Event()
        event.record(self)
        return event


_stream = Stream()


def current_stream(device: Any = None) -> Stream:
    """Return the only stream."""
    return _stream


default_stream = current_stream
stream = device = nullcontext  # the body runs where everything runs


class _Generators:
    """Substitute for `torch.cuda.default_generators`: every index is the CPU's generator."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


default_generators = _Generators()


def manual_seed(seed: int) -> None:
    """Seed the compute device's generator."""
    torch.manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the state of the compute device's generator."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Restore the compute device's generator."""
    torch.set_rng_state(state)


class random:
    """Substitute for `torch.cuda.random` with the CPU's generator."""

    get_rng_state = staticmethod(get_rng_state)
    set_rng_state = staticmethod(set_rng_state)


class nvtx:
    """Substitute for `torch.cuda.nvtx`."""

    range_push = range_pop = staticmethod(nothing)
    range = nullcontext


def _lazy_call(function: Callable[[], None], **kwargs: Any) -> None:
    """Call the function now. torch.cuda queues such calls until CUDA starts, which never happens here."""
    function()


def uncompiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return the function unchanged, as a substitute for `torch.compile`; with options only, return a decorator."""
    return uncompiled if function is None else function


class Adaptation(NamedTuple):
    """Named change to megatron-core or vLLM, applied once and only without a CUDA device.

    `apply` may be called before the library is imported, and changes nothing but that
    library.
    """

    name: str
    reason: str
    apply: Callable[[], None]


def adaptation(
    every: list[Adaptation], name: str
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Return a decorator that adds a function with such a change to `every`. Its docstring is the reason."""

    def add(change: Callable[[], None]) -> Callable[[], None]:
        once = functools.cache(change)
        every.append(Adaptation(name, inspect.cleandoc(change.__doc__ or ""), once))
        return once

    return add


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator that replaces `owner.name` by a function, which gets the original as its first argument."""
    original = getattr(owner, name)

    def put(function: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, call)

    return put
