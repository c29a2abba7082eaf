"""Functions with a part of their source replaced: vLLM's on the device, and faults that tests put in."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any


def rewrite(module: Any, owner: Any, name: str, *changes: tuple[str, str]) -> None:
    """Replace parts of the source of `owner.name`; `owner` is a class of `module`, or `module` itself.

    Raises:
        AssertionError: the source has no such part: it has changed, and so must the replacement.
    """
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    for old, new in changes:
        assert old in source, f"{owner.__name__}.{name} has no {old!r}"
        source = source.replace(old, new)
    source = source.replace("super().", f"super({owner.__name__}, self).")
    made: dict[str, Any] = {}
    exec(source, module.__dict__, made)
    setattr(owner, name, made[name])
