"""Operators, and the plan of a flow: execution order, parallel stages and transfers.

The plan depends only on the declarations of the operators. This module runs and
transfers nothing.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megaverl.distributed.placement import ranks_text
from megaverl.errors import ConfigError, MegaverlError
from megaverl.user_code import describe, user_code, where_raised

# Maps a role to its ranks in the job.
Places = Mapping[str, Sequence[int]]
GIVEN = ""  # stands for the maker of values that the caller passes
# Sizes of a tensor's dimensions: numbers, or names. A name has the same size wherever a
# flow uses it.
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Operator:
    """Function in a flow, with named inputs and outputs.

    Attributes:
        name: name of the operator, and of its span in the timeline.
        func: function that is called with its inputs as keywords. It returns the output, or a mapping of all outputs if
            there are several.
        inputs: names of its input values. Default: the function's parameters without default values.
        outputs: names of its output values. Default: the operator's name.
        role: role, or several roles, on whose ranks it runs. None: the ranks that make its last input, or every rank if
            no operator makes any input.
        shapes: shapes of input and output tensors by value. `compile` and every run check them.

    Example:
        Operator("scores", score, inputs=("rollouts",), role="reward", shapes={"scores": ("batch",)})
    """

    name: str
    func: Callable[..., Any]
    inputs: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    role: str | tuple[str, ...] | None = None
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.func):
            raise ConfigError(
                f"operator '{self.name}': func is {self.func!r}; expected a function"
            )
        for attribute, names in (("inputs", self.inputs), ("outputs", self.outputs)):
            if isinstance(names, str):
                raise ConfigError(
                    f"operator '{self.name}': {attribute} is {names!r}; expected names, such as ({names!r},)"
                )

    @property
    def takes(self) -> tuple[str, ...]:
        """Return the names of the input values.

        Raises:
            ConfigError: the function has no signature, and `inputs` is not given.
        """
        if self.inputs is not None:
            return tuple(self.inputs)
        try:
            parameters = inspect.signature(self.func).parameters.values()
        except ValueError as error:  # some functions written in C have no signature
            raise ConfigError(
                f"operator '{self.name}': name what it takes: inputs=(...)"
            ) from error
        named = (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        )
        return tuple(
            parameter.name
            for parameter in parameters
            if parameter.kind in named and parameter.default is parameter.empty
        )

    @property
    def gives(self) -> tuple[str, ...]:
        """Return the names of the output values."""
        return (self.name,) if self.outputs is None else tuple(self.outputs)

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles of the operator, which may be none."""
        if self.role is None:
            return ()
        return (self.role,) if isinstance(self.role, str) else tuple(self.role)

    @property
    def changes(self) -> tuple[str, ...]:
        """Return the values that are both inputs and outputs. Later operators see the new value."""
        return tuple(name for name in self.gives if name in self.takes)

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run the function on `values`. Return its outputs by name.

        Raises:
            ConfigError: the function's result does not match the declared outputs.
            MegaverlError: the function raised SystemExit, or another exception that is not an `Exception`.
        """

        def ended(error: BaseException) -> MegaverlError:
            return MegaverlError(
                f"operator '{self.name}' raised {describe(error)}{where_raised(error)}."
            )

        with user_code(ended, keep=Exception):
            result = self.func(**{name: values[name] for name in self.takes})
        if len(self.gives) == 0:
            return {}
        if len(self.gives) == 1:
            return {self.gives[0]: result}
        if not isinstance(result, Mapping) or set(result) != set(self.gives):
            returned = (
                sorted(result) if isinstance(result, Mapping) else type(result).__name__
            )
            raise ConfigError(
                f"operator '{self.name}' declares the outputs {list(self.gives)}; it returned {returned}"
            )
        return dict(result)


class ValueTransfer(NamedTuple):
    """Value that must be transferred.

    Attributes:
        maker: operator that outputs the value.
        takers: operators that need the value on the ranks `dest`.
        source, dest: ranks that have the value, and ranks that need it. They are disjoint.
    """

    value: str
    maker: str
    takers: tuple[str, ...]
    source: tuple[int, ...]
    dest: tuple[int, ...]


@dataclass(frozen=True)
class CompiledFlow:
    """Compiled flow.

    Attributes:
        operators: operators in the order in which a rank runs those of its roles.
        makers: by operator and input value, the operator whose output it takes.
        ranks: ranks of each operator, or None for every rank.
        transfers: transfers, in the order of their makers.
        stages: groups of operators that do not depend on each other, in order.
    """

    operators: tuple[Operator, ...]
    makers: Mapping[str, Mapping[str, str]]
    ranks: Mapping[str, tuple[int, ...] | None]
    transfers: tuple[ValueTransfer, ...]
    stages: tuple[tuple[str, ...], ...]


def make_plan(
    operators: Sequence[Operator],
    inputs: Iterable[str] = (),
    *,
    after: Iterable[tuple[str, str]] = (),
    places: Places | None = None,
) -> CompiledFlow:
    """Order the operators so that each runs after its inputs are made. Ties keep the order of adding.

    Args:
        inputs: names of values that the caller passes.
        after: pairs of (earlier, later) operators, beyond the order that values imply.
        places: ranks of each role. None: everything is on every rank.

    Raises:
        ConfigError: lists every unknown input, value with two makers, shape conflict and role without a place, or names
            a cycle.
    """
    inputs = frozenset(inputs)
    # All mistakes are collected before one error is raised, so that a user fixes them
    # in one go.
    chains, mistakes = _chains(operators, inputs)
    mistakes += (
        _unknown(operators, chains)
        + _shape_mistakes(operators)
        + _without_place(operators, places)
    )
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    makers = {
        op.name: {value: _maker_for(op, chains[value], operators) for value in op.takes}
        for op in operators
    }
    before = {
        op.name: {maker for maker in makers[op.name].values() if maker != GIVEN}
        for op in operators
    }
    for earlier, later in after:
        before[later].add(earlier)
    order = _sorted(operators, before, makers)
    ranks = _ranks(order, makers, places)
    level: dict[str, int] = {}
    # An operator's stage follows the latest stage of its predecessors.
    for op in order:
        level[op.name] = 1 + max((level[name] for name in before[op.name]), default=-1)
    stages = [
        tuple(op.name for op in order if level[op.name] == n)
        for n in range(max(level.values(), default=-1) + 1)
    ]
    return CompiledFlow(
        tuple(order),
        makers,
        ranks,
        tuple(_transfers(order, makers, ranks)),
        tuple(stages),
    )


def _chains(
    operators: Sequence[Operator], inputs: frozenset[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the maker of each value, followed by the operators that change it. Also report values with two makers."""
    chains: dict[str, list[str]] = {name: [GIVEN] for name in inputs}
    mistakes = []
    for op in operators:
        # An operator that changes a value is not its maker.
        for value in [value for value in op.gives if value not in op.changes]:
            if value in chains:
                first = (
                    f"operator '{chains[value][0]}'"
                    if chains[value][0]
                    else "what the flow is given"
                )
                mistakes.append(
                    f"'{value}' is made by operator '{op.name}' and by {first}"
                )
            chains.setdefault(value, [op.name])
    # Operators that change a value follow its maker, in the order of adding.
    for op in operators:
        # A second pass, because the maker may be added after the operator that changes
        # its value.
        for value in chains.keys() & set(op.changes):
            chains[value].append(op.name)
    return chains, mistakes


