"""Execution of a flow's operators on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from megaverl.dataflow.plan import CompiledFlow, Operator
from megaverl.errors import ConfigError


class Span(NamedTuple):
    """Time span of an operator on this rank, in seconds of `time.perf_counter`."""

    operator: str
    start: float
    end: float


class Result(dict[str, Any]):
    """Values of a run on this rank by name, with a `timeline` of its operators."""

    def __init__(self, values: Mapping[str, Any], timeline: list[Span]) -> None:
        super().__init__(values)
        self.timeline = timeline


class OperatorRunner:
    """Runner of a flow's operators on this rank, for one run. It stores all values.

    Args:
        inputs: values that the caller passed.
        done: values that were made before.
        span: opens a named context around every operator.

    Attributes:
        result: values so far.
    """

    def __init__(
        self,
        plan: CompiledFlow,
        inputs: Mapping[str, Any],
        done: Mapping[str, Any],
        span: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        self.plan = plan
        self.given = dict(inputs)
        self.result = Result({**inputs, **done}, [])
        self._done, self._span = dict(done), span
        # One checker per run: a dimension name must keep its size across operators.
        self._shapes = ShapeChecker()

    def run(self, operator: Operator) -> dict[str, Any]:
        """Run one operator on the stored values and store its outputs. Return the outputs.

        If `done` contains all outputs, they are returned without running the operator.
        """
        if operator.gives and all(name in self._done for name in operator.gives):
            return {name: self._done[name] for name in operator.gives}
        start = time.perf_counter()
        with self._span(operator.name):
            outputs = self._shapes.call(operator, self.result)
        self.result.update(outputs)
        self.result.timeline.append(Span(operator.name, start, time.perf_counter()))
        return outputs


class ShapeChecker:
    """Caller of operators that checks declared shapes. A dimension name must have the same size throughout a step."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[int, str]] = {}

    def call(self, operator: Operator, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run an operator. Return its outputs by name.

        Raises:
            ConfigError: a tensor's shape differs from its declaration.
        """
        self._check(operator, values, operator.takes)
        outputs = operator(values)
        self._check(operator, outputs, operator.gives)
        return outputs

    def _check(
        self, operator: Operator, values: Mapping[str, Any], names: Iterable[str]
    ) -> None:
        for name in names:
            shape, declared = (
                getattr(values.get(name), "shape", None),
                operator.shapes.get(name),
            )
            if shape is None or declared is None:
                continue
            wrong = len(shape) != len(declared)
            for size, expected in zip(shape, declared, strict=False):
                # The first tensor with a dimension name defines its size for the rest
                # of the step.
                known = (
                    (expected, "")
                    if isinstance(expected, int)
                    else self._sizes.setdefault(expected, (size, name))
                )
                wrong = wrong or size != known[0]
            if wrong:
                sizes = ", ".join(
                    f"{key}={size} (of '{of}')"
                    for key, (size, of) in self._sizes.items()
                )
                raise ConfigError(
                    f"operator '{operator.name}': '{name}' has the shape {list(shape)}; declared is {list(declared)}"
                    + (f", with {sizes}" if sizes else "")
                )
