"""Buffers that are gathered and scattered by sends between pairs of ranks."""

from __future__ import annotations

import pytest
import torch

from tests.launcher import Launcher
from tests.platform.exchange_ranks import drawn

RANKS = "tests.platform.exchange_ranks"


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.04)]
)
def test_every_rank_gets_its_sum_and_the_whole(
    launch: Launcher, dtype: str, tolerance: float, size: int, in_place: bool
) -> None:
    for found in launch.world(
        size, f"{RANKS}:exchanged", dtype=dtype, in_place=in_place
    ):
        assert found == {
            "sum": pytest.approx(0, abs=tolerance),
            "same": True,
            "whole": True,
        }


@pytest.mark.skipif(torch.cuda.is_available(), reason="adapts a CPU")
def test_megatron_core_takes_it_where_it_waits_and_the_numbers_are_the_same(
    launch: Launcher,
) -> None:
    sums = sum(drawn(rank, 3, torch.float32) for rank in range(3))
    for found in launch.world(3, f"{RANKS}:by_megatron_core"):
        assert found["at once"]["directly"] == 2 * 2, "two peers, twice"
        assert found["in the background"]["directly"] == 0
        for way in found.values():
            torch.testing.assert_close(torch.tensor(way["whole"]).view(3, 5), sums)
