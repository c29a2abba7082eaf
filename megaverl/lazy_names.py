"""Public names that a package offers but imports only when a program first uses them.

`import megaverl` loads neither torch nor vLLM: a command prints its help in a tenth of
a second, and a program can set environment variables before these libraries read them.
"""

from __future__ import annotations

# Type checkers assume True; importing typing's constant would load typing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_getattr(module: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for `module` that imports a name from its home when it is first used.

    Args:
        homes: public name -> module that defines it.

    Example:
        __getattr__ = lazy_getattr(__name__, {"RolloutBatch": "megaverl.data.batch"})
    """

    def get_public_name(name: str) -> object:
        if name not in homes:
            raise AttributeError(
                f"module {module!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}"
            )
        from importlib import import_module

        value: object = getattr(import_module(homes[name]), name)
        return value

    return get_public_name
