"""Time of reading a shuffled prompt from a Parquet file of one row group and of many, with row groups kept and without.

    python tools/bench_row_groups.py --rows 100000 --groups 1 10 100

Both sides come from the same run: `kept` is what a run does, `one at a time` keeps only the group that was read last.
The limit is the file of one row group, where nothing is decoded twice.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet

from megaverl.data.row_groups import RowGroupCache
from megaverl.data.sources import ParquetFile


def write_file(path: Path, num_rows: int, num_groups: int) -> None:
    """Write rows of about 500 characters."""
    draw = random.Random(0)
    words = [f"word{number}" for number in range(1000)]
    prompts = [" ".join(draw.choices(words, k=70)) for _ in range(num_rows)]
    table = pyarrow.table(
        {"prompt": prompts, "answer": [str(number) for number in range(num_rows)]}
    )
    pyarrow.parquet.write_table(table, path, row_group_size=-(-num_rows // num_groups))


def milliseconds(rows: ParquetFile, order: Sequence[int]) -> float:
    """Return the time of reading one row, after every row was read once, as at the start of a run."""
    for number in range(len(rows)):
        rows[number]
    start = time.perf_counter()
    for number in order:
        rows[number]
    return (time.perf_counter() - start) * 1000 / len(order)


def main() -> None:
    """Print one line for each number of row groups."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--prompts", type=int, default=200)
    arguments = parser.parse_args()
    order = random.Random(1).sample(range(arguments.rows), arguments.prompts)
    print(f"{'row groups':>10}  {'one at a time':>15}  {'kept':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for num_groups in arguments.groups:
            path = Path(folder) / f"{num_groups}.parquet"
            write_file(path, arguments.rows, num_groups)
            single = milliseconds(ParquetFile(path, RowGroupCache(0)), order)
            kept = milliseconds(ParquetFile(path), order)
            print(f"{num_groups:>10}  {single:>12.3f} ms  {kept:>7.3f} ms")


if __name__ == "__main__":
    main()
