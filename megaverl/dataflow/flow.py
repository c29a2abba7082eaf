"""Flows of operators with named inputs and outputs. A flow is ordered and checked before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megaverl.dataflow.plan import CompiledFlow, Operator, Places, make_plan
from megaverl.dataflow.runner import OperatorRunner, Result
from megaverl.errors import ConfigError


class DataFlow:
    """Set of operators that are connected by the names of their inputs and outputs.

    Operators can be added in any order. A compiled flow can run any number of times.
    All ranks of a job run their flows in the same order, from their main threads.

    Example:
        flow = DataFlow([Operator("double", lambda x: 2 * x), Operator("total", lambda x, double: x + double)])
        flow.compile(given=("x",))
        flow.run(x=3)["total"]  # 9
    """

    def __init__(self, operators: Iterable[Operator] = ()) -> None:
        self._operators: list[Operator] = []
        self._after: list[tuple[str, str]] = []
        self._plan: CompiledFlow | None = None
        self._given: frozenset[str] = frozenset()
        self._places: Places | None = None
        for operator in operators:
            self.add_operator(operator)

    def add_operator(
        self,
        operator: Operator,
        *,
        before: str | Iterable[str] = (),
        after: str | Iterable[str] = (),
    ) -> DataFlow:
        """Add an operator with a new name. Return the flow.

        An operator whose inputs and outputs share a value replaces that value for all
        operators after it.

        Args:
            before, after: names of operators before or after which it must run, beyond the order that values imply.

        Raises:
            ConfigError: the name is already used, or an operator in `before` or `after` does not exist.
        """
        if not isinstance(operator, Operator):
            raise ConfigError(
                f"found {operator!r}; expected an Operator(name=..., func=...)"
            )
        names = [earlier_operator.name for earlier_operator in self._operators]
        if operator.name in names:
            raise ConfigError(
                f"two operators are named '{operator.name}'; give one of them another name"
            )
        later, earlier = (
            [names] if isinstance(names, str) else list(names)
            for names in (before, after)
        )
        if unknown := [name for name in (*later, *earlier) if name not in names]:
            raise ConfigError(
                f"no operator '{unknown[0]}' to put '{operator.name}' beside: {', '.join(names)}"
            )
        self._operators.append(operator)
        self._after += [(operator.name, name) for name in later] + [
            (name, operator.name) for name in earlier
        ]
        # The flow must be compiled again.
        self._plan = None
        return self

    @property
    def plan(self) -> CompiledFlow:
        """Return the compiled flow: order, ranks, stages and transfers.

        Raises:
            ConfigError: the flow has not been compiled.
        """
        if self._plan is None:
            raise ConfigError("the flow is not compiled: call compile() first")
        return self._plan

    @property
    def order(self) -> list[str]:
        """Return the names of the operators in execution order."""
        return [operator.name for operator in self.plan.operators]

    def compile(
        self, given: Iterable[str] = (), *, places: Places | None = None
    ) -> DataFlow:
        """Order the operators so that each runs after its inputs are made. Ties keep the order of adding.

        Args:
            given: names of values that every rank passes to `run`.
            places: ranks of each role. None: every operator runs on every rank, and nothing is transferred.

        Raises:
            ConfigError: lists every unknown input, value with two makers, shape conflict and role without a place, or
                names a cycle.
        """
        self._given, self._places = frozenset(given), places
        self._plan = make_plan(
            self._operators, self._given, after=self._after, places=places
        )
        return self

    def run(
        self,
        span: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
        done: Mapping[str, Any] | None = None,
        **inputs: Any,
    ) -> Result:
        """Run every operator of this rank. Return all values on this rank, by name.

        If the flow was compiled with places, all ranks of the job must call this. The
        coordinator's rank runs the flow as a program (`on_ranks.run_flow`), and values
        are transferred to the ranks that need them. A single process runs all operators
        itself.

        Args:
            span: opens a named context around every operator, for a timeline, and "wait" around waits for values.
            done: values from an interrupted run, on all ranks of their makers. An operator is skipped if all of its
                outputs are among them.
            inputs: the values named in `compile`.

        Raises:
            ConfigError: values are missing, or an operator's outputs differ from its declaration.
            TrainingStopped: another rank failed or was lost. The message names it.
        """
        plan = self.plan
        if set(inputs) != self._given:
            raise ConfigError(
                f"the flow was compiled for {sorted(self._given)}, and is given {sorted(inputs)}"
            )
        runner = OperatorRunner(plan, inputs, done or {}, span)
        if self._places is not None:
            # Imports torch, which a flow in a single process may not need.
            from megaverl.dataflow.on_ranks import run_on_ranks

            if run_on_ranks(self._places, runner, span):
                return runner.result
        for operator in plan.operators:
            runner.run(operator)
        return runner.result
