"""One rank's last words: whatever goes wrong before or outside the run itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megaverl.cli.train import exit_code, run_rank
from megaverl.config import Config
from megaverl.errors import ConfigError, DataError, GridError
from tests.launcher import Launcher

ROOT = Path(__file__).parents[2]


def rank(run_dir: Path, prelude: str = "") -> subprocess.CompletedProcess[str]:
    """A rank in a process of its own, for it ends that process."""
    code = f"""
import sys
{prelude}
from megaverl.cli.train import run_rank
from megaverl.config import Config
run_rank(Config(run={{"dir": {str(run_dir)!r}}}), "train", {{}}, 0)
"""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )


def test_exit_codes():
    assert [
        exit_code(error)
        for error in (ConfigError(), GridError(), DataError(), ValueError())
    ] == [2, 2, 1, 1]


def test_a_failure_before_the_run_is_one_message_and_a_traceback_in_the_log(tmp_path):
    done = rank(tmp_path, "sys.modules['torch'] = None  # as if it were not installed")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr and "rank_0.log" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


def test_a_failure_without_a_place_for_the_log(
    launch: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    ended = launch.ranks(1, "tests.cli.test_ranks:fail", run_dir=tmp_path / "file")
    assert ended.codes == [1]
    assert ended.text.startswith("error: rank 0: ") and "no log of it" in ended.text
    assert "Traceback" not in ended.text


def fail(run_dir: str) -> None:
    run_rank(Config(run={"dir": run_dir}), "train", {}, 0)
