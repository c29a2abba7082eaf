"""How far ahead of training each world may be: the weights that a step is generated with are settled before the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaverl.config import Config
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
    assert [PLACEMENT.lag(rank, staleness) for rank in range(5)] == lags


def test_rounds_are_of_one_version() -> None:
    """Engines and rewards begin a step together: inside its rounds no weights come, and no run is left."""
    lags = [PLACEMENT.lag(rank, 2, in_rounds=True) for rank in range(5)]
    assert lags == [2, 2, 1, 1, 0]
    said = {"rollout": parse_wanted(0), "reward": parse_wanted("actor")}
    beside = resolve(said, 2, dict.fromkeys(said))
    assert [beside.lag(0, 2, in_rounds=each) for each in (False, True)] == [2, 0]


def test_engines_and_rewards_are_ahead_as_their_ranks_are() -> None:
    settings = {
        "model": {"path": "model"},
        "rollout": {"async_rollout": True, "max_staleness": 3},
        "checkpoint": {"save_interval": 4},
        "trainer": {"validate_every": 6},
    }
    config = Config.model_validate(settings)
    assert Schedule.of(config, PLACEMENT) == Schedule(3, 2, 4, 6)


def test_nobody_is_ahead_of_a_save_or_a_validation() -> None:
    schedule = Schedule(3, 2, save_interval=4, validate_every=6)
    begins = [0, 0, 0, 0, 4, 4, 6, 6, 8, 8, 8, 8, 12]
    assert [schedule.begins_after(step) for step in range(13)] == begins
    unbound = Schedule(3, 2, 0, 0)
    begins = [0, 0, 0, 0, 1, 2, 3]
    assert [unbound.begins_after(step) for step in range(7)] == begins


def test_weights_that_come_while_a_step_is_generated_wait_for_nobody() -> None:
    schedule = Schedule(3, 2, save_interval=4, validate_every=0)
    for step in range(13):
        taken, begun = schedule.new_weights_after(step), schedule.begins_after(step)
        assert begun <= taken <= step
        assert taken <= begun or taken % 4, "nobody saves inside a step"


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
