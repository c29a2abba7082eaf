"""Stored rollouts: a run replayed without its engine takes the same updates to the bit, and generation runs alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.faults.injector import Fault
from tests.faults.points import hit
from tests.faults.runs import STEPS, Remains, arguments, metrics, remains
from tests.launcher import Launcher
from tools.same_numbers import is_cost, read_records

GENERATION = ("rollout/", "validation/", "reshard/")
NAMES = [f"step_{step:08d}.safetensors" for step in range(1, STEPS + 1)]


# Of metrics that two runs do not share.
FAMILIES = ("time/", "memory/", "busy/", "comm/")


def updates(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured of rewards and updates."""
    kept = [
        {k: v for k, v in record.items() if not k.startswith(GENERATION)}
        for record in found
    ]
    return [record for record in kept if "reward/mean" in record]


def test_what_two_runs_do_not_share(undisturbed: Path) -> None:
    """Of a real run's metrics the rule leaves out those of these families and names, and no other."""
    names = set().union(*read_records(undisturbed / "run" / "metrics.jsonl"))
    others = {name for name in names if is_cost(name) and not name.startswith(FAMILIES)}
    steps = {
        "time",
        "train/step_time_ms",
        "train/tokens_per_sec",
        "reward/latency_ms",
        "reshard/seconds",
    }
    steps |= {"train/tokens_per_gpu_per_sec", "train/tflop_per_gpu_per_sec"}
    assert others == steps | {"rollout/seconds", "rollout/throughput_tokens_per_sec"}
    assert not [
        name for name in names if name.startswith(FAMILIES) and not is_cost(name)
    ]


def bytes_of(run: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in (run / "rollouts").glob("*.safetensors")
    }


def test_a_replayed_run_takes_the_same_updates(
    launch: Launcher, inputs: Path, undisturbed: Path, expected: Remains, tmp_path: Path
) -> None:
    stored = undisturbed / "run" / "rollouts"
    ended = launch.command(
        arguments(inputs, tmp_path, "--replay-rollouts", str(stored)),
        logs=tmp_path / "output",
    )
    assert ended.codes == [0, 0], ended.output
    found = remains(tmp_path / "run")
    for name in ("weights", "state", "common"):
        assert found[name] == expected[name], name
    assert len(updates(expected["metrics"])) == STEPS
    assert updates(found["metrics"]) == updates(expected["metrics"])


def test_a_replay_that_was_killed_goes_on(
    launch: Launcher, inputs: Path, undisturbed: Path, expected: Remains, tmp_path: Path
) -> None:
    more = ("--replay-rollouts", str(undisturbed / "run" / "rollouts"))
    killed = hit(launch, inputs, tmp_path, Fault("kill", 1, "critic_update", 3), *more)
    assert killed.wrong == []
    ended = launch.command(arguments(inputs, tmp_path, *more), logs=tmp_path / "output")
    assert ended.codes == [0, 0] and "resumed from" in ended.text, ended.output
    found = remains(tmp_path / "run")
    assert (found["weights"], found["state"]) == (
        expected["weights"],
        expected["state"],
    )


def test_generation_alone(
    launch: Launcher, inputs: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The first step's rollouts are those of a training run, with the same weights; then a cut-off one goes on."""
    alone, cut_off = tmp_path / "alone", tmp_path / "cut_off"
    ended = launch.command(
        arguments(inputs, alone, "--rollout-only"), logs=alone / "output"
    )
    assert ended.codes == [0, 0], ended.output
    generated = bytes_of(alone / "run")
    assert sorted(generated) == NAMES and not (alone / "run" / "checkpoints").exists()
    trained = bytes_of(undisturbed / "run")
    assert (
        generated[NAMES[0]] == trained[NAMES[0]]
        and generated[NAMES[1]] != trained[NAMES[1]]
    )
    killed = hit(
        launch, inputs, cut_off, Fault("kill", 0, "reward", 3), "--rollout-only"
    )
    assert killed.wrong == [] and len(bytes_of(cut_off / "run")) == 2
    ended = launch.command(
        arguments(inputs, cut_off, "--rollout-only"), logs=cut_off / "output"
    )
    assert (
        ended.codes == [0, 0]
        and "step 3/4" in ended.text
        and "step 2/4" not in ended.text
    )
    assert bytes_of(cut_off / "run") == generated
    replayed = launch.command(
        arguments(
            inputs, tmp_path, "--replay-rollouts", str(alone / "run" / "rollouts")
        ),
        logs=tmp_path / "output",
    )
    assert replayed.codes == [0, 0], replayed.output
    rewards = [
        record["reward/mean"]
        for record in metrics(tmp_path / "run")
        if "reward/mean" in record
    ]
    assert len(rewards) == STEPS


def test_what_cannot_be_replayed_is_said_before_training(
    launch: Launcher, inputs: Path, undisturbed: Path, tmp_path: Path
) -> None:
    stored = Path(
        shutil.copytree(undisturbed / "run" / "rollouts", tmp_path / "stored")
    )
    data = bytearray((stored / NAMES[1]).read_bytes())
    data[-1] ^= 1
    (stored / NAMES[1]).write_bytes(data)
    (stored / NAMES[2]).unlink()
    more = ("--replay-rollouts", str(stored), f"trainer.steps={STEPS + 1}")
    ended = launch.command(arguments(inputs, tmp_path, *more), logs=tmp_path / "output")
    assert ended.codes == [1, 1]
    for said in (
        f"{NAMES[1]} has the checksum",
        f"{NAMES[2]} is missing",
        "step 5 is not in it",
        "trainer.steps",
    ):
        assert said in ended.text
    index = [
        json.loads(line) for line in (stored / "index.jsonl").read_text().splitlines()
    ]
    assert [entry["step"] for entry in index] == list(range(STEPS)), (
        "nothing was changed"
    )
