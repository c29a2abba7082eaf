"""A run that chooses its layout, and reports a better one."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megaverl.planner.hardware import Hardware
from tests.launcher import Launcher

LINKS = "LINKS_OF_THE_RUN"


def slow_messages(flow: Any) -> None:
    """An operator of one's own is asked for before the first step. After that, a message takes two milliseconds."""
    describe(os.environ[LINKS], node_latency_us=2e3, node_gb_s=1.0)


def describe(path: str | Path, **links: float) -> None:
    """Links for which tensor parallelism pays (few bytes a second, at once), or others."""
    replace(
        Hardware.read("cpu"), **({"node_latency_us": 0.0, "node_gb_s": 0.01} | links)
    ).write(Path(path))


def test_a_better_layout_is_reported(
    launch: Launcher, arguments: list[str], tmp_path: Path
) -> None:
    links = tmp_path / "links.json"
    describe(links)
    more = [
        "actor.tp=auto",
        f"run={{hardware: {links}, log_with: jsonl}}",
        "rollout={engine: hf, sampling: {ignore_eos: true}}",
        "algorithm={name: grpo, group_size: 2, num_mini_batches: 4, kl: {in: none, coef: 0.0}}",
        "data.prompts_per_step=4",
        "trainer={steps: 3, replan_every: 2, operators: ['tests.trainer.test_replanning:slow_messages']}",
        "checkpoint={save_interval: 0, export_hf: false}",
    ]
    done = launch.command(
        ["train", *arguments, *more],
        logs=tmp_path / "logs",
        environment={LINKS: str(links)},
    )
    assert done.codes == [0, 0], done.text
    assert (
        "auto: actor.tp=2; of 2 layouts of 2 ranks that may fit the fastest on cpu"
        in done.text
    )
    assert "replan: actor.tp=1 would take" in done.text
    run = tmp_path / "runs" / "run"
    assert yaml.safe_load((run / "train.yaml").read_text())["actor"]["tp"] == 2
    assert json.loads((run / "chosen.json").read_text())["settings"] == {"actor.tp": 2}
    metrics = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert [each["step"] for each in metrics] == [1, 2, 3]
    assert (
        metrics[1]["plan/gain"] > 0.1
        and metrics[1]["plan/better_step_ms"] < metrics[1]["plan/step_ms"]
    )
    assert "plan/gain" not in metrics[0] | metrics[2]
