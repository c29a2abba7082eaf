"""A rank that dies or stalls in the middle of a reshard ends the others, which name it and use nothing inconsistent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launcher import Launcher, WorldError

RANKS = "tests.weights.transport_ranks"


@pytest.mark.parametrize(
    ("how", "lost", "moves"),
    [("kill", 1, "network"), ("stop", 2, "background"), ("kill", 3, "files")],
)
def test_the_others_end_and_name_it(
    launch: Launcher, tmp_path: Path, how: str, lost: int, moves: str
) -> None:
    options = {
        "network": {},
        "background": {"background": True},
        "files": {"files": tmp_path / "files"},
    }[moves]
    with pytest.raises(WorldError, match=f"rank {lost} ended with exit code -9"):
        launch.world(
            4,
            f"{RANKS}:lose_a_rank",
            fresh=True,
            how=how,
            lost=lost,
            seconds=3.0,
            folder=tmp_path,
            **options,
        )
    for rank in {0, 1, 2, 3} - {lost}:
        message, refusal, version, _ = (
            (tmp_path / f"{rank}.txt").read_text().splitlines()
        )
        assert re.match(
            f"rank {lost} died or stalled while the weights of version 2 moved", message
        ), message
        assert re.search(r"(receiving|sending|reading) \S+ \[\d+:\d+.*rank", message), (
            message
        )
        assert (
            "the engine's weights are inconsistent: the reshard from version 1 to 2 failed"
            in refusal
        )
        assert version == "1"
