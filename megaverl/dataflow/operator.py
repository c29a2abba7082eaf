"""One named piece of work with named inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaverl.errors import ConfigError

# Sizes of a tensor's dimensions: a number, or a name that stands for the same number wherever it stands in a flow.
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Operator:
    """A function in a flow.

    Attributes:
        name: of the operator; its span in the timeline.
        func: called with its inputs by keyword; returns the output, or a mapping of all outputs if there are several.
        inputs: names of the values it takes; by default the names of the function's parameters that have no default.
        outputs: names of the values it gives; by default the operator's own name.
        role: on whose ranks it runs, or several roles' names; None: on those that make its last input, and on every
            rank where nothing is made for it.
        shapes: value -> shape, of tensors that it takes or gives; looked at by `compile` and again in every run.
    """

    name: str
    func: Callable[..., Any]
    inputs: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    role: str | tuple[str, ...] | None = None
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.func):
            raise ConfigError(f"operator '{self.name}': func is {self.func!r}; expected a function")
        for what, names in (("inputs", self.inputs), ("outputs", self.outputs)):
            if isinstance(names, str):
                raise ConfigError(f"operator '{self.name}': {what} is {names!r}; expected names, such as ({names!r},)")

    @property
    def takes(self) -> tuple[str, ...]:
        if self.inputs is not None:
            return tuple(self.inputs)
        try:
            parameters = inspect.signature(self.func).parameters.values()
        except ValueError as error:  # some functions written in C do not tell
            raise ConfigError(f"operator '{self.name}': name what it takes: inputs=(...)") from error
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return tuple(each.name for each in parameters if each.kind in named and each.default is each.empty)

    @property
    def gives(self) -> tuple[str, ...]:
        return (self.name,) if self.outputs is None else tuple(self.outputs)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that it names, none or more."""
        if self.role is None:
            return ()
        return (self.role,) if isinstance(self.role, str) else tuple(self.role)

    @property
    def changes(self) -> tuple[str, ...]:
        """Values that it takes and gives: made by another operator, and from here on as this one gives them."""
        return tuple(name for name in self.gives if name in self.takes)

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run on `values`; returns the outputs by name.

        Raises:
            ConfigError: the function did not give what the operator declares.
        """
        result = self.func(**{name: values[name] for name in self.takes})
        if len(self.gives) == 0:
            return {}
        if len(self.gives) == 1:
            return {self.gives[0]: result}
        if not isinstance(result, Mapping) or set(result) != set(self.gives):
            found = sorted(result) if isinstance(result, Mapping) else type(result).__name__
            raise ConfigError(f"operator '{self.name}' declares the outputs {list(self.gives)}; it returned {found}")
        return dict(result)
