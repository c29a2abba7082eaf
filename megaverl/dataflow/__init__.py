"""A training step as operators with named inputs and outputs, ordered by what they need, checked before they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from megaverl.dataflow.plan import CompiledFlow, Edge, Operator, Places, make_plan
from megaverl.errors import ConfigError

__all__ = [
    "DataFlow",
    "Operator",
    "in_one_order",
    "receipts",
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

    Add operators in any order, `compile`, then `run` as often as wanted. Ranks of a job that meet in several flows run
    these in the same order, each from one thread: what lies on devices has no name on its way (`in_one_order`).
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

            carrier = own = carrier_for(self._places, in_one_order(plan, edges, leave_out))
        result = _Run(plan, edges, given, dict(done or {}), carrier).run(span, after, leave_out, before_wait)
        if own is not None:
            own.settle()
        return result


class _Run:
    """One run on one rank."""

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
        self._shapes = ShapeChecker()

    def run(
        self,
        span: Callable[[str], AbstractContextManager[Any]],
        after: Callable[[str, Mapping[str, Any]], None],
        leave_out: Container[str],
        before_wait: Callable[[Edge], None],
    ) -> Result:
        timeline = []
        takes = {} if self.carrier is None else receipts(self.plan, self.carrier.rank, leave_out)
        for operator in self.plan.operators:
            ranks = self.plan.ranks[operator.name]
            is_mine = ranks is None or self.carrier is None or self.carrier.rank in ranks
            if operator.name in leave_out or not is_mine:
                continue
            for edge in takes.get(operator.name, ()):
                if edge.value not in self.done:  # which is as its last maker gave it
                    before_wait(edge)
                    with span("wait"):
                        self._receive(edge)
            if operator.gives and all(name in self.done for name in operator.gives):
                self._send(operator.name)
                continue
            start = time.perf_counter()
            with span(operator.name):
                self.values.update(self._shapes.call(operator, self.values))
            timeline.append(Span(operator.name, start, time.perf_counter()))
            self._send(operator.name)
            after(operator.name, self.values)
        return Result(self.values, timeline)

    def _receive(self, edge: Edge) -> None:
        assert self.carrier is not None
        self.values[edge.value] = self.carrier.receive(edge, self.values)

    def _send(self, name: str) -> None:
        if self.carrier is not None:
            for edge in self.edges:
                if edge.maker == name and self.carrier.rank in edge.source:
                    self.carrier.send(edge, self.values)


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


def receipts(plan: CompiledFlow, rank: int, leave_out: Container[str] = ()) -> dict[str, list[Edge]]:
    """By each operator of a rank, what comes to it before: edges that bring what the operator takes, and their bases;
    and before them those from the same ranks that were sent before."""
    mine = [edge for edge in moving(plan, leave_out) if rank in edge.dest]
    have: dict[str, str] = {}  # by whom each value here was made
    found: dict[str, list[Edge]] = {}
    for operator in plan.operators:
        ranks = plan.ranks[operator.name]
        if operator.name in leave_out or not (ranks is None or rank in ranks):
            continue
        makers = plan.makers[operator.name]
        needed = [edge for edge in mine if makers.get(edge.value) == edge.maker and have.get(edge.value) != edge.maker]
        last = max((mine.index(edge) for edge in needed), default=-1)
        bases = {base for edge in needed for base in edge.bases}
        needed += [edge for edge in mine[: last + 1] if edge.value in bases and edge.value not in have]
        sources = {edge.source for edge in needed}
        early = [edge for edge in mine[: last + 1] if edge in needed or edge.source in sources]
        before = {edge for edges in found.values() for edge in edges}
        found[operator.name] = [edge for edge in early if edge not in before]
        have |= {edge.value: edge.maker for edge in found[operator.name]} | dict.fromkeys(operator.gives, operator.name)
    return found


def moving(plan: CompiledFlow, leave_out: Container[str] = ()) -> list[Edge]:
    """The edges of a run that leaves out some operators."""
    return [edge for edge in plan.edges if not all(name in leave_out for name in edge.takers)]


def in_one_order(plan: CompiledFlow, edges: Iterable[Edge], leave_out: Container[str] = ()) -> frozenset[Edge]:
    """Those of a flow's edges that all ranks can go through in one order, though each edge holds all of its ranks until
    all are at it: so a message needs no name, and may wait for those before it.

    A run is played, in which whoever gives or takes one of them, and all ranks of an operator, go on together; from any
    other edge who takes it waits for who gives it. Where nobody can go on, the first edge that holds one who gives it
    is none of them (there is one: without any, operators run as they are ordered, and wait for earlier ones alone). The
    order in which the rest is played is that of all ranks, and a program that makes the same runs one after the other
    on each rank goes through them in one order too. Every rank comes to the same result, by itself.
    """
    some = {rank for ranks in plan.ranks.values() for rank in ranks or ()}
    sets = {name: some if ranks is None else {*ranks} for name, ranks in plan.ranks.items()}
    # Ranks that run the same operators have the same edges: one of them stands for all.
    ranks = {frozenset(name for name, on in sets.items() if rank in on): rank for rank in some}.values()
    events = {rank: _events(plan, rank, leave_out) for rank in ranks}
    kept, at = {*edges} & {*moving(plan, leave_out)}, dict.fromkeys(ranks, 0)
    while now := {rank: mine[at[rank]] for rank, mine in events.items() if at[rank] < len(mine)}:
        for rank, (kind, what) in now.items():
            together = {rank: (kind, what)}
            if kind == "run":
                together = {one: (kind, what) for one in ranks if one in sets[what]}
            elif what in kept:
                together = {one: ("give", what) for one in ranks if one in what.source}
                together |= {one: ("take", what) for one in ranks if one in what.dest}
            elif kind == "take" and any(
                ("give", what) in events[one][at[one] :] for one in ranks if one in what.source
            ):
                continue
            if all(now.get(one) == event for one, event in together.items()):
                at |= {one: at[one] + 1 for one in together}
                break
        else:
            kept.remove(min((what for kind, what in now.values() if kind == "give"), key=plan.edges.index))
    return frozenset(kept)


def _events(plan: CompiledFlow, rank: int, leave_out: Container[str]) -> list[tuple[str, Any]]:
    """What a rank does in a run: it takes edges, runs an operator, gives edges, and so on."""
    found: list[tuple[str, Any]] = []
    for name, taken in receipts(plan, rank, leave_out).items():
        given = [edge for edge in moving(plan, leave_out) if edge.maker == name and rank in edge.source]
        found += [("take", edge) for edge in taken] + [("run", name)] + [("give", edge) for edge in given]
    return found
