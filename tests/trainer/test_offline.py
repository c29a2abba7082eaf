"""The program of training on a data set (`offline.train_on_rows`), on simulated ranks."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest

from megaverl.controller.core import Controller
from megaverl.controller.failures import CallFailed
from megaverl.trainer.offline import TrainerGroup, train_on_rows
from tests.controller.simulation import SimulatedCluster, SimulatedOutcome


class Worker:
    """Worker that writes down the calls of one rank."""

    def __init__(self, calls: list[str], fails_in: str) -> None:
        self._calls, self._fails_in = calls, fails_in

    def _note(self, call: str) -> None:
        self._calls.append(call)
        if call == self._fails_in:
            raise ValueError("no such row")

    def take_step(self, step: int) -> None:
        self._note(f"step {step}")

    def validate(self) -> None:
        self._note("validate")

    def report_step(self, done: int) -> None:
        self._note(f"report {done}")

    def save_if_due(self, done: int) -> None:
        self._note(f"save {done}")

    def leave(self, signal: int, done: int) -> None:
        self._note(f"leave {done} by {signal}")


def simulate(
    first_step: int,
    num_steps: int,
    validate_every: int,
    *,
    fails_in: str = "",
    signal_after: int | None = None,
) -> tuple[SimulatedOutcome, list[list[str]]]:
    """Run the program on two ranks. Return the outcome and the calls of each rank.

    Args:
        fails_in: call in which rank 1 raises.
        signal_after: number of completed steps after which a rank has a signal.
    """
    calls: list[list[str]] = [[], []]

    def program(controller: Controller) -> Coroutine[Any, Any, None]:
        class Signalled(TrainerGroup):
            @property
            def signal(self) -> int:
                return (
                    15
                    if signal_after is not None and f"save {signal_after}" in calls[0]
                    else 0
                )

        return train_on_rows(
            Signalled("trainer", (0, 1), controller),
            first_step,
            num_steps,
            validate_every,
        )

    outcome = SimulatedCluster(2, seed=0).run(
        program,
        lambda cluster, rank: {
            "trainer": Worker(calls[rank], fails_in if rank else "")
        },
    )
    return outcome, calls


def test_a_run_goes_through_the_steps_that_are_left() -> None:
    outcome, calls = simulate(1, 4, validate_every=2)
    assert outcome.error is None
    expected = [
        "step 1",
        "validate",
        "report 2",
        "save 2",
        "step 2",
        "report 3",
        "save 3",
    ]
    expected += ["step 3", "validate", "report 4", "save 4"]
    assert calls == [expected, expected]


def test_without_validation_in_between_the_last_step_is_validated() -> None:
    _, calls = simulate(0, 2, validate_every=0)
    assert calls[0] == [
        "step 0",
        "report 1",
        "save 1",
        "step 1",
        "validate",
        "report 2",
        "save 2",
    ]


@pytest.mark.parametrize(("signal_after", "end"), [(1, "leave 1 by 15"), (2, "save 2")])
def test_a_signal_is_followed_between_two_steps(signal_after: int, end: str) -> None:
    """After the last step there is nothing to leave."""
    outcome, calls = simulate(0, 2, validate_every=0, signal_after=signal_after)
    assert outcome.error is None
    assert calls[0][-1] == calls[1][-1] == end


def test_a_rank_that_fails_is_named_with_its_call_and_saves_nothing() -> None:
    """The program does not await the step, and has sent further calls when it fails."""
    outcome, calls = simulate(0, 2, validate_every=0, fails_in="step 1")
    assert calls[1][-1] == "step 1"
    assert isinstance(outcome.error, CallFailed)
    assert (outcome.error.ranks, outcome.error.call) == ((1,), "trainer.take_step")
