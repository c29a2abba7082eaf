"""The test worlds themselves: a harness that hides a failure would hide all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import worlds
from tests.worlds import WorldError

Run = Callable[..., list[Any]]
RANKS = "tests.worlds_ranks"


def test_world_is_kept_between_jobs_and_collectives_work(world: Run, tmp_path: Path) -> None:
    first = world(2, f"{RANKS}:count_calls", scale=5, path=tmp_path)
    second = world(2, f"{RANKS}:count_calls", scale=7)
    assert [r["rank"] for r in first] == [0, 1]
    assert [r["total"] for r in first] == [5, 5] and [r["total"] for r in second] == [7, 7]
    assert [r["pid"] for r in first] == [r["pid"] for r in second]
    assert [b["calls"] - a["calls"] for a, b in zip(first, second, strict=True)] == [1, 1]
    assert first[0]["path"] == str(tmp_path)


def test_fresh_world_is_new(world: Run) -> None:
    [kept] = world(1, f"{RANKS}:count_calls", scale=1)
    [fresh] = world(1, f"{RANKS}:count_calls", scale=1, fresh=True)
    assert fresh["calls"] == 1 and fresh["pid"] != kept["pid"]


def test_raising_rank_fails_with_its_traceback_and_the_world_restarts(
    world: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "GRACE_AFTER_ERROR", 1.0)
    with pytest.raises(WorldError) as caught:
        world(2, f"{RANKS}:raise_on", rank=1)
    message = str(caught.value)
    assert "rank 1 raised" in message and "broken on purpose on rank 1" in message
    assert "ranks [0] did not answer" in message and "barrier" in message  # the stack of the one left waiting
    assert [r["calls"] for r in world(2, f"{RANKS}:count_calls", scale=1)] == [1, 1]


def test_hang_is_cut_and_shows_the_stack(world: Run) -> None:
    with pytest.raises(WorldError) as caught:
        world(2, f"{RANKS}:hang_on", rank=0, deadline=2.0)
    message = str(caught.value)
    assert "ranks [0] did not answer within 2 s" in message and "wait_forever" in message


def test_dead_rank_is_named(world: Run) -> None:
    with pytest.raises(WorldError, match="rank 0 ended with exit code 3"):
        world(1, f"{RANKS}:die_on", rank=0)


def test_result_must_be_json(world: Run) -> None:
    with pytest.raises(WorldError, match="Tensor is not JSON serializable"):
        world(1, f"{RANKS}:return_a_tensor")
