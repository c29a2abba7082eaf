"""Re-planning by what a run has measured: laws of the correction, and what is kept of a choice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.config import Config, load_config
from megaverl.planner.candidates import read_choice, write_choice
from megaverl.planner.generation import LengthDistribution
from megaverl.planner.hardware import Hardware
from megaverl.planner.job import find_spec, make_job
from megaverl.planner.search import choose
from megaverl.planner.simulator import Prediction, simulate
from megaverl.trainer.replanning import Observation, factors_of, replan
from tests.planner.test_search import tiny

CPU = Hardware.read("cpu")
PROMPTS, RESPONSES = [8.0] * 16, [4.0, 8.0, 12.0, 16.0] * 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Of four ranks, whose actor's grid was `auto`."""
    folder = tmp_path_factory.mktemp("replan")
    autos = ["actor.tp=auto", "actor.pp=auto"]
    return load_config(
        None, [*tiny(folder), *autos], check_paths=False, world_size=4, choose=choose
    )


def predicted(config: Config, factors: dict[str, float] | None = None) -> Prediction:
    job = make_job(config, find_spec(config), 4, CPU.machine())
    hardware = replace(CPU, ranks_per_node=4)
    return simulate(
        job,
        hardware,
        lengths=LengthDistribution.measured(PROMPTS, RESPONSES),
        factors=factors,
    )


def observed(config: Config, factor: float = 1.0, **of_one: float) -> Observation:
    seconds = {
        phase.name: factor * of_one.get(phase.name, 1.0) * phase.seconds
        for phase in predicted(config).phases
    }
    return Observation(PROMPTS, RESPONSES, seconds)


@given(slower=st.floats(0.05, 20), rollout=st.floats(0.05, 20))
def test_what_was_measured_is_what_is_predicted_then(
    config: Config, slower: float, rollout: float
) -> None:
    seen = observed(config, slower, rollout=rollout)
    factors = factors_of(seen.seconds, predicted(config))
    corrected = predicted(config, factors)
    for phase in corrected.phases:
        assert phase.seconds == pytest.approx(seen.seconds[phase.name])
    # On the same ranks, one by one.
    assert corrected.step_seconds == pytest.approx(sum(seen.seconds.values()))


@given(slower=st.floats(0.05, 20))
def test_a_machine_that_is_slower_at_everything_changes_nothing(
    config: Config, slower: float
) -> None:
    plain, found = (
        replan(config, config.layered, 4, observed(config, each))
        for each in (1.0, slower)
    )
    assert found.settings == plain.settings and found.gain == pytest.approx(
        plain.gain, abs=1e-6
    )
    assert found.before == pytest.approx(slower * plain.before) and 0 <= found.gain < 1


def test_a_worse_layout_has_a_better_one(config: Config) -> None:
    best = replan(config, config.layered, 4, observed(config)).settings
    other = next(
        {"actor.tp": tp, "actor.pp": pp}
        for tp, pp in ((2, 2), (4, 1), (1, 2))
        if best != _grid(tp, pp)
    )
    worse = config.layered(other)
    worse.note([], [], other, config.layered)
    found = replan(worse, config.layered, 4, observed(worse))
    assert {
        key: found.settings[key] for key in other
    } != other and found.after < found.before


def _grid(tp: int, pp: int) -> dict[str, Any]:
    return {"actor.tp": tp, "actor.pp": pp}


def test_what_was_chosen_is_read_by_the_run_that_goes_on(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": str(tmp_path), "name": "own"})
        }
    )
    own.run_dir.mkdir()
    assert read_choice(own, 4) is None
    assert write_choice(own, 4, {"actor.tp": 2}) == own.chosen_file
    assert read_choice(own, 4) == {"actor.tp": 2}
    assert read_choice(own, 8) is None  # of another world
    anew = own.model_copy(
        update={"checkpoint": own.checkpoint.model_copy(update={"resume": "never"})}
    )
    assert read_choice(anew, 4) is None
    # Its own job's, which goes on all the same.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert read_choice(anew, 4) == {"actor.tp": 2}
    own.chosen_file.write_text(json.dumps({"ranks": 4})[:-2])
    assert read_choice(own, 4) is None
