"""Registries of algorithms by name. A decorator registers a function, and its signature declares what it needs."""

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
# (result of a function, its inputs) -> what was found and what is expected, or None if
# the result is valid.
Problem = Callable[[Any, Mapping[str, Any]], str | None]


@dataclass(frozen=True)
class Entry(Generic[T]):
    """Registered function, with the needs that its signature declares.

    Positional parameters are inputs, taken from a batch by name; those with a default
    may be absent. Keyword-only parameters are options, set from the configuration. So a
    caller can see before a run that GAE reads `values` and hence needs a critic,
    without knowing anything else about GAE.

    Attributes:
        kind: kind of function, for messages.
        name: registered name, or `module:function`.
        function: the function.
        inputs: inputs without a default.
        optional_inputs: inputs with a default.
        options: option -> default; inspect.Parameter.empty if there is none.
        problem: checks the result of a user's function.
        of_groups: the function can compute on some groups of a batch by itself, given `all_reduce` for sums over all.
    """

    kind: str
    name: str
    function: Callable[..., T]
    inputs: tuple[str, ...]
    optional_inputs: tuple[str, ...]
    # Option name -> default; inspect.Parameter.empty if the option has none.
    options: Mapping[str, Any]
    problem: Problem | None = None
    of_groups: bool = False

    def __call__(self, inputs: Mapping[str, Any], **options: Any) -> T:
        """Call the function with the inputs that it declares, selected from a larger mapping.

        Raises:
            DataError: a required input is absent.
            ConfigError: an option is unknown or missing, or a user's function raises or returns an invalid result.
        """
        missing = [name for name in self.inputs if inputs.get(name) is None]
        if missing:
            available = sorted(
                name for name, value in inputs.items() if value is not None
            )
            raise DataError(
                f"{self.kind} '{self.name}' needs {_names(missing)}, and was given only {_names(available)}"
            )
        self.check_options(options)
        wanted = {name: inputs[name] for name in self.inputs}
        wanted |= {
            name: inputs[name]
            for name in self.optional_inputs
            if inputs.get(name) is not None
        }
        if ":" not in self.name:
            return self.function(**wanted, **options)
        with user_code(self._failed, keep=MegaverlError):
            result = self.function(**wanted, **options)
            problem = self.problem(result, inputs) if self.problem is not None else None
        if problem:
            raise ConfigError(f"{self.kind} '{self.name}' returned {problem}")
        return result

    def _failed(self, error: BaseException) -> ConfigError:
        """Return the error for an exception of a user's function, with the line in its file."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        where = where_raised(error, code.co_filename) if code else ""
        return ConfigError(f"{self.kind} '{self.name}' raised {describe(error)}{where}")

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check the names of options.

        Raises:
            ConfigError: lists every unknown and every missing option.
        """
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
    """Functions of one kind by name.

    Args:
        kind: kind of function, for messages ("policy loss").
        problem: checks the results of users' functions.

    Example:
            losses: Registry[LossOutput] = Registry("policy loss")
            @losses.register("mine")
            def mine(log_probs, weights, *, strength=1.0): ...
            losses.get("mine")(batch, strength=2.0)
    """

    def __init__(self, kind: str, problem: Problem | None = None) -> None:
        self.kind = kind
        self.problem = problem
        self._entries: dict[str, Entry[T]] = {}

    def register(
        self, name: str, *, of_groups: bool = False
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Return a decorator that registers a function under `name` and returns it unchanged.

        Args:
            of_groups: see `Entry`.

        Raises:
            ConfigError: the name is already registered.
        """

        def file_it(function: Callable[P, T]) -> Callable[P, T]:
            if name in self._entries:
                raise ConfigError(
                    f"{self.kind} '{name}' is registered twice; give the second another name"
                )
            self._entries[name] = _entry(
                self.kind, name, function, self.problem, of_groups
            )
            return function

        return file_it

    def get(self, name: str) -> Entry[T]:
        """Return the entry called `name`. A name with a colon, `module:function`, is imported.

        Raises:
            ConfigError: the name is unknown (lists the closest ones), or the import fails.
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
        """Return all registered names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


def _entry(
    kind: str,
    name: str,
    function: Callable[..., T],
    problem: Problem | None,
    of_groups: bool = False,
) -> Entry[T]:
    """Return the entry for a function, read from its signature.

    Raises:
        ConfigError: a parameter has no name of its own, such as `**options`.
    """
    inputs = []
    optional_inputs = []
    options = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            raise ConfigError(
                f"{kind} '{name}' must name every parameter: inputs first, options after a '*'; found '{parameter}'"
            )
        if parameter.kind is parameter.KEYWORD_ONLY:
            options[parameter.name] = parameter.default
        elif parameter.default is parameter.empty:
            inputs.append(parameter.name)
        else:
            optional_inputs.append(parameter.name)
    return Entry(
        kind,
        name,
        function,
        tuple(inputs),
        tuple(optional_inputs),
        options,
        problem,
        of_groups,
    )


def tensor_problem(value: Any, shape: Sequence[int], where: str = "") -> str | None:
    """Return what is wrong with a value that should be a tensor of this shape, or None.

    Args:
        where: place of the value in a result, for the message, such as "as loss ".
    """
    actual = getattr(value, "shape", None)
    if actual is None:
        return (
            f"{where}{type(value).__name__}; expected a tensor of shape {list(shape)}"
        )
    return (
        None
        if tuple(actual) == tuple(shape)
        else f"{where}shape {list(actual)}; expected {list(shape)}"
    )


def _hint(name: str, known: list[str]) -> str:
    """Return a suggestion of similar names, or ""."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return (
        f" (did you mean {' or '.join(repr(similar) for similar in near)}?)"
        if near
        else ""
    )


def _names(names: list[str]) -> str:
    """Return quoted names joined by commas."""
    return ", ".join(f"'{name}'" for name in names) or "nothing"
