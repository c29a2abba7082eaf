"""The launcher itself: a harness that hides a failure would hide all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import launcher
from tests.launcher import TIMED_OUT, Launcher, WorldError

RANKS = "tests.launcher_ranks"


def test_world_is_kept_between_jobs_and_collectives_work(
    launch: Launcher, tmp_path: Path
) -> None:
    first = launch.world(2, f"{RANKS}:count_calls", scale=5, path=tmp_path)
    second = launch.world(2, f"{RANKS}:count_calls", scale=7)
    assert [r["rank"] for r in first] == [0, 1]
    assert [r["total"] for r in first] == [5, 5] and [r["total"] for r in second] == [
        7,
        7,
    ]
    assert [r["pid"] for r in first] == [r["pid"] for r in second]
    assert [b["calls"] - a["calls"] for a, b in zip(first, second, strict=True)] == [
        1,
        1,
    ]
    assert first[0]["path"] == str(tmp_path)


def test_fresh_world_is_new(launch: Launcher) -> None:
    [kept] = launch.world(1, f"{RANKS}:count_calls", scale=1)
    [fresh] = launch.world(1, f"{RANKS}:count_calls", scale=1, fresh=True)
    assert fresh["calls"] == 1 and fresh["pid"] != kept["pid"]
    assert Path(kept["left"]).exists() and not Path(fresh["left"]).exists()


def test_raising_rank_fails_with_its_traceback_and_the_world_restarts(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GRACE_AFTER_ERROR", 1.0)
    with pytest.raises(WorldError) as caught:
        launch.world(2, f"{RANKS}:raise_on", rank=1)
    message = str(caught.value)
    assert "rank 1 raised" in message and "broken on purpose on rank 1" in message
    # The stack of the one left waiting.
    assert "ranks [0] did not answer" in message and "barrier" in message
    assert [r["calls"] for r in launch.world(2, f"{RANKS}:count_calls", scale=1)] == [
        1,
        1,
    ]


def test_hang_is_cut_and_shows_the_stack(launch: Launcher) -> None:
    with pytest.raises(WorldError) as caught:
        launch.world(2, f"{RANKS}:hang_on", rank=0, deadline=2.0)
    message = str(caught.value)
    assert (
        "ranks [0] did not answer within 2 s" in message and "wait_forever" in message
    )


def test_dead_rank_is_named(launch: Launcher) -> None:
    with pytest.raises(WorldError, match="rank 0 ended with exit code 3"):
        launch.world(1, f"{RANKS}:die_on", rank=0)


def test_result_must_be_json(launch: Launcher) -> None:
    with pytest.raises(WorldError, match="Tensor is not JSON serializable"):
        launch.world(1, f"{RANKS}:return_a_tensor")


def test_ranks_are_copies_that_find_everything_imported(launch: Launcher) -> None:
    assert launch.world(1, f"{RANKS}:imported_before", fresh=True) == [[True, True]]
    # Torch, for the group.
    assert launch.world(1, f"{RANKS}:imported_before", bare=True) == [[True, False]]
    assert launch.ranks(1, f"{RANKS}:imported_before").check() == [[True, True]]


def test_ranks_end_by_themselves(launch: Launcher, tmp_path: Path) -> None:
    """Each has a code, a result and output of its own; none is ended with another, until the deadline."""
    ended = launch.ranks(4, f"{RANKS}:end_each_in_its_way", deadline=2.0, path=tmp_path)
    assert ended.codes == [0, 7, -9, -9] and ended.results == [
        [0, str(tmp_path)],
        None,
        None,
        None,
    ]
    assert (
        ended.output[0] == "rank 0 of 4\n"
        and ended.output[3] == f"rank 3 of 4\n{TIMED_OUT}\n"
    )
    assert max(ended.seconds[:3]) < 2.0 <= ended.seconds[3] and ended.spread > 0
    with pytest.raises(AssertionError, match="rank 1 ended with 7\nrank 1 of 4"):
        ended.check()


def test_a_rank_that_is_stopped_and_alone_is_killed(launch: Launcher) -> None:
    ended = launch.ranks(2, f"{RANKS}:stop_or_raise")
    assert ended.codes == [-9, 1] and "ValueError: no process group" in ended.output[1]
