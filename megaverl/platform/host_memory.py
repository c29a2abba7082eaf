"""Return of freed host memory to the operating system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def trim_heap() -> None:
    """Give pages of the C heap that hold no object back to the operating system.

    glibc keeps pages between objects that are still in use. The resident memory of a
    long run then grows although it holds no more objects. Where the C library is not
    glibc, nothing happens.

    This takes about 10 ms for a heap of 300 MB.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim
