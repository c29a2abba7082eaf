"""A program of a user's own, run as they would: its steps are those of the built-in loop."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaverl.errors import SAVED_AND_LEFT, ConfigError
from megaverl.monitoring.backends import read_metrics
from megaverl.trainer import init_distributed
from megaverl.trainer.api.settings import resolve
from megaverl.utils.config import get_ppo_config
from tests.faults.runs import metrics
from tests.launcher import Launcher
from tests.trainer.conftest import ROOT, environment, make_inputs

PROGRAM = str(Path(__file__).with_name("own_loop.py"))
FIRST_PROGRAM = """\
from megaverl import trainer
from megaverl.utils.config import get_ppo_config

config = get_ppo_config()
trainer.init_distributed(config)
rl_trainer = trainer.PPOTrainer(config)
for step in range(config.max_steps):
    rollouts = rl_trainer.rollout()
    train_stats = rl_trainer.update(rollouts)
    print(f"Step {step}, Reward: {train_stats['reward']}")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("own_loop"))


def test_rollout_and_update_are_the_steps_of_train(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    ended = launch.command([PROGRAM, str(folder)], ranks=1, logs=tmp_path)
    assert ended.codes == [0], ended.text
    said = json.loads(ended.text.splitlines()[-1])
    assert [step["version"] for step in said["steps"]] == [1.0, 2.0]
    assert said["steps"][1]["reward"] == pytest.approx(
        said["whole"]["reward/mean"], abs=0
    )
    assert said["whole"]["rollout/filtered_fraction"] == 0.25, "one of four samples"
    own = said["own"]
    assert (
        own["timeline"] == ["rollout", "fewer", "rewards", "update"]
        and len(own["lengths"]) == 2
    )
    assert own["reward/mean"] == pytest.approx(sum(own["lengths"]) / 2), (
        "rewards of one's own, of fewer samples"
    )
    runs = [metrics(folder / "runs" / name) for name in ("run", "whole")]
    assert runs[0][:2] == runs[1], "what is written is what train writes"
    assert (folder / "runs" / "run" / "checkpoints").is_dir()
    assert "placement: this program has joined its job with another" in said["refused"]
    # What operators in the built-in step saw and changed.
    for number, step in enumerate(said["steps"]):
        assert f"step {number}: {2 * step['reward']:.4f}" in ended.text


def test_the_first_program_as_it_stands(tmp_path: Path) -> None:
    """`python program.py` in an empty folder: it makes its model and data, and learns."""
    assert FIRST_PROGRAM in (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (tmp_path / "program.py").write_text(FIRST_PROGRAM, encoding="utf-8")
    command, run = [sys.executable, "program.py"], tmp_path / "runs" / "quickstart_ppo"
    where = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=where,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^Step (\d+), Reward: (.+)$", done.stdout, flags=re.MULTILINE)
    records = read_metrics(run / "metrics.jsonl")
    assert [int(step) for step, _ in found] == list(
        range(get_ppo_config().max_steps or 0)
    )
    rewards = [float(reward) for _, reward in found]
    assert rewards == [
        record["reward/mean"] for record in records if "reward/mean" in record
    ]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5]), "it has learnt"
    assert (run / "hf" / "config.json").is_file() and "validation/accuracy" in records[
        -1
    ]
    before = (run / "inputs" / "model" / "model.safetensors").stat()
    resolve(get_ppo_config(output_dir=tmp_path / "runs"))
    assert (run / "inputs" / "model" / "model.safetensors").stat() == before, (
        "made once"
    )
    resolve(get_ppo_config(output_dir=tmp_path / "runs", seed=1))
    assert (run / "inputs" / "model" / "model.safetensors").stat() != before, (
        "from another seed, another model"
    )


@pytest.mark.parametrize(
    ("end", "codes", "told"),
    [
        ("killed", [1, -9], "TrainingStopped: rank 1 was lost in rollout.generate"),
        (
            "failed",
            [1, 1],
            "TrainingStopped: rank 1 failed in step 1: log: ValueError: a mistake of the user's",
        ),
        ("left", [1, 1], "rank 1 stalls: it was in the end of its program"),
    ],
)
def test_a_rank_that_is_lost(
    launch: Launcher,
    folder: Path,
    tmp_path: Path,
    end: str,
    codes: list[int],
    told: str,
) -> None:
    """The others end with its name, and not with what gloo says; each process by itself, as on nodes of their own."""
    ended = launch.command([PROGRAM, str(folder), end], logs=tmp_path)
    assert ended.codes == codes, ended.text
    assert told in ended.output[0], ended.text
    assert "gloo/transport" not in ended.output[0].splitlines()[-1]


