"""Parts of the user's own, by name."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from megaverl.errors import ConfigError
from megaverl.plugins import load_object

SLOW = """
from tests.test_plugins import begun, go_on
begun.set()
assert go_on.wait(30)
class Late: ...
"""
begun, go_on = threading.Event(), threading.Event()


def test_a_file_that_another_thread_is_still_importing_is_waited_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(load_object, f"{tmp_path / 'slow.py'}:Late", "key")
        assert begun.wait(30)
        second = threads.submit(load_object, f"{tmp_path / 'slow.py'}:Late", "key")
        wait([second], timeout=0.2)  # without the lock it has failed by now
        go_on.set()
        assert first.result() is second.result()


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (
            "class Mine: ...",
            "Mien",
            r"has no 'Mien' \(did you mean 'Mine'\?\); it has Mine",
        ),
        (
            "import no_such_thing",
            "Mine",
            "cannot be imported: ModuleNotFoundError.*Is it installed",
        ),
        ("1 / 0", "Mine", "cannot be imported: ZeroDivisionError"),
        ("exit()", "Mine", "cannot be imported: SystemExit"),
        (
            "def __getattr__(name): raise SystemExit(0)",
            "Mine",
            "asked for 'Mine', it raised SystemExit: 0",
        ),
    ],
)
def test_what_a_file_lacks_is_named(
    tmp_path: Path, source: str, name: str, message: str
) -> None:
    (tmp_path / "own.py").write_text(source)
    for _ in range(2):  # one that failed is not taken for imported
        with pytest.raises(ConfigError, match=f"^rewards.0: .*{message}"):
            load_object(f"{tmp_path / 'own.py'}:{name}", "rewards.0")


@pytest.mark.parametrize(
    "name", ["", "no_colon", "module:", ":object", "module:not a name"]
)
def test_a_name_written_badly(name: str) -> None:
    with pytest.raises(ConfigError, match="expected module:object"):
        load_object(name, "key")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.py is not there"):
        load_object(f"{tmp_path / 'absent.py'}:Mine", "key")


OWN = """
import torch

from megaverl.algorithms.advantages import Advantages


def advantage(rewards, response_mask): ...
def policy_loss(log_probs, advantages, weights): ...
def value_loss(values, returns, weights): ...
def aggregation(response_mask, denominators): ...
def correction(old_log_probs, rollout_log_probs, response_mask): ...
def kl(log_probs, ref_log_probs): ...
def divergence(student_log_probs, teacher_log_probs): ...
def preference(chosen_log_ratios, rejected_log_ratios, weights): ...
def reward_model(chosen_rewards, rejected_rewards, weights): ...
def reward(completion): return 1.0
"""
OVERRIDES = [
    "reward={function: mine_of_here:reward}",
    "algorithm={name: ppo, advantage: mine_of_here:advantage, policy_loss: mine_of_here:policy_loss, value_loss: "
    "mine_of_here:value_loss, loss_aggregation: mine_of_here:aggregation, correction: {kind: mine_of_here:correction}, "
    "kl: {coef: 0.1, kind: mine_of_here:kl}, distillation: {divergence: mine_of_here:divergence}}",
    "preference.loss=mine_of_here:preference",
    "reward_model.loss=mine_of_here:reward_model",
]


def test_the_console_script_finds_modules_in_the_working_folder(tmp_path: Path) -> None:
    """`python -m` and pytest put the working folder on the path by themselves; a console script does not."""
    (tmp_path / "mine_of_here.py").write_text(OWN)
    script = Path(sys.executable).with_name("megaverl")
    command = [
        script,
        "train",
        "model.path=model",
        "data.train=[train.jsonl]",
        *OVERRIDES,
        "--dry-run",
    ]
    ended = subprocess.run(
        [*map(str, command), "--no-file-checks"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        "is not found" not in ended.stderr and "no such" not in ended.stderr.lower()
    ), ended.stderr
    missing = [text.replace("mine_of_here", "absent_here") for text in OVERRIDES]
    command = [
        script,
        "train",
        "model.path=model",
        "data.train=[train.jsonl]",
        *missing,
        "--dry-run",
    ]
    ended = subprocess.run(
        [*map(str, command), "--no-file-checks"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        ended.returncode == 2 and "module 'absent_here' is not found" in ended.stderr
    ), ended.stderr
