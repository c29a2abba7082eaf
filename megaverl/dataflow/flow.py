"""DataFlow: operators, ordered by what they need, checked before they run."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megaverl.dataflow.operator import Operator
from megaverl.errors import ConfigError


class DataFlow:
    """Operators joined by the names of what they take and give.

    Add operators in any order, `compile`, then `run` as often as wanted.
    """

    def __init__(self, operators: Iterable[Operator] = ()) -> None:
        self._operators: list[Operator] = []
        self._order: list[Operator] | None = None
        self._given: frozenset[str] = frozenset()
        for operator in operators:
            self.add_operator(operator)

    def add_operator(self, operator: Operator) -> DataFlow:
        """Add one; returns the flow. Its name must be new."""
        if any(other.name == operator.name for other in self._operators):
            raise ConfigError(f"two operators are named '{operator.name}'; give one of them another name")
        self._operators.append(operator)
        self._order = None
        return self

    @property
    def order(self) -> list[str]:
        """Names of the operators in the order in which they run."""
        if self._order is None:
            raise ConfigError("the flow is not compiled: call compile() first")
        return [operator.name for operator in self._order]

    def compile(self, given: Iterable[str] = ()) -> DataFlow:
        """Order the operators, each after those that make its inputs; ties keep the order of adding.

        Args:
            given: names that `run` will be given from outside.

        Raises:
            ConfigError: lists every unknown input, every value made twice, and any cycle.
        """
        self._given = frozenset(given)
        maker: dict[str, Operator] = {}
        mistakes = []
        for operator in self._operators:
            for name in operator.gives:
                if name in maker or name in self._given:
                    first = f"operator '{maker[name].name}'" if name in maker else "what the flow is given"
                    mistakes.append(f"'{name}' is made by operator '{operator.name}' and by {first}")
                maker.setdefault(name, operator)
        known = sorted({*maker, *self._given})
        for operator in self._operators:
            for name in operator.takes:
                if name not in maker and name not in self._given:
                    near = difflib.get_close_matches(name, known, n=1)
                    hint = f"; did you mean '{near[0]}'?" if near else f"; there are: {', '.join(known) or 'none'}"
                    mistakes.append(f"operator '{operator.name}' takes '{name}', which nothing makes{hint}")
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        self._order = self._sorted(maker)
        return self

    def _sorted(self, maker: dict[str, Operator]) -> list[Operator]:
        order: list[Operator] = []
        available = set(self._given)
        waiting = list(self._operators)
        while waiting:
            ready = next((op for op in waiting if available.issuperset(op.takes)), None)
            if ready is None:
                cycle = ", ".join(f"'{op.name}' waits for {sorted(set(op.takes) - available)}" for op in waiting)
                raise ConfigError(f"the operators wait for each other: {cycle}")
            order.append(ready)
            available.update(ready.gives)
            waiting.remove(ready)
        return order

    def run(
        self,
        span: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
        done: Mapping[str, Any] | None = None,
        after: Callable[[str, Mapping[str, Any]], None] = lambda name, values: None,
        **given: Any,
    ) -> dict[str, Any]:
        """Run every operator; returns all values by name.

        Args:
            span: opened around every operator with its name, for a timeline.
            done: values that were made before, in a run that was cut off; what makes nothing else is left out.
            after: called after every operator that ran, with its name and all values so far.
            given: the values named in `compile`.
        """
        self.order  # noqa: B018 - says so if the flow is not compiled
        if set(given) != self._given:
            raise ConfigError(f"the flow was compiled for {sorted(self._given)}, and is given {sorted(given)}")
        done = done or {}
        values = {**given, **done}
        for operator in self._order or []:
            if operator.gives and all(name in done for name in operator.gives):
                continue
            with span(operator.name):
                values.update(operator(values))
            after(operator.name, values)
        return values
