"""The compiled part: a shared library, built when megaverl is installed, that knows neither PyTorch nor Python."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

NAME = "megaverl.kernels._extension"  # as setup.py names it
INSTRUCTIONS = {f"avx512{part}" for part in ("f", "bw", "dq", "vl", "_bf16")}  # that it compiles for
TILES = {"amx_tile", "amx_bf16"}  # that products of matrices use where they are
CPUINFO = Path("/proc/cpuinfo")
TYPE_NAMES = {torch.float32: "float", torch.bfloat16: "bfloat16"}  # how names of kernels for both end
CHUNK_ELEMENTS = 1 << 16  # of a thread at a time


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    found = importlib.util.find_spec(NAME)
    if found is None or found.origin is None:
        return (
            None,
            "not built: no C++ compiler that knows AMX (GCC 11, Clang 12) was there when megaverl was installed",
        )
    if not _instructions() >= INSTRUCTIONS:
        return None, "this processor lacks AVX512-BF16"
    return ctypes.CDLL(found.origin), ""


def _instructions() -> set[str]:
    """What the processor can do, in Linux's names."""
    text = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    return set(text.partition("\nflags")[2].partition("\n")[0].split())


def library() -> ctypes.CDLL | None:
    """The kernels; None where they were not built, or where the processor cannot run them."""
    return _load()[0]


def why_not() -> str:
    """Why `library` is None; empty: it is there."""
    return _load()[1]


@functools.cache
def has_tiles() -> bool:
    """Whether the processor multiplies bfloat16 on AMX's tiles, and Linux lets this process use them."""
    kernels = library()
    return kernels is not None and _instructions() >= TILES and bool(kernels.prepare_tiles())


@functools.cache
def kernel(name: str, *types: type) -> Callable[..., Any]:
    """A function of the library, which must be there; types: of its arguments, in ctypes."""
    function = getattr(library(), name)
    function.restype, function.argtypes = None, types
    return function  # type: ignore[no-any-return]


def over_rows(rows: int, width: int, work: Callable[[int, int], object]) -> None:
    """work(first, count) for chunks of the rows, on as many threads as PyTorch has.

    The chunks, `chunk_rows(width)` long, are the same for any number of threads.
    """
    step = chunk_rows(width)
    in_threads(functools.partial(work, first, min(step, rows - first)) for first in range(0, rows, step))


def chunk_rows(width: int) -> int:
    """The rows of a chunk of `over_rows`."""
    return max(1, CHUNK_ELEMENTS // max(1, width))


def in_threads(work: Iterable[Callable[[], object]]) -> None:
    """Do all of it, on as many threads as PyTorch has; the kernels do not hold Python's lock."""
    threads = torch.get_num_threads()
    if threads == 1:
        for each in work:
            each()
    else:
        for done in [_pool(threads).submit(each) for each in work]:
            done.result()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="megaverl-kernels")
