"""A run that finds a better layout, saves, and goes on on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaverl.errors import STARTS_AGAIN
from megaverl.planner.hardware import Hardware
from megaverl.trainer.replanning import Replanning
from tests.launcher import Launcher


def restarts_cost_nothing(flow: Any) -> None:
    """An operator of one's own is asked for before the first step."""
    Replanning.seconds_until = lambda self, metrics: 0.0  # type: ignore[method-assign]


@pytest.fixture
def more(tmp_path: Path) -> list[str]:
    """Keys of a run that was begun with tensor parallelism, on hardware whose messages take a tenth of a second."""
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "chosen.json").write_text(json.dumps({"ranks": 2, "settings": {"actor.tp": 2}}))
    replace(Hardware.read("cpu"), node_latency_us=1e5).write(tmp_path / "slow_links.json")
    return [
        "actor.tp=auto",
        f"run={{hardware: {tmp_path / 'slow_links.json'}, replan: true, log_with: jsonl}}",
        "rollout={engine: hf, sampling: {ignore_eos: true}}",
        "algorithm={name: grpo, group_size: 2, kl: {in: none, coef: 0.0}}",
        "data.prompts_per_step=4",
        "trainer={steps: 4, replan_every: 2, operators: ['tests.trainer.test_replanning:restarts_cost_nothing']}",
        "checkpoint={save_interval: 2, export_hf: false}",
    ]


def test_the_grid_changes_between_two_checkpoints(
    launch: Launcher, arguments: list[str], more: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "run"
    first = launch.command(["train", *arguments, *more], logs=tmp_path / "first")
    assert first.codes == [STARTS_AGAIN] * 2, first.text
    assert "replan: actor.tp=1 would take" in first.text and "taken at the next checkpoint" in first.text
    assert yaml.safe_load((run / "train.yaml").read_text())["actor"]["tp"] == 2
    chosen = json.loads((run / "chosen.json").read_text())
    assert chosen["settings"]["actor.tp"] == 1
    assert [each["settings"] for each in chosen["measured"]] == [{"actor.tp": 2}]

    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    second = launch.command(["train", *arguments, *more], logs=tmp_path / "second", environment=again)
    assert second.codes == [0, 0], second.text
    assert "2 of 4 steps are done" in second.text
    assert yaml.safe_load((run / "train.yaml").read_text())["actor"]["tp"] == 1
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in metrics] == [1, 2, 3, 4]
    assert metrics[1]["plan/gain"] > 0.1 and metrics[1]["plan/better_step_ms"] < metrics[1]["plan/step_ms"]
    assert "plan/gain" in metrics[3] and "plan/gain" not in metrics[2]
    folders = [folder.name for folder in sorted((run / "checkpoints").glob("step_*"))]
    assert folders == ["step_00000002", "step_00000004"]
    assert json.loads((run / "chosen.json").read_text())["measured"] == chosen["measured"]  # a start keeps them
