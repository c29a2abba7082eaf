"""Killed, asked to leave, stalled or failed: started again, a run ends with the bits of one that nothing happened to.

The points here are hit one after the other in one run, which ends right only if it went
on right from every one. `tools/fault_campaign.py` tries each by itself, and the others
too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.points import POINTS, finish, hit
from tests.faults.runs import Remains, arguments, differences, remains
from tests.launcher import Launcher


def test_two_runs_are_the_same(
    launch: Launcher, inputs: Path, expected: Remains, tmp_path: Path
) -> None:
    """Blocking saves change nothing either."""
    ended = launch.command(
        arguments(inputs, tmp_path, "checkpoint.async_save=false"),
        logs=tmp_path / "output",
    )
    assert ended.codes == [0, 0], ended.output
    assert differences(remains(tmp_path / "run"), expected) == []


@pytest.mark.parametrize(
    "names",
    [
        [
            "first update",
            "copy of a checkpoint",
            "before the rename",
            "byte 400,000",
            "prune",
        ],
        [
            "reshard, rank 0",
            "after the last byte",
            "inside the rollout",
            "after the rename",
        ],
    ],
    ids=["one", "other"],
)
def test_killed_again_and_again(
    launch: Launcher, inputs: Path, expected: Remains, tmp_path: Path, names: list[str]
) -> None:
    for name in names:
        found = hit(launch, inputs, tmp_path, POINTS[name])
        assert found.happened and found.wrong == [], (name, found)
    ended, wrong = finish(launch, inputs, tmp_path, expected)
    assert wrong == [], ended
