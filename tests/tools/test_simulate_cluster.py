"""A cluster of eight ranks on this machine: what they send, and whom they name when one is killed."""

from __future__ import annotations

from pathlib import Path

from tests.launcher import Launcher

TOOL = Path(__file__).resolve().parents[2] / "tools" / "simulate_cluster.py"


def test_a_lost_rank_of_eight_is_named_by_the_others(
    launch: Launcher, tmp_path: Path
) -> None:
    ended = launch.command(
        [str(TOOL), "--ranks=8", "--faults=lost", "--rest=1"], ranks=1, logs=tmp_path
    )
    assert ended.codes == [0], ended.text
    assert "| rank 2 by 7 of 7 |" in ended.text
