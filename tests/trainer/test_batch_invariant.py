"""Runs whose engine and trainer agree to the bit, on the same ranks and on ranks of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.faults.runs import metrics
from tests.launcher import Launcher
from tests.trainer.conftest import command_arguments

ALGORITHM = {
    "name": "grpo",
    "group_size": 4,
    "num_mini_batches": 2,
    "correction": {"kind": "token_truncate"},
}
# Sums of a tp of 2 are in every layer; apart, engine and actor are different processes.
PLACES: dict[str, list[str]] = {
    "together": [
        *("actor.tp=2", "rollout.tp=2"),
        *("model.dtype=bfloat16", "model.fp32_lm_head=true"),
    ],
    "apart": ["actor.tp=1", "rollout.tp=1", "placement={actor: [0], rollout: [1]}"],
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU alone")
@pytest.mark.parametrize("place", PLACES)
def test_a_run_without_mismatch(
    launch: Launcher, inputs: Path, tmp_path: Path, place: str
) -> None:
    arguments = [
        *command_arguments(inputs, tmp_path / "runs"),
        *PLACES[place],
        f"algorithm={json.dumps(ALGORITHM)}",
        "rollout.batch_invariant=true",
        "actor.optimizer.lr=1e-2",
        "trainer={steps: 2, validate_every: 0}",
        "checkpoint.export_hf=false",
    ]
    ended = launch.command(["train", *arguments], logs=tmp_path / "logs", ranks=2)
    assert ended.codes == [0, 0], ended.text
    steps = metrics(tmp_path / "runs" / "run")
    assert len(steps) == 2
    for step in steps:
        assert step["rollout/logprob_diff_max"] == 0.0
        assert step["actor/mismatch_kl"] == 0.0
        assert step["actor/mismatch_ratio"] == 1.0
        assert step["actor/grad_norm"] > 0
