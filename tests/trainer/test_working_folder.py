"""User code that moves the working folder: whatever a run reads and writes stays where it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megaverl.config import load_config
from megaverl.config.absolute import with_absolute_paths
from tests.launcher import ROOT, Launcher

MOVES = """
import os
import tempfile


def moves(completion, answer):
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)  # from here on the working folder cannot even be named
    return sum(ord(letter) % 7 for letter in completion) / 40


def breaks(completion):
    moves(completion, None)
    raise ValueError("far from home")
"""
GIVEN = [
    "--config=run.yaml",
    "model.path=model",
    "data.train=[train.jsonl]",
    "rollout.engine=hf",
    "run.nproc=1",
]


@pytest.fixture
def desk(inputs: Path, tmp_path: Path) -> Path:
    """A folder in which everything has a relative name."""
    folder = tmp_path / "desk"
    shutil.copytree(inputs, folder)
    (folder / "mine.py").write_text(MOVES)
    return folder


def test_a_reward_that_moves_loses_nothing(
    launch: Launcher, desk: Path, tmp_path: Path
) -> None:
    more = [
        "reward={function: 'mine.py:moves'}",
        "actor.tp=1",
        "trainer.save_samples=2",
        "run.track_metrics=['*']",
    ]
    ended = launch.command(
        ["train", *GIVEN, *more], logs=tmp_path / "logs", ranks=1, folder=desk
    )
    assert ended.codes == [0], ended.text
    run = desk / "runs" / "run"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert len((run / "samples.jsonl").read_text().splitlines()) == 4
    for name in ("tensorboard", "hf", "logs", "timeline.json"):
        assert (run / name).exists(), name


def test_its_error_reaches_the_terminal(
    launch: Launcher, desk: Path, tmp_path: Path
) -> None:
    more = ["reward={function: 'mine.py:breaks'}", "actor.tp=1"]
    ended = launch.command(
        ["train", *GIVEN, *more], logs=tmp_path / "logs", ranks=1, folder=desk
    )
    assert (
        ended.codes == [1]
        and "reward 'breaks' raised ValueError: far from home" in ended.text
    ), ended.text


def test_every_path_is_absolute_and_names_that_are_none_stay(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    given = {
        "model": {"path": "model", "tokenizer": "tokenizer.model"},
        "reference": {"path": "org/name"},
        "data": {
            "train": ["train.jsonl", "*.jsonl", "org/data", "mine.py:rows"],
            "system_prompt": "model",
        },
        "reward": [
            {"function": "mine.py:moves"},
            {"function": "mine:moves"},
            {"name": "exact_match"},
        ],
        "algorithm": {"group_size": 2, "rollout_filter": "mine.py:keep"},
        "environment": {
            "name": "tools",
            "options": {"tools": {"find": {"search": "train.jsonl"}}},
        },
    }
    config = with_absolute_paths(load_config(given, check_paths=False, command="train"))
    assert (config.run.dir, config.model.path) == (
        str(desk / "runs"),
        str(desk / "model"),
    )
    assert (config.model.tokenizer, config.reference.path) == (
        str(desk / "tokenizer.model"),
        "org/name",
    )
    expected = [
        str(desk / "train.jsonl"),
        str(desk / "*.jsonl"),
        "org/data",
        f"{desk / 'mine.py'}:rows",
    ]
    assert [
        source.path for source in config.data.train
    ] == expected and config.data.system_prompt == "model"
    assert [entry.function for entry in config.reward] == [
        f"{desk / 'mine.py'}:moves",
        "mine:moves",
        None,
    ]
    assert config.algorithm.rollout_filter == f"{desk / 'mine.py'}:keep"
    assert config.environment.options["tools"]["find"]["search"] == str(
        desk / "train.jsonl"
    )
    assert with_absolute_paths(config) == config


LEAVES = """
import sys
from megaverl.trainer.elastic_agent import start_ranks

note = "from megaverl.processes import note_finished; note_finished()"
codes = [start_ranks(["-c", program, "megaverl.cli.main"], 2) for program in (note, sys.argv[1] + note)]
print(codes)
"""


def test_a_rank_that_leaves_without_finishing_is_a_failure() -> None:
    """`os._exit(0)` on one of two ranks: its exit code says that all is well."""
    leaves = "import os\nif os.environ['LOCAL_RANK'] == '1': os._exit(0)\n"
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES, leaves], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert json.loads(ended.stdout) == [0, 1], ended.stderr
    assert (
        "rank 1 of this node left with exit code 0 before the run was over"
        in ended.stderr
    )
