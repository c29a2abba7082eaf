"""A run whose engine has weights in 4 bits, and whose actor trains through the same rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.runs import metrics
from tests.launcher import Launcher
from tests.trainer.conftest import command_arguments

# On the same ranks, and on ranks of their own.
PLACES: dict[str, list[str]] = {
    "together": ["actor.tp=2"],
    "apart": ["actor.tp=1", "rollout.tp=1", "placement={actor: [0], rollout: [1]}"],
}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_samples_with_what_it_trains(
    launch: Launcher, inputs: Path, tmp_path: Path, place: str
) -> None:
    """Log-probs of engine and actor differ by float32 rounding, after updates too."""
    arguments = [
        *command_arguments(inputs, tmp_path / "runs"),
        *PLACES[place],
        "actor.fake_quantization=nvfp4",
        "rollout.vllm.quantization=nvfp4",
        "actor.optimizer.lr=1e-3",
        "trainer.steps=2",
    ]
    ended = launch.command(["train", *arguments], logs=tmp_path / "logs", ranks=2)
    assert ended.codes == [0, 0], ended.text
    steps = metrics(tmp_path / "runs" / "run")
    assert len(steps) == 2
    assert max(step["rollout/logprob_diff_mean"] for step in steps) < 1e-4
