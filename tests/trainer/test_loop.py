"""The loop: what it asks of an executor, in which order, however far ahead of the others a rank may be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaverl.trainer.job import Leaving
from megaverl.trainer.loop import Trainer

STEPS = 4


class Order:
    """An executor that writes down what it is asked for.

    Args:
        lag: steps that this rank may be ahead of training.
    """

    control = None

    def __init__(self, lag: int) -> None:
        self.lag, self.asked = lag, list[str]()

    def begins_after(self, step: int) -> int:
        return max(0, step - self.lag)

    def run(self, step: int, *given: Any) -> None:
        self.asked.append(f"run {step}")

    def synchronise(self, done: int, *, starts: bool) -> None:
        self.asked.append(f"{'start' if starts else 'after'} {done}")

    def agreed(self, done: int) -> None:
        """Nothing waits for that here."""

    def measured(self, done: int) -> None:
        """On another rank."""

    def evaluate(self, validation: Any) -> Any:
        self.asked.append("validate")
        return SimpleNamespace(metrics={"validation/reward": 1.0})

    def settle(self, *given: Any) -> None:
        self.asked.append("settle")


def loop(lag: int, first: int = 0, leaves_after: int | None = None) -> Any:
    """A run of four steps that validates after the second one; `leaves_after` so many steps it hears a signal."""
    trainer: Any = Trainer.__new__(Trainer)
    trainer.config = SimpleNamespace(
        trainer=SimpleNamespace(steps=STEPS, validate_at_start=False),
        checkpoint=SimpleNamespace(resume="auto"),
        run_dir=Path("runs/run"),
    )
    trainer.executor, trainer.next_step, trainer.cut_off = Order(lag), first, None
    trainer.stages, trainer.stored = SimpleNamespace(step=None), None
    trainer.prompts = trainer.records = trainer.run_dir = trainer.stragglers = None
    trainer.profiler = SimpleNamespace(begin=lambda step: None, end=lambda done: None, close=lambda: None)
    trainer.validation = SimpleNamespace(
        happens=True, is_due=lambda done: done == 2, best=SimpleNamespace(step=-1), note=lambda done, found: None
    )
    trainer.saving = SimpleNamespace(is_due=lambda done, **known: False, look=lambda: None, save=lambda *a, **k: True)
    trainer.leave = SimpleNamespace(agreed=lambda group: "SIGTERM" if trainer.next_step == leaves_after else None)
    trainer._save = lambda done, **known: True
    return trainer


def test_where_roles_share_their_ranks_a_step_begins_when_the_last_is_over() -> None:
    trainer = loop(lag=0)
    assert trainer._steps() == {"validation/reward": 1.0}
    expected = "start 0, run 0, after 1, run 1, after 2, validate, run 2, after 3, run 3, after 4, settle"
    assert ", ".join(trainer.executor.asked) == expected


def test_a_rank_that_is_ahead_takes_part_in_what_follows_every_step() -> None:
    trainer = loop(lag=1)
    trainer._steps()
    expected = "start 0, run 0, run 1, after 1, run 2, after 2, validate, run 3, after 3, after 4, settle"
    assert ", ".join(trainer.executor.asked) == expected


@pytest.mark.parametrize("first", [1, STEPS])
def test_a_run_goes_on_where_it_stands(first: int) -> None:
    trainer = loop(lag=0, first=first)
    trainer._steps()
    assert trainer.executor.asked[0] == f"start {first}"
    assert [each for each in trainer.executor.asked if each.startswith("run")] == [
        f"run {step}" for step in range(first, STEPS)
    ]


def test_asked_to_leave_it_leaves_after_a_step_and_says_what_is_done() -> None:
    trainer = loop(lag=0, leaves_after=3)
    with pytest.raises(Leaving, match="SIGTERM: saved after 3 of 4 steps; start the run again"):
        trainer._steps()
    assert trainer.executor.asked[-1] == "after 3"
