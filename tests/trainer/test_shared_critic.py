"""A critic on the actor's backbone: one model that is trained, saved, taken up again, resharded and converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaverl.checkpoint.convert.run import ConversionRequest, convert, process_group
from megaverl.weights.reshard import HIDDEN
from tests.faults.injector import Fault
from tests.faults.runs import metrics
from tests.launcher import Launcher
from tests.trainer.conftest import command_arguments

PPO = [
    "rollout.engine=hf",
    "algorithm={name: ppo, num_mini_batches: 2, value_loss_coef: 0.5, kl: {in: reward, kind: k1, coef: 0.01}}",
    "algorithm.bootstrap_truncated=true",
    "critic.share_backbone=true",
    "trainer={steps: 3, validate_every: 0}",
    "checkpoint={save_interval: 2, async_save: false}",
    "run={name: run, log_with: jsonl, timeout_minutes: 0.4}",
]
APART = [
    "actor={tp: 2, optimizer: {lr: 1.0e-3}}",
    "placement={rollout: 0, actor: 1-2}",
    "reshard={overlap: true, check_every: 1}",
]


def test_a_run_on_shared_and_on_split_ranks(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """The second with tensor parallelism, engines elsewhere, weights that go to them in
    the background, and a rank that is killed; the third with sequences cut over the
    actor's ranks, scored in two shares: the same numbers.
    """
    common = [
        "train",
        *command_arguments(inputs, tmp_path / "alone"),
        *PPO,
        "actor.tp=1",
    ]
    ended = launch.command(common, logs=tmp_path / "logs", ranks=1)
    assert ended.codes == [0], ended.text
    split = ["train", *command_arguments(inputs, tmp_path / "split"), *PPO, *APART]
    fault = Fault("kill", 1, "actor_update", 3)
    cut = launch.command(
        split, logs=tmp_path / "cut", ranks=3, environment=fault.environment()
    )
    assert cut.codes == [1, -9, 1], cut.text
    again = launch.command(split, logs=tmp_path / "again", ranks=3)
    assert again.codes == [0] * 3 and "2 of 3 steps are done" in again.text, again.text
    context = [
        "train",
        *command_arguments(inputs, tmp_path / "context"),
        *PPO,
        *APART,
        "actor.tp=1",
        "actor.cp=2",
    ]
    ended = launch.command(context, logs=tmp_path / "logs of context", ranks=3)
    assert ended.codes == [0] * 3, ended.text
    expected, *found = (
        metrics(tmp_path / name / "run") for name in ("alone", "split", "context")
    )
    assert [len(each) for each in found] == [3, 3]
    lines = (tmp_path / "split" / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(HIDDEN in json.loads(line) for line in lines), (
        "measured where the weights come from"
    )
    for before, after in zip(2 * expected, found[0] + found[1], strict=True):
        same = {
            name: value
            for name, value in after.items()
            if name in before and "reshard" not in name
        }
        assert {
            "critic/loss",
            "critic/explained_variance",
            "actor/loss",
            "actor/grad_norm",
        } <= same.keys()
        assert (same["train/last_value_mean"] != 0) == (before["step"] > 1), (
            "the head begins at 0"
        )
        assert same == pytest.approx(
            {name: before[name] for name in same}, abs=1e-4, rel=1e-4
        )
    trained = weights_of(tmp_path / "split" / "run" / "hf")
    for role in ("actor", "critic"):
        with process_group():
            convert(
                ConversionRequest(
                    tmp_path / "split" / "run",
                    tmp_path / role,
                    to="hugging_face",
                    role=role,
                    quiet=True,
                )
            )
    actor, critic = weights_of(tmp_path / "actor"), weights_of(tmp_path / "critic")
    assert actor.keys() == trained.keys() and all(
        torch.equal(actor[name], trained[name]) for name in trained
    )
    head = critic.pop("score.weight")
    assert head.shape == (1, 64) and bool(head.any()), "the value head was trained"
    assert all(torch.equal(trained[name], critic[name]) for name in critic), (
        "on this backbone"
    )


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: t
        for file in sorted(folder.glob("*.safetensors"))
        for name, t in load_file(file).items()
    }
