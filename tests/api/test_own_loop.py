"""A program of a user's own, run as they would: its steps are those of the built-in loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaverl.errors import ConfigError
from megaverl.trainer import init_distributed
from tests.faults.runs import metrics
from tests.faults.server import Server
from tests.trainer.conftest import make_inputs

PROGRAM = str(Path(__file__).with_name("own_loop.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("own_loop"))


def test_rollout_and_update_are_the_steps_of_train(server: Server, folder: Path, tmp_path: Path) -> None:
    ended = server.run([PROGRAM, str(folder)], ranks=1, logs=tmp_path)
    assert ended.codes == [0], ended.text
    said = json.loads(ended.text.splitlines()[-1])
    assert [step["version"] for step in said["steps"]] == [1.0, 2.0]
    assert said["steps"][1]["reward"] == pytest.approx(said["whole"]["reward/mean"], abs=0)
    assert said["whole"]["rollout/filtered_fraction"] == 0.25, "one of four samples"
    own = said["own"]
    assert own["timeline"] == ["rollout", "fewer", "rewards", "update"] and len(own["lengths"]) == 2
    assert own["reward/mean"] == pytest.approx(sum(own["lengths"]) / 2), "rewards of one's own, of fewer samples"
    runs = [metrics(folder / "runs" / name) for name in ("run", "whole")]
    assert runs[0][:2] == runs[1], "what is written is what train writes"
    assert (folder / "runs" / "run" / "checkpoints").is_dir()
    for number, step in enumerate(said["steps"]):  # what operators in the built-in step saw and changed
        assert f"step {number}: {2 * step['reward']:.4f}" in ended.text


@pytest.mark.parametrize(
    ("end", "codes", "told"),
    [
        ("killed", [1, -9], "TrainingStopped: rank 1 is gone"),
        ("failed", [1, 1], "TrainingStopped: rank 1 failed in step 1: log: ValueError: a mistake of the user's"),
        ("left", [1, 1], "rank 1: it was in the end of its program"),
    ],
)
def test_a_rank_that_is_lost(
    server: Server, folder: Path, tmp_path: Path, end: str, codes: list[int], told: str
) -> None:
    """The others end with its name, and not with what gloo says; each process by itself, as on nodes of their own."""
    ended = server.run([PROGRAM, str(folder), end], logs=tmp_path)
    assert ended.codes == codes, ended.text
    assert told in ended.output[0], ended.text
    assert "gloo/transport" not in ended.output[0].splitlines()[-1]


def test_too_few_ranks_say_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    from megaverl.config import load_config

    values = {"model": {"path": "org/small"}, "data": {"train": ["t.jsonl"]}, "reward": "exact_match"}
    config = load_config({**values, "actor": {"tp": 2, "pp": 2}}, check_paths=False)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 4 PROGRAM.py"):
        init_distributed(config)
