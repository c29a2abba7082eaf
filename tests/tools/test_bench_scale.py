"""The table of docs/scaling.md: a rank's part of a step does not grow with the number of ranks."""

from __future__ import annotations

from tools.bench_scale import everything, own_rows


def test_a_rank_gets_as_much_of_a_larger_step() -> None:
    few, many = own_rows(64, 33), own_rows(256, 129)
    assert many.held < 1.2 * few.held
    assert many.bytes < 1.2 * few.bytes
    assert many.numbers == 4 * few.numbers == 256 * 16 * 41, (
        "a few numbers of each sample"
    )
    assert everything(64, 33).bytes > 10 * few.bytes
