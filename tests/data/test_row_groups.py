"""Row groups of Parquet files: kept within a budget, decoded once for a step, and always the same rows."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megaverl.data.datasets import PromptDataset
from megaverl.data.prompts import PromptEncoder, PromptFormat
from megaverl.data.row_groups import RowGroupCache
from megaverl.data.sources import ParquetFile
from megaverl.data.streaming import PromptStream
from megaverl.data.tokenizers import Tokenizer

NUM_ROWS, NUM_GROUPS = 40, 10


class CountingCache(RowGroupCache):
    """Cache that counts how often each group is decoded."""

    def __init__(self, budget: int | None) -> None:
        super().__init__(budget)
        self.loads: Counter[int] = Counter()

    def get(self, key: tuple[int, int], load: Any) -> Any:
        def counted() -> Any:
            self.loads[key[1]] += 1
            return load()

        return super().get(key, counted)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = [{"prompt": f"a {number}", "answer": str(number)} for number in range(NUM_ROWS)]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=NUM_ROWS // NUM_GROUPS)
    return tmp_path / "rows.parquet"


def open_stream(path: Path, cache: RowGroupCache, tokenizer: Tokenizer) -> PromptStream:
    dataset = PromptDataset(ParquetFile(path, cache), PromptEncoder(tokenizer, PromptFormat(chat_template="none")))
    return PromptStream(dataset, dataset.sampler(16, seed=3))


@pytest.mark.parametrize(("budget", "most"), [(None, 1), (0, 4)])
def test_groups_are_decoded_once_in_all_or_once_a_step(
    budget: int | None, most: int, path: Path, tokenizer: Tokenizer
) -> None:
    cache = CountingCache(budget)
    stream = open_stream(path, cache, tokenizer)
    taken = [record.prompt for _ in range(3) for record in stream.take(16)]
    assert taken == [f"a {number}" for number in stream.sampler.rows(0, 48)], "the order is the sampler's"
    assert max(cache.loads.values()) <= most, "at the start, and for each step"


def test_a_cache_stays_within_its_budget_and_forgets_files(path: Path) -> None:
    size = pyarrow.parquet.ParquetFile(path).read_row_group(0).nbytes
    cache = CountingCache(3 * size + size // 2)
    rows = ParquetFile(path, cache)
    for number in (0, 4, 8, 0, 12):  # groups 0, 1, 2, 0, 3
        rows[number]
    assert cache._num_bytes <= 3 * size + size // 2
    rows[0]
    assert cache.loads == {0: 1, 1: 1, 2: 1, 3: 1}
    rows[4]
    assert cache.loads[1] == 2, "the one that was not used for longest is gone"
    del rows
    gc.collect()
    assert cache._num_bytes == 0 and not cache._tables
