"""A training step as operators with named inputs and outputs, ordered by what they need, checked before they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from megaverl.dataflow.plan import GIVEN, CompiledFlow, Edge, Operator, Places, make_plan
from megaverl.errors import ConfigError

__all__ = [
    "DataFlow",
    "Operator",
]


class CarriesValues(Protocol):
    """What carries values between ranks: `megaverl.dataflow.carrier.Carrier`."""

    @property
    def rank(self) -> int:
        """This rank, in the job."""

    def send(self, edge: Edge, values: Mapping[str, Any]) -> None:
        """On a rank of `edge.source`; returns before it is there."""

    def receive(self, edge: Edge, values: Mapping[str, Any]) -> Any:
        """On a rank of `edge.dest`."""


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


class DataFlow:
    """Operators joined by the names of what they take and give.

    Add operators in any order, `compile`, then `run` as often as wanted.
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
        """The compiled flow: order, ranks, stages, edges."""
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
        after: Callable[[str, Mapping[str, Any]], None] = lambda name, values: None,
        *,
        carrier: CarriesValues | None = None,
        leave_out: Container[str] = (),
        before_wait: Callable[[Edge], None] = lambda edge: None,
        **given: Any,
    ) -> Result:
        """Run every operator of this rank; returns all values by name.

        Args:
            span: opened around every operator with its name, for a timeline; and with "wait" around what comes late.
            done: values that were made before, in a run that was cut off, on all ranks of their makers; what makes
                nothing else is left out, and sends them.
            after: called after every operator that ran, with its name and all values so far.
            carrier: carries values between ranks. None: where the flow was compiled for places, those of torchrun's job
                meet for it; in a program of one process that process runs all operators.
            leave_out: operators that are not run now.
            before_wait: called before a value is waited for that comes from other ranks.
            given: the values named in `compile`.
        """
        plan = self.plan
        if set(given) != self._given:
            raise ConfigError(f"the flow was compiled for {sorted(self._given)}, and is given {sorted(given)}")
        edges = [edge for edge in plan.edges if not all(name in leave_out for name in edge.takers)]
        own = None
        if carrier is None and self._places is not None:
            from megaverl.dataflow.carrier import carrier_for  # torch, which a flow of one process may not need

            carrier = own = carrier_for(self._places)
        result = _Run(plan, edges, given, dict(done or {}), carrier).run(span, after, leave_out, before_wait)
        if own is not None:
            own.settle()
        return result


class _Run:
    """One run on one rank.

    `_have` says by whom each value here was made; what was done before is as its last maker gave it.
    """

    def __init__(
        self,
        plan: CompiledFlow,
        edges: Sequence[Edge],
        given: Mapping[str, Any],
        done: Mapping[str, Any],
        carrier: CarriesValues | None,
    ) -> None:
        self.plan, self.edges, self.carrier, self.done = plan, edges, carrier, done
        self.values: dict[str, Any] = {**given, **done}
        self._have = dict.fromkeys(given, GIVEN)
        self._sizes: dict[str, tuple[int, str]] = {}
        self._received: set[Edge] = set()

    def run(
        self,
        span: Callable[[str], AbstractContextManager[Any]],
        after: Callable[[str, Mapping[str, Any]], None],
        leave_out: Container[str],
        before_wait: Callable[[Edge], None],
    ) -> Result:
        timeline = []
        for operator in self.plan.operators:
            ranks = self.plan.ranks[operator.name]
            is_mine = ranks is None or self.carrier is None or self.carrier.rank in ranks
            if operator.name in leave_out or not is_mine:
                continue
            if operator.gives and all(name in self.done for name in operator.gives):
                self._send(operator.name)
                continue
            late = self._missing(operator)
            for edge in late:
                before_wait(edge)
                with span("wait"):
                    self._receive(edge)
            start = time.perf_counter()
            with span(operator.name):
                self._check_shapes(operator, operator.takes)
                self.values.update(operator(self.values))
                self._check_shapes(operator, operator.gives)
            timeline.append(Span(operator.name, start, time.perf_counter()))
            self._have.update(dict.fromkeys(operator.gives, operator.name))
            self._send(operator.name)
            after(operator.name, self.values)
        return Result(self.values, timeline)

    def _missing(self, operator: Operator) -> list[Edge]:
        """Edges that bring what it takes, and before them those from the same ranks that were sent before."""
        if self.carrier is None:
            return []
        mine = [edge for edge in self.edges if self.carrier.rank in edge.dest and edge.value not in self.done]
        needed = []
        for value, maker in self.plan.makers[operator.name].items():
            if value not in self.done and self._have.get(value) != maker:
                needed += [edge for edge in mine if (edge.value, edge.maker) == (value, maker)]
        bases = {base for edge in needed for base in edge.bases}
        needed += [edge for edge in mine if edge.value in bases and edge.value not in self.values]
        last = max((mine.index(edge) for edge in needed), default=-1)
        sources = {edge.source for edge in needed}
        early = [edge for edge in mine[: last + 1] if edge in needed or edge.source in sources]
        return [edge for edge in early if edge not in self._received]

    def _receive(self, edge: Edge) -> None:
        assert self.carrier is not None
        self._received.add(edge)
        self.values[edge.value] = self.carrier.receive(edge, self.values)
        self._have[edge.value] = edge.maker

    def _send(self, name: str) -> None:
        if self.carrier is not None:
            for edge in self.edges:
                if edge.maker == name and self.carrier.rank in edge.source:
                    self.carrier.send(edge, self.values)

    def _check_shapes(self, operator: Operator, names: Iterable[str]) -> None:
        """A declared name is one size in the whole run."""
        for name in names:
            shape, declared = getattr(self.values.get(name), "shape", None), operator.shapes.get(name)
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
