"""What bench_aggregates prints."""

from __future__ import annotations

from tools import bench_aggregates


def test_the_table_shows_both_sides() -> None:
    row = {"by_coordinator": 4e6, "by_islands": 2e6, "island_state": 0}
    results = {
        "parameters": 5e6,
        "dtype": "bfloat16",
        "islands": 2,
        "coordinators": 1,
        "statistics": {**row, "seconds": 0.2, "coordinator_state": 0},
        "gradients": {**row, "seconds": 0.1, "coordinator_state": 9e6},
    }
    head, _, *sides = bench_aggregates.table(results).splitlines()
    assert head.startswith("5.0 million parameters in bfloat16, 2 islands")
    assert [side.split() for side in sides] == [
        ["statistics", "200", "4.0", "2.0", "0.0", "0.0"],
        ["gradients", "100", "4.0", "2.0", "0.0", "9.0"],
    ]
