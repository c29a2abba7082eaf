"""How far ahead of training each world may be: the weights that a step is generated with are settled before the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaverl.distributed.placement import parse_wanted
from megaverl.distributed.placement_resolver import resolve
from megaverl.trainer.saving import append_samples, forget_samples
from megaverl.trainer.schedule import Schedule
from megaverl.trainer.stored_rollouts import INDEX_FILE, RolloutFolder

ROLES = {"rollout": 0, "reward": 1, "critic": 2, "reference": 3, "actor": 4}
PLACEMENT = resolve(
    {role: parse_wanted(rank) for role, rank in ROLES.items()}, 5, dict.fromkeys(ROLES)
)


@pytest.mark.parametrize(
    ("staleness", "lags"),
    [
        (0, [0, 0, 0, 0, 0]),
        (1, [1, 0, 1, 0, 0]),
        (2, [2, 1, 1, 1, 0]),
        (5, [5, 4, 1, 4, 0]),
    ],
)
def test_who_is_ahead_by_how_much(staleness: int, lags: list[int]) -> None:
    """One less for each hand that the samples have gone through; the critic only values them, the actor never is."""
    schedule = Schedule(PLACEMENT, staleness, 0, 0)
    assert [schedule.lag(rank) for rank in range(5)] == lags


def test_rounds_are_of_one_version() -> None:
    """Engines and rewards begin a step together: inside its rounds no weights come, and no run is left."""
    lags = [Schedule(PLACEMENT, 2, 0, 0, in_rounds=True).lag(rank) for rank in range(5)]
    assert lags == [2, 2, 1, 1, 0]
    said = {"rollout": parse_wanted(0), "reward": parse_wanted("actor")}
    beside = resolve(said, 2, dict.fromkeys(said))
    assert [
        Schedule(beside, 2, 0, 0, in_rounds=each).lag(0) for each in (False, True)
    ] == [2, 0]


def test_nobody_is_ahead_of_a_save_or_a_validation() -> None:
    schedule = Schedule(PLACEMENT, 3, save_interval=4, validate_every=6)
    assert [schedule.begins_after(step, 3) for step in range(13)] == [
        0,
        0,
        0,
        0,
        4,
        4,
        6,
        6,
        8,
        8,
        8,
        8,
        12,
    ]
    assert [
        Schedule(PLACEMENT, 3, 0, 0).begins_after(step, 3) for step in range(7)
    ] == [0, 0, 0, 0, 1, 2, 3]


def test_weights_that_come_while_a_step_is_generated_wait_for_nobody() -> None:
    """Every other world has agreed to them when it begins the step, or does before it waits for samples."""
    schedule = Schedule(PLACEMENT, 3, save_interval=4, validate_every=0, in_flight=True)
    for step in range(13):
        taken = schedule.in_flight_after(step, schedule.lag(0))
        begun = [schedule.begins_after(step, schedule.lag(rank)) for rank in range(5)]
        assert max(taken, begun[0]) <= step and all(
            taken <= other for other in begun[1:]
        )
        assert taken <= begun[0] or taken % 4, "nobody saves inside a step"


@pytest.mark.parametrize("done", [0, 1, 3, 5])
def test_a_run_that_goes_on_forgets_what_it_writes_again(
    tmp_path: Path, done: int
) -> None:
    """After `done` of five steps: stored rollouts count steps from 0, samples from 1."""
    folder, samples = RolloutFolder(tmp_path), tmp_path / "samples.jsonl"
    index = tmp_path / INDEX_FILE
    entries = [{"file": f"{step}", "step": step} for step in range(5)]
    index.write_text(
        "".join(f"{json.dumps(entry)}\n" for entry in entries) + '{"file": "to',
        encoding="utf-8",
    )
    folder.forget(done)
    assert sorted(folder.entries()) == list(range(done))
    for step in range(1, 6):
        append_samples(samples, step, [{"response": f"{step}"}])
    forget_samples(samples, done)
    assert [
        json.loads(line)["step"] for line in samples.read_text("utf-8").splitlines()
    ] == list(range(1, done + 1))