def _unknown(
    operators: Sequence[Operator], chains: Mapping[str, list[str]]
) -> list[str]:
    known, mistakes = sorted(chains), []
    for op in operators:
        for name in op.takes:
            if name not in chains:
                near = difflib.get_close_matches(name, known, n=1)
                hint = (
                    f"; did you mean '{near[0]}'?"
                    if near
                    else f"; there are: {', '.join(known) or 'none'}"
                )
                mistakes.append(
                    f"operator '{op.name}' takes '{name}', which nothing makes{hint}"
                )
    return mistakes


def _shape_mistakes(operators: Sequence[Operator]) -> list[str]:
    """Return a message for each value that two operators declare with different shapes."""
    first: dict[str, tuple[str, Shape]] = {}
    mistakes = []
    for op in operators:
        for value, shape in op.shapes.items():
            if value not in (*op.takes, *op.gives):
                mistakes.append(
                    f"operator '{op.name}' declares the shape of '{value}', which it neither takes nor gives"
                )
                continue
            name, first_shape = first.setdefault(value, (op.name, tuple(shape)))
            if tuple(shape) != first_shape:
                mistakes.append(
                    f"'{value}' has the shape {list(first_shape)} for operator '{name}', and {list(shape)} for "
                    f"'{op.name}'"
                )
    return mistakes


