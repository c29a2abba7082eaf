"""One named piece of work with named inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megaverl.errors import ConfigError


@dataclass(frozen=True)
class Operator:
    """A function in a flow.

    Attributes:
        name: of the operator; its span in the timeline.
        func: called with its inputs by keyword; returns the output, or a mapping of all outputs if there are several.
        inputs: names of the values it takes; by default the names of the function's parameters.
        outputs: names of the values it gives; by default the operator's own name.
        role: on whose ranks it runs; None for every rank.
    """

    name: str
    func: Callable[..., Any]
    inputs: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    role: str | None = None

    @property
    def takes(self) -> tuple[str, ...]:
        if self.inputs is not None:
            return tuple(self.inputs)
        return tuple(inspect.signature(self.func).parameters)

    @property
    def gives(self) -> tuple[str, ...]:
        return (self.name,) if self.outputs is None else tuple(self.outputs)

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
