"""Bytes of collectives, counted on real ranks."""

from __future__ import annotations

import pytest

from tests.launcher import Launcher


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 4}, {"tp": 2, "dp": 2}], ids=str)
def test_bytes_that_each_collective_receives(
    launch: Launcher, sizes: dict[str, int]
) -> None:
    """... by the algorithm that moves the least. Messages between hosts and groups without a name do not count."""
    world, size = sizes["tp"] * sizes.get("dp", 1), sizes["tp"]
    for found in launch.world(
        world, "tests.distributed.group_ranks:counted_collectives", sizes=sizes
    ):
        rank = found.pop("rank")
        others = size - 1
        assert found == pytest.approx(
            {
                "all_reduce": 2 * others / size * 24,
                "all_gather": others * 24,
                "all_gather_into_tensor": others * 12,
                "reduce_scatter_tensor": others * 24,
                "broadcast": 24 if rank else 0,
                "all_to_all_single": others * 24,
                "uneven": 4 * (sum(range(1, size + 1)) - (rank + 1)),
                "send_and_receive": 24,
                "nameless": 0,
                "json": 0,
            }
        )
