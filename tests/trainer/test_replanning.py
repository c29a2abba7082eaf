"""A run that chooses its layout, finds a better one, saves, and goes on on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    """An operator of one's own is asked for before the first step. After that, a message takes two milliseconds."""

    def seconds_until(self: Replanning, metrics: Mapping[str, float]) -> float:
        describe(str(self.config.run.hardware), node_latency_us=2e3, node_gb_s=1.0)
        return 0.0

    Replanning.seconds_until = seconds_until  # type: ignore[method-assign]


def describe(path: str | Path, **links: float) -> None:
    """Links for which tensor parallelism pays (few bytes a second, at once), or others."""
    replace(
        Hardware.read("cpu"), **({"node_latency_us": 0.0, "node_gb_s": 0.01} | links)
    ).write(Path(path))


@pytest.fixture
def more(tmp_path: Path) -> list[str]:
    """Keys of a run that chooses tensor parallelism."""
    describe(tmp_path / "links.json")
    return [
        "actor.tp=auto",
        f"run={{hardware: {tmp_path / 'links.json'}, replan: true, log_with: jsonl}}",
        "rollout={engine: hf, sampling: {ignore_eos: true}}",
        "algorithm={name: grpo, group_size: 2, num_mini_batches: 4, kl: {in: none, coef: 0.0}}",
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
    assert (
        "auto: actor.tp=2; of 2 layouts of 2 ranks that may fit the fastest on cpu"
        in first.text
    )
    assert (
        "replan: actor.tp=1 would take" in first.text
        and "taken at the next checkpoint" in first.text
    )
    assert yaml.safe_load((run / "train.yaml").read_text())["actor"]["tp"] == 2
    chosen = json.loads((run / "chosen.json").read_text())
    assert chosen["settings"]["actor.tp"] == 1
    assert [each["settings"] for each in chosen["measured"]] == [{"actor.tp": 2}]

    # Chosen anew, it would be tensor parallelism again.
    describe(tmp_path / "links.json")
    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    second = launch.command(
        ["train", *arguments, *more], logs=tmp_path / "second", environment=again
    )
    assert second.codes == [0, 0], second.text
    assert (
        "2 of 4 steps are done" in second.text
        and "auto: actor.tp=1, as " in second.text
    )
    assert yaml.safe_load((run / "train.yaml").read_text())["actor"]["tp"] == 1
    metrics = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert [each["step"] for each in metrics] == [1, 2, 3, 4]
    assert (
        metrics[1]["plan/gain"] > 0.1
        and metrics[1]["plan/better_step_ms"] < metrics[1]["plan/step_ms"]
    )
    assert "plan/gain" in metrics[3] and "plan/gain" not in metrics[2]
    folders = [folder.name for folder in sorted((run / "checkpoints").glob("step_*"))]
    assert folders == ["step_00000002", "step_00000004"]
    # A start keeps them.
    assert (
        json.loads((run / "chosen.json").read_text())["measured"] == chosen["measured"]
    )
