"""A disk that is full, read-only or gone: said at the next step, the last whole checkpoint kept, on or stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.injector import GONE, Fault
from tests.faults.points import finish, hit
from tests.faults.runs import Remains, differences, remains
from tests.launcher import Launcher

FULL = Fault("full", 1, "checkpoint_write", 2, byte=5_000)
READ_ONLY = Fault("readonly", 0, "checkpoint_commit", 2, byte=100)


def names(runs: Path) -> list[str]:
    return sorted(
        path.name for path in (runs / "run" / "checkpoints").iterdir() if path.is_dir()
    )


def test_a_full_disk_stops_the_run(
    launch: Launcher, inputs: Path, expected: Remains, tmp_path: Path
) -> None:
    """The write goes on in the background; that it failed is told before another one begins."""
    found = hit(launch, inputs, tmp_path, FULL)
    assert found.happened and found.ended.codes == [1, 1]
    output = found.ended.text
    assert "step 2/4" in output and "step 4/4" not in output
    for said in (
        "step_00000002.tmp: the checkpoint was not written: rank 1: OSError: [Errno 28] No space",
        "free space",
    ):
        assert said in output
    assert names(tmp_path) == ["step_00000001"]
    ended, wrong = finish(launch, inputs, tmp_path, expected)
    assert wrong == [], ended


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (FULL, "rank 1: OSError: [Errno 28] No space"),
        (READ_ONLY, "[Errno 30] Read-only file system"),
    ],
    ids=["full", "read-only"],
)
def test_or_the_run_goes_on(
    launch: Launcher,
    inputs: Path,
    expected: Remains,
    tmp_path: Path,
    fault: Fault,
    said: str,
) -> None:
    found = hit(launch, inputs, tmp_path, fault, "checkpoint.on_write_error=continue")
    assert found.happened and found.ended.codes == [0, 0], found.ended.output
    assert (
        said in found.ended.text and "The run continues without it" in found.ended.text
    )
    assert differences(remains(tmp_path / "run"), expected) == []


def test_a_folder_that_vanished(
    launch: Launcher, inputs: Path, expected: Remains, tmp_path: Path
) -> None:
    """An unmounted file system is not taken for an empty one."""
    folder = tmp_path / "run" / "checkpoints"
    found = hit(
        launch,
        inputs,
        tmp_path,
        Fault("vanish", 0, "checkpoint_copy", 3, folder=str(folder)),
    )
    assert found.happened and found.ended.codes == [1, 1]
    assert f"the folder {folder} has vanished" in found.ended.text
    assert "still mounted?" in found.ended.text and not folder.exists()
    folder.with_name(folder.name + GONE).rename(folder)
    ended, wrong = finish(launch, inputs, tmp_path, expected)
    assert wrong == [], ended
