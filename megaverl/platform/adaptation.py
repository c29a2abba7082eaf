"""Changes that a library needs before it runs on a CPU, each by its name and reason."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple


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
