"""Columns of Parquet that JSON cannot hold, in a run with all that stores and moves rows of its batches."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet

from megaverl.errors import SAVED_AND_LEFT
from megaverl.trainer.stored_rollouts import RolloutFolder
from tests.faults.injector import Fault
from tests.faults.runs import remains
from tests.launcher import Ended, Launcher
from tests.trainer.conftest import command_arguments

COLUMNS = {
    "made": datetime.datetime(2024, 1, 2, 3, 4, 5, 6, datetime.UTC),
    "day": datetime.date(2024, 1, 2),
    "price": Decimal("12.50"),
    "took": datetime.timedelta(minutes=1, milliseconds=500),
}
REWARD = '''
def score(response, made, day, price, took):
    """Different from response to response, and only with the columns as they are documented."""
    assert made.startswith("2024-01-02T03:04:05.000006") and day == "2024-01-02", (made, day)
    assert price == "12.50" and took == 60.5, (price, took)
    return sum(ord(letter) % 7 for letter in response) / 40
'''
STEPS = 4
SETTINGS = [
    "rollout={engine: hf, async_rollout: true, max_staleness: 2}",
    "algorithm={name: grpo, group_size: 2}",
    "actor={tp: 1, optimizer: {lr: 1.0e-3}}",
    "data.prompts_per_step=4",
    f"trainer={{steps: {STEPS}, store_rollouts: true}}",
    "checkpoint={save_interval: 2, keep_last_k: 9}",
    "run={name: run, log_with: jsonl, timeout_minutes: 2}",
    "placement={rollout: 0, reward: 1, actor: 2, coordinator: 2}",
]


def run(
    launch: Launcher,
    inputs: Path,
    tmp_path: Path,
    name: str,
    fault: Fault | None = None,
) -> Ended:
    """One start of a run whose roles have ranks of their own, with engines that work ahead."""
    runs = tmp_path / name
    reward = json.dumps({"function": f"{tmp_path / 'columns.py'}:score"})
    arguments = [
        *command_arguments(inputs, runs),
        f"data.train={tmp_path / 'train.parquet'}",
        f"reward={reward}",
    ]
    given = fault.environment() if fault else {}
    return launch.command(
        ["train", *arguments, *SETTINGS],
        logs=runs / "output",
        ranks=3,
        environment=given,
    )


def test_they_are_stored_moved_and_read_again(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """Roles apart, SIGTERM while samples wait, a second start, and stored rollouts: the bits of an undisturbed run."""
    rows = [
        json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()
    ]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{**row, **COLUMNS} for row in rows]),
        tmp_path / "train.parquet",
    )
    (tmp_path / "columns.py").write_text(REWARD)
    whole = run(launch, inputs, tmp_path, "whole")
    assert whole.codes == [0, 0, 0], whole.text
    left = run(launch, inputs, tmp_path, "left", Fault("term", 2, "actor_update", 3))
    assert left.codes == [SAVED_AND_LEFT] * 3, left.text
    rest = run(launch, inputs, tmp_path, "left")
    assert rest.codes == [0, 0, 0] and "resumed from" in rest.text, rest.text
    expected, found = (
        remains(tmp_path / "whole" / "run"),
        remains(tmp_path / "left" / "run"),
    )
    assert (
        found["weights"] == expected["weights"]
        and found["samples"] == expected["samples"]
    )
    for name in ("whole", "left"):
        stored = RolloutFolder(tmp_path / name / "run" / "rollouts")
        assert sorted(stored.entries()) == list(range(STEPS))
        for step in range(STEPS):
            for extra in stored.read(step).batch.columns["extra"]:
                assert (extra["price"], extra["took"], extra["day"]) == (
                    "12.50",
                    60.5,
                    "2024-01-02",
                )
