"""Program that runs a flow on the ranks of its roles, as a loop over the operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from megaverl.controller.connection import ControllerConnection
from megaverl.controller.core import CallTimeouts, Controller
from megaverl.controller.groups import WorkerGroup, remote
from megaverl.controller.references import Ref
from megaverl.dataflow.job import TIMEOUT, context_for
from megaverl.dataflow.plan import Places
from megaverl.dataflow.runner import OperatorRunner
from megaverl.dataflow.value_mover import ValueMover


class FlowGroup(WorkerGroup):
    """Group of ranks that run operators of a flow."""

    @remote
    def given(self, name: str) -> Ref[Any]:
        """Return a value that the caller passed to the flow on every rank."""

    @remote
    def run(self, operator: str, inputs: list[Ref[Any]]) -> Ref[Any]:
        """Run an operator. Return its outputs as one value."""

    @remote
    def pick(self, outputs: Ref[Any], name: str) -> Ref[Any]:
        """Return one of the outputs."""


class FlowWorker:
    """Worker that runs operators on one rank (`FlowGroup`).

    Args:
        runner: stores the values of this rank.
    """

    def __init__(self, runner: OperatorRunner) -> None:
        self._runner = runner
        self._by_name = {operator.name: operator for operator in runner.plan.operators}

    def given(self, name: str) -> Any:
        """Return a value that the caller passed to the flow."""
        return self._runner.given[name]

    def run(self, operator: str, inputs: list[Any]) -> dict[str, Any]:
        """Run an operator. Return its outputs by name."""
        chosen = self._by_name[operator]
        # Values from other ranks are stored like values that were made on this rank.
        self._runner.result.update(zip(chosen.takes, inputs, strict=True))
        return self._runner.run(chosen)

    def pick(self, outputs: dict[str, Any], name: str) -> Any:
        """Return one of the outputs."""
        return outputs[name]


async def run_flow(runner: OperatorRunner, controller: Controller) -> None:
    """Run the operators of a flow in order, each on its ranks.

    An operator without outputs is not awaited. Later operators on other ranks then run
    in parallel with it.

    Args:
        runner: runner of the coordinator's rank. Every rank is given values of the same names.
    """
    # Values that the caller passes are on every rank already. A call without transfers
    # makes them known to the controller.
    everyone = range(controller.num_ranks)
    values = {
        name: await FlowGroup("flow", everyone, controller).given(name)
        for name in runner.given
    }
    for operator in runner.plan.operators:
        ranks = runner.plan.ranks[operator.name]
        group = FlowGroup("flow", everyone if ranks is None else ranks, controller)
        inputs = [values[name] for name in operator.takes]
        outputs = group.run(operator.name, inputs)
        for name in operator.gives:
            values[name] = await group.pick(await outputs, name)


def run_on_ranks(
    places: Places,
    runner: OperatorRunner,
    span: Callable[[str], AbstractContextManager[Any]],
) -> bool:
    """Run a flow on the ranks of the job. Return False if this process is not part of a job.

    Raises:
        ConfigError: a role is placed on a rank that does not exist.
        TrainingStopped: ranks do not join in time, or a rank failed.
    """
    context = context_for(places)
    if context is None:
        return False
    mover = ValueMover(context)
    timeouts = CallTimeouts(call=TIMEOUT.total_seconds())
    with ControllerConnection(context, timeouts) as connection:
        connection.serve(
            partial(run_flow, runner),
            {"flow": FlowWorker(runner)},
            mover,
            waiting=partial(span, "wait"),
        )
    mover.settle()
    return True
