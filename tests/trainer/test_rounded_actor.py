"""A run whose engine has weights in 4 bits, and whose actor trains through the same rounding."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launcher import Launcher
from tests.trainer.conftest import command_arguments


def test_a_run_samples_with_what_it_trains(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """Log-probs of engine and actor differ by float32 rounding, after updates too."""
    arguments = [
        *command_arguments(inputs, tmp_path / "runs"),
        "actor.tp=2",
        "actor.fake_quantization=nvfp4",
        "rollout.vllm.quantization=nvfp4",
        "actor.optimizer.lr=1e-3",
        "trainer.steps=2",
    ]
    ended = launch.command(["train", *arguments], logs=tmp_path / "logs", ranks=2)
    assert ended.codes == [0, 0], ended.text
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line).get("rollout/logprob_diff_mean") for line in lines]
    differences = [value for value in found if value is not None]
    assert len(differences) >= 2 and max(differences) < 1e-4
