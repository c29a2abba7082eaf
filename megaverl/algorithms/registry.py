"""Algorithms by name: a decorator registers a function, its signature says what it needs."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from megaverl.errors import ConfigError, DataError, MegaverlError
from megaverl.plugins import load_function
from megaverl.user_code import describe, user_code, where_raised

P = ParamSpec("P")
T = TypeVar("T")
# (what a function returned, what it was called with) -> what was found and what is expected; None where it is right
Problem = Callable[[Any, Mapping[str, Any]], str | None]


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered function, with what its signature declares.

    Positional parameters are inputs, taken from a batch by their name (those with a default may be absent);
    keyword-only parameters are options, set from the configuration. So the caller can see before a run
    that GAE reads `values`, and hence wants a critic, without knowing anything else about GAE.
    """

    kind: str
    name: str
    function: Callable[..., T]
    inputs: tuple[str, ...]
    optional_inputs: tuple[str, ...]
    options: Mapping[str, Any]  # name -> default; inspect.Parameter.empty where the option must be given
    problem: Problem | None = None
    of_groups: bool = False

    def __call__(self, inputs: Mapping[str, Any], **options: Any) -> T:
        """Call with the inputs that the function declares, out of a larger mapping.

        Raises:
            DataError: an input that it needs is absent.
            ConfigError: an option that it does not have, or lacks; a function of the user's own that raises, or
                returns what it should not.
        """
        missing = [name for name in self.inputs if inputs.get(name) is None]
        if missing:
            given = sorted(name for name, value in inputs.items() if value is not None)
            raise DataError(f"{self.kind} '{self.name}' needs {_names(missing)}, and was given only {_names(given)}")
        self.check_options(options)
        wanted = {name: inputs[name] for name in self.inputs}
        wanted |= {name: inputs[name] for name in self.optional_inputs if inputs.get(name) is not None}
        if ":" not in self.name:
            return self.function(**wanted, **options)
        with user_code(self._failed, keep=MegaverlError):
            result = self.function(**wanted, **options)
            found = self.problem(result, inputs) if self.problem is not None else None
        if found:
            raise ConfigError(f"{self.kind} '{self.name}' returned {found}")
        return result

    def _failed(self, error: BaseException) -> ConfigError:
        """Return the error for what the user's function raised, with the line in its file."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        where = where_raised(error, code.co_filename) if code else ""
        return ConfigError(f"{self.kind} '{self.name}' raised {describe(error)}{where}")

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise one ConfigError that lists every unknown and every missing option."""
        mistakes = [
            f"{self.kind} '{self.name}' has no option '{name}'{_hint(name, list(self.options))}"
            for name in options
            if name not in self.options
        ]
        mistakes += [
            f"{self.kind} '{self.name}' needs the option '{name}'"
            for name, default in self.options.items()
            if default is inspect.Parameter.empty and name not in options
        ]
        if mistakes:
            raise ConfigError("\n".join(mistakes))


class Registry(Generic[T]):
    """Functions of one kind under their names.

    Args:
        kind: the word used in messages ("policy loss").
        problem: looks at what a function of the user's own returns.
    """

    def __init__(self, kind: str, problem: Problem | None = None) -> None:
        self.kind, self.problem = kind, problem
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str, *, of_groups: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Decorator: file a function under `name` and return it unchanged.

        Args:
            of_groups: see `Entry`.

        Raises:
            ConfigError: the name is taken by another function.
        """

        def file_it(function: Callable[P, T]) -> Callable[P, T]:
            if name in self._entries:
                raise ConfigError(f"{self.kind} '{name}' is registered twice; give the second another name")
            self._entries[name] = _entry(self.kind, name, function, self.problem, of_groups)
            return function

        return file_it

    def get(self, name: str) -> Entry[T]:
        """The entry called `name`; a name with a colon, `module:function`, is imported.

        Raises:
            ConfigError: unknown name (the nearest ones are listed), or an import that fails.
        """
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return _entry(self.kind, name, load_function(name, self.kind), self.problem)
        known = self.names()
        raise ConfigError(
            f"unknown {self.kind} '{name}'{_hint(name, known)}; known: {_names(known)}, "
            "or a function of your own as 'module:function'"
        )

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


def _entry(
    kind: str, name: str, function: Callable[..., T], problem: Problem | None, of_groups: bool = False
) -> Entry[T]:
    inputs, optional_inputs, options = [], [], {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"{kind} '{name}' must name every parameter: inputs first, options after a '*'; found '{parameter}'"
            )
        if parameter.kind is parameter.KEYWORD_ONLY:
            options[parameter.name] = parameter.default
        elif parameter.default is parameter.empty:
            inputs.append(parameter.name)
        else:
            optional_inputs.append(parameter.name)
    return Entry(kind, name, function, tuple(inputs), tuple(optional_inputs), options, problem, of_groups)


def tensor_problem(value: Any, shape: Sequence[int], where: str = "") -> str | None:
    """A `Problem` of a tensor that must have a shape; `where` it is in what was returned: "its loss, "."""
    found = getattr(value, "shape", None)
    if found is None:
        return f"{where}{type(value).__name__}; expected a tensor of shape {list(shape)}"
    return None if tuple(found) == tuple(shape) else f"{where}shape {list(found)}; expected {list(shape)}"


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(repr(other) for other in near)}?)" if near else ""


def _names(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "nothing"
