"""A program of a user's own, run as they would: its steps are those of the built-in loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megaverl.errors import ConfigError
from megaverl.trainer import init_distributed
from tests.trainer.conftest import ROOT, environment, make_inputs


def test_rollout_and_update_are_the_steps_of_train(tmp_path: Path) -> None:
    folder = make_inputs(tmp_path)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("own_loop.py")), str(folder)],
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert [step["version"] for step in said["steps"]] == [1.0, 2.0]
    assert said["steps"][1]["reward"] == pytest.approx(said["whole"]["reward/mean"], abs=0)
    assert said["whole"]["rollout/filtered_fraction"] == 0.25, "one of four samples"
    assert (folder / "runs" / "whole" / "metrics.jsonl").is_file()


def test_too_few_ranks_say_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    from megaverl.config import load_config

    values = {"model": {"path": "org/small"}, "data": {"train": ["t.jsonl"]}, "reward": "exact_match"}
    config = load_config({**values, "actor": {"tp": 2, "pp": 2}}, check_paths=False)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 4 PROGRAM.py"):
        init_distributed(config)