def _without_place(operators: Sequence[Operator], places: Places | None) -> list[str]:
    if places is None:
        return []
    unread = [
        f"places: '{role}' is on {ranks!r}; expected its ranks, such as [0, 1]"
        for role, ranks in places.items()
        if not ranks or not all(isinstance(rank, int) and rank >= 0 for rank in ranks)
    ]
    return unread + [
        f"operator '{op.name}' runs on the role '{role}', which has no place; there are: {', '.join(places)}"
        for op in operators
        for role in op.roles
        if role not in places
    ]


def _maker_for(
    taker: Operator, chain: Sequence[str], operators: Sequence[Operator]
) -> str:
    """Return the last operator that makes or changes a value and does not itself depend on `taker`."""
    # An operator that changes a value takes it from its predecessor in the chain.
    if taker.name in chain:
        return chain[chain.index(taker.name) - 1]
    needs = {op.name: op for op in operators}
    # Others want the value with all changes. An operator whose output a change needs
    # must take an earlier version, or the two would wait for each other.
    for name in reversed(chain[1:]):
        if not _rests_on(needs[name], taker, operators):
            return name
    return chain[0]


def _rests_on(op: Operator, earlier: Operator, operators: Sequence[Operator]) -> bool:
    """Return whether `op` depends, directly or indirectly, on an output that only `earlier` makes."""
    seen, waiting = {op.name}, [op]
    while waiting:
        taken = waiting.pop().takes
        makers = [
            operator
            for operator in operators
            if any(v in operator.gives and v not in operator.changes for v in taken)
        ]
        waiting += [maker for maker in makers if maker.name not in seen]
        seen |= {maker.name for maker in makers}
        if earlier in makers and earlier != op:
            return True
    return False


def _sorted(
    operators: Sequence[Operator],
    before: Mapping[str, set[str]],
    makers: Mapping[str, Mapping[str, str]],
) -> list[Operator]:
    order: list[Operator] = []
    done: set[str] = set()
    waiting = list(operators)
    while waiting:
        # The first operator that is ready, in the order of adding: all ranks then
        # compute the same order.
        ready = next((op for op in waiting if done.issuperset(before[op.name])), None)
        if ready is None:
            waits = ", ".join(
                f"'{op.name}' waits for {_missing(op, before, done, makers)}"
                for op in waiting
            )
            raise ConfigError(f"the operators wait for each other: {waits}")
        order.append(ready)
        done.add(ready.name)
        waiting.remove(ready)
    return order


