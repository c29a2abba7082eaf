"""A rank that fails or stalls ends all others with its name, and with what it was doing."""

from __future__ import annotations

from pathlib import Path

from tests.faults.injector import Fault
from tests.faults.points import SHORT_WAIT, finish, hit
from tests.faults.runs import Remains
from tests.launcher import Launcher


def test_failed_and_stalled(
    launch: Launcher, inputs: Path, expected: Remains, tmp_path: Path
) -> None:
    failed = hit(launch, inputs, tmp_path, Fault("exception", 1, "reward", 2))
    assert failed.wrong == [] and failed.ended.codes == [1, 1]
    assert (
        "rank 1 failed in reward.score, step 2: reward: Injected: injected into reward"
        in failed.ended.text
    )
    stalled = hit(launch, inputs, tmp_path, Fault("stall", 0, "values", 2), SHORT_WAIT)
    assert stalled.wrong == [] and stalled.ended.codes == [1, 1]
    for said in (
        "rank 0 stalls: it was in step 2: values",
        "injector.py",
        "(stall)",
        "run.timeout_minutes",
        "Call: critic.values",
    ):
        assert said in stalled.ended.text
    ended, wrong = finish(launch, inputs, tmp_path, expected)
    assert wrong == [], ended


def test_a_writer_that_stalls(
    launch: Launcher, inputs: Path, expected: Remains, tmp_path: Path
) -> None:
    """A hung file system: the update waits for the weights that are being written, and the other rank for that."""
    stalled = hit(
        launch,
        inputs,
        tmp_path,
        Fault("stall", 1, "checkpoint_write", 2, byte=5_000),
        SHORT_WAIT,
    )
    assert stalled.wrong == [] and stalled.ended.codes == [1, 1]
    assert "rank 1 was in step 3: checkpoint_write" in stalled.ended.text
    ended, wrong = finish(launch, inputs, tmp_path, expected)
    assert wrong == [], ended
