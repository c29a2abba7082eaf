"""One thing that a library needs changed before it runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Adaptation:
    """A named change to megatron-core or vLLM, made once and only where no CUDA device is.

    `apply` must be safe to call before the library is imported and must touch nothing but that library.
    """

    name: str
    reason: str
    apply: Callable[[], None]