def _missing(
    op: Operator,
    before: Mapping[str, set[str]],
    done: set[str],
    makers: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """Return the values that an operator waits for, and otherwise the operators that must run before it."""
    values = {
        value for value, maker in makers[op.name].items() if maker and maker not in done
    }
    ordered_before = {
        name for name in before[op.name] - done if name not in makers[op.name].values()
    }
    return sorted(values | ordered_before)


def _ranks(
    order: Sequence[Operator],
    makers: Mapping[str, Mapping[str, str]],
    places: Places | None,
) -> dict[str, tuple[int, ...] | None]:
    ranks: dict[str, tuple[int, ...] | None] = {}
    for op in order:
        input_makers = [
            makers[op.name][value]
            for value in op.takes
            if makers[op.name][value] != GIVEN
        ]
        if places is None:
            ranks[op.name] = None
        elif op.roles:
            ranks[op.name] = tuple(
                sorted({rank for role in op.roles for rank in places[role]})
            )
        else:
            # Without a role the operator runs where its last input was made, which
            # saves a transfer.
            ranks[op.name] = ranks[input_makers[-1]] if input_makers else None
    return ranks


def _transfers(
    order: Sequence[Operator],
    makers: Mapping[str, Mapping[str, str]],
    ranks: Mapping[str, tuple[int, ...] | None],
) -> list[ValueTransfer]:
    """Return a transfer for every value that a rank needs and does not make. Each rank receives a value once."""
    transfers: list[ValueTransfer] = []
    for maker in order:
        source = ranks[maker.name]
        if source is None:
            continue  # every rank makes the value itself
        for value in sorted(maker.gives):
            dest_of = {
                op.name: ranks[op.name] or ()
                for op in order
                if makers[op.name].get(value) == maker.name
            }
            holders = set(source)
            for dest in dest_of.values():
                missing = tuple(rank for rank in dest if rank not in holders)
                if not missing:
                    continue
                holders.update(missing)
                takers = tuple(
                    name
                    for name, other_dest in dest_of.items()
                    if not set(missing).isdisjoint(other_dest)
                )
                transfers.append(
                    ValueTransfer(value, maker.name, takers, source, missing)
                )
    return transfers


def as_dict(plan: CompiledFlow) -> dict[str, Any]:
    """Return the flow as JSON-compatible values."""
    return {
        "operators": [
            {
                "name": operator.name,
                "roles": operator.roles,
                "takes": operator.takes,
                "gives": operator.gives,
                "ranks": plan.ranks[operator.name],
            }
            for operator in plan.operators
        ],
        "stages": plan.stages,
        "moves": [
            {
                "value": transfer.value,
                "from": transfer.source,
                "to": transfer.dest,
                "for": transfer.takers,
            }
            for transfer in plan.transfers
        ],
    }


def as_text(plan: CompiledFlow) -> str:
    """Return a table with one line for each operator. Operators in the same stage can run in parallel."""
    rows = []
    by_name = {operator.name: operator for operator in plan.operators}
    for number, stage in enumerate(plan.stages, start=1):
        for place, name in enumerate(stage):
            operator, ranks = by_name[name], plan.ranks[name]
            where = ", ".join(operator.roles) or "all"
            if ranks is not None:
                where += f" (ranks {ranks_text(ranks)})"
            takes, gives = ", ".join(operator.takes), ", ".join(operator.gives) or "-"
            rows.append(
                (str(number) if place == 0 else "", name, where, f"{takes} -> {gives}")
            )
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join(
            f"{cell:<{width}}" for cell, width in zip(row, [*widths, 0], strict=True)
        ).rstrip()
        for row in rows
    ]
    moves = [
        f"  {transfer.value}: ranks {ranks_text(transfer.source)} -> {ranks_text(transfer.dest)}, for "
        f"{', '.join(transfer.takers)}"
        for transfer in plan.transfers
    ]
    return "\n".join([*lines, *(["", "moves:", *moves] if moves else [])])


def as_mermaid(plan: CompiledFlow) -> str:
    """Return the flow as a Mermaid chart, which GitHub and MkDocs render."""
    lines = ["flowchart LR"]
    for operator in plan.operators:
        label = (
            f"{operator.name}<br/><small>{', '.join(operator.roles)}</small>"
            if operator.roles
            else operator.name
        )
        lines.append(f'    {operator.name}["{label}"]')
    for operator in plan.operators:
        for value, maker in plan.makers[operator.name].items():
            if maker:
                lines.append(f"    {maker} -- {value} --> {operator.name}")
    return "\n".join(lines)
