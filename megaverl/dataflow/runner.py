"""Runs the operators of a flow on one rank, and keeps their values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from megaverl.dataflow.plan import CompiledFlow, Operator
from megaverl.errors import ConfigError


class Span(NamedTuple):
    """When an operator ran on this rank: seconds of `time.perf_counter`."""

    operator: str
    start: float
    end: float


class Result(dict[str, Any]):
    """All values of a run that this rank has, by name; and its `timeline`."""

    def __init__(self, values: Mapping[str, Any], timeline: list[Span]) -> None:
        super().__init__(values)
        self.timeline = timeline


class OperatorRunner:
    """Runs operators of one run of a flow on this rank, and keeps their values.

    Args:
        given: values from outside. done: values that were made before.
        span: opened around every operator with its name.

    Attributes:
        result: the values so far.
    """

    def __init__(
        self,
        plan: CompiledFlow,
        given: Mapping[str, Any],
        done: Mapping[str, Any],
        span: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        self.plan = plan
        self.given = dict(given)
        self.result = Result({**given, **done}, [])
        self._done, self._span = dict(done), span
        self._shapes = ShapeChecker()

    def run(self, operator: Operator) -> dict[str, Any]:
        """Run one operator on the values so far; return its outputs."""
        if operator.gives and all(name in self._done for name in operator.gives):
            return {name: self._done[name] for name in operator.gives}
        start = time.perf_counter()
        with self._span(operator.name):
            outputs = self._shapes.call(operator, self.result)
        self.result.update(outputs)
        self.result.timeline.append(Span(operator.name, start, time.perf_counter()))
        return outputs


class ShapeChecker:
    """Calls operators of one step, and checks the shapes that they declare: a name is one size in the whole step."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[int, str]] = {}

    def call(self, operator: Operator, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run an operator; return its outputs by name.

        Raises:
            ConfigError: a tensor has another shape than is declared.
        """
        self._check(operator, values, operator.takes)
        outputs = operator(values)
        self._check(operator, outputs, operator.gives)
        return outputs

    def _check(self, operator: Operator, values: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            shape, declared = getattr(values.get(name), "shape", None), operator.shapes.get(name)
            if shape is None or declared is None:
                continue
            wrong = len(shape) != len(declared)
            for size, expected in zip(shape, declared, strict=False):
                known = (expected, "") if isinstance(expected, int) else self._sizes.setdefault(expected, (size, name))
                wrong = wrong or size != known[0]
            if wrong:
                sizes = ", ".join(f"{key}={size} (of '{of}')" for key, (size, of) in self._sizes.items())
                raise ConfigError(
                    f"operator '{operator.name}': '{name}' has the shape {list(shape)}; declared is {list(declared)}"
                    + (f", with {sizes}" if sizes else "")
                )
