"""Operators with named inputs and outputs, ordered by what they need, checked before they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megaverl.dataflow.plan import CompiledFlow, Operator, Places, make_plan
from megaverl.dataflow.runner import OperatorRunner, Result
from megaverl.errors import ConfigError


class DataFlow:
    """Operators joined by the names of what they take and give.

    Add operators in any order, `compile`, then `run` as often as wanted. Ranks of a job that meet in several flows run
    these in the same order, each from its main thread.
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
        self, operator: Operator, *, before: str | Iterable[str] = (), after: str | Iterable[str] = ()
    ) -> DataFlow:
        """Add one; returns the flow. Its name must be new.

        One that takes and gives the same value changes it for all operators that come after.

        Args:
            before, after: operators that it is to run before or after, beyond what follows from values.

        Raises:
            ConfigError: the name is taken, or one of these is not there.
        """
        if not isinstance(operator, Operator):
            raise ConfigError(f"found {operator!r}; expected an Operator(name=..., func=...)")
        names = [other.name for other in self._operators]
        if operator.name in names:
            raise ConfigError(f"two operators are named '{operator.name}'; give one of them another name")
        later, earlier = ([one] if isinstance(one, str) else list(one) for one in (before, after))
        if unknown := [name for name in (*later, *earlier) if name not in names]:
            raise ConfigError(
                f"there is no operator '{unknown[0]}' to put '{operator.name}' beside: {', '.join(names)}"
            )
        self._operators.append(operator)
        self._after += [(operator.name, name) for name in later] + [(name, operator.name) for name in earlier]
        self._plan = None
        return self

    @property
    def plan(self) -> CompiledFlow:
        """The compiled flow: order, ranks, stages, moves."""
        if self._plan is None:
            raise ConfigError("the flow is not compiled: call compile() first")
        return self._plan

    @property
    def order(self) -> list[str]:
        """Names of the operators in the order in which they run."""
        return [operator.name for operator in self.plan.operators]

    def compile(self, given: Iterable[str] = (), *, places: Places | None = None) -> DataFlow:
        """Order the operators, each after those that make its inputs; ties keep the order of adding.

        Args:
            given: names that `run` will be given from outside, on every rank.
            places: role -> its ranks; None: every operator runs on every rank, and nothing moves.

        Raises:
            ConfigError: lists every unknown input, every value made twice, shapes that differ, roles without a place,
                and any cycle.
        """
        self._given, self._places = frozenset(given), places
        self._plan = make_plan(self._operators, self._given, after=self._after, places=places)
        return self

    def run(
        self,
        span: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
        done: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> Result:
        """Run every operator of this rank; return all values that this rank has, by name.

        Where the flow was compiled for places, all ranks of the job call it: the coordinator's rank runs the flow as a
        program (`on_ranks.run_flow`), and values move to the ranks that take them. A process that is alone runs all
        operators by itself.

        Args:
            span: opened around every operator with its name, for a timeline; and with "wait" around what comes late.
            done: values that were made before, in a run that was cut off, on all ranks of their makers. An operator
                whose outputs are all there does not run.
            given: the values named in `compile`.

        Raises:
            ConfigError: values are missing, or an operator gives something else than it declares.
            TrainingStopped: another rank failed, or is gone; the message names it.
        """
        plan = self.plan
        if set(given) != self._given:
            raise ConfigError(f"the flow was compiled for {sorted(self._given)}, and is given {sorted(given)}")
        runner = OperatorRunner(plan, given, done or {}, span)
        if self._places is not None:
            from megaverl.dataflow.on_ranks import run_on_ranks  # torch, which a flow of one process may not need

            if run_on_ranks(plan, self._places, runner, span):
                return runner.result
        for operator in plan.operators:
            runner.run(operator)
        return runner.result