def test_a_flow_on_ranks_of_its_own(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    """Batches move by themselves; a rank has what it made and what it was sent."""
    ended = launch.command([PROGRAM, str(folder), "flow"], logs=tmp_path)
    assert ended.codes == [0, 0], ended.text
    first, second = (json.loads(text.splitlines()[-1]) for text in ended.output)
    assert first == [
        [1 * 2 + 2 * 3, ["rollout", "update"]],
        [3 * 4 + 2 * 3, ["rollout", "update"]],
    ]
    assert second == [[None, ["rewards"]]] * 2


def test_roles_on_ranks_of_their_own(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    """One rank trains, the other generates and scores; both have the samples, and both hear what was measured."""
    ended = launch.command([PROGRAM, str(folder), "placed"], logs=tmp_path)
    assert ended.codes == [0, 0], ended.text
    said = [json.loads(text.splitlines()[-1]) for text in ended.output]
    assert said[0] == said[1]
    count, first, second = said[0]
    # Without a reference.
    short = {"reward": "reward/mean", "loss": "actor/loss", "kl": "actor/approx_kl"}
    assert all(first[name] == first[key] for name, key in short.items())
    assert (
        count == 4
        and first["rollout/weight_version"] == 1.0
        and second["rollout/weight_version"] == 2.0
    )
    records = read_metrics(folder / "runs" / "placed" / "metrics.jsonl")
    assert [record["reward/mean"] for record in records] == [
        first["reward/mean"],
        second["reward/mean"],
    ]
    assert (
        first["time/rollout_ms"] > 0 and {"busy/actor", "busy/rollout"} <= first.keys()
    )
    assert (folder / "runs" / "placed" / "checkpoints" / "step_00000002").is_dir()
    names = {
        event["name"]
        for event in json.loads((folder / "runs/placed/timeline.json").read_text())[
            "traceEvents"
        ]
    }
    assert {"rollout", "reward", "actor_update"} <= names


def test_responses_are_generated_during_the_update_before(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    """The numbers are those of the built-in asynchronous run, also for a program that left and went on."""
    for name in ("ahead_whole", "ahead"):
        ended = launch.command([PROGRAM, str(folder), name], logs=tmp_path)
        assert ended.codes == [0, 0], ended.text
    left = launch.command([PROGRAM, str(folder), "ahead_left"], logs=tmp_path)
    assert left.codes == [SAVED_AND_LEFT] * 2, left.text
    [waiting] = (folder / "runs" / "ahead_left" / "checkpoints").glob("*/ahead_*")
    assert waiting.name == "ahead_00000003.safetensors"
    again = launch.command([PROGRAM, str(folder), "ahead_left"], logs=tmp_path)
    assert again.codes == [0, 0], again.text
    whole, loop, left_and_resumed = (
        metrics(folder / "runs" / name)
        for name in ("ahead_whole", "ahead", "ahead_left")
    )
    assert loop == whole and left_and_resumed == whole
    records = read_metrics(folder / "runs" / "ahead" / "metrics.jsonl")
    assert [record["rollout/staleness"] for record in records] == [0, 1, 1, 1]


def test_told_to_leave_it_saves_and_goes_on(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    """The call under way ends with the documented exit code; started again, the program does only what was left."""
    found = []
    for where, saved in (
        ("in_rollout", "1 of 3 steps, inside step 2"),
        ("between", "2 of 3 steps"),
    ):
        left = launch.command([PROGRAM, str(folder), where], ranks=1, logs=tmp_path)
        assert left.codes == [SAVED_AND_LEFT], left.text
        assert (
            f"SIGTERM: saved after {saved}; start the run again to go on." in left.text
        )
        again = launch.command([PROGRAM, str(folder), where], ranks=1, logs=tmp_path)
        assert again.codes == [0], again.text
        # The program configures logging: there, and only there.
        for line in ("step 3/3 ", "resumed from "):
            assert (
                again.text.count(f"INFO:megaverl:{line}") == again.text.count(line) == 1
            ), again.text
        records = read_metrics(folder / "runs" / where / "metrics.jsonl")
        assert [record["step"] for record in records] == [1, 2, 3]
        assert all(
            record["time/step_ms"] > record["time/rollout_ms"] > 0
            for record in (records[0], records[2])
        )
        found.append(
            [(record["reward/mean"], record["actor/loss"]) for record in records]
        )
    assert found[0] == found[1], "wherever it was cut off, and to the bit"


def test_too_few_ranks_say_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        "megaverl.trainer.preflight.missing_models", lambda config, **asked: []
    )
    from megaverl.config import load_config

    values = {
        "model": {"path": "org/small"},
        "data": {"train": ["t.jsonl"]},
        "reward": "exact_match",
    }
    config = load_config({**values, "actor": {"tp": 2, "pp": 2}}, check_paths=False)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 4 PROGRAM.py"):
        init_distributed(config)
