"""Row groups of Parquet files: kept within a budget, decoded once for a step, and always the same rows."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megaverl.data import row_groups, sources
from megaverl.data.datasets import PromptDataset
from megaverl.data.prompts import PromptEncoder, PromptFormat
from megaverl.data.row_groups import RowGroupCache
from megaverl.data.sources import ParquetFile
from megaverl.data.streaming import PromptStream
from megaverl.data.tokenizers import Tokenizer
from megaverl.errors import DataError

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
    rows = [
        {"prompt": f"a {number}", "answer": str(number)} for number in range(NUM_ROWS)
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(
        table, tmp_path / "rows.parquet", row_group_size=NUM_ROWS // NUM_GROUPS
    )
    return tmp_path / "rows.parquet"


def open_stream(path: Path, cache: RowGroupCache, tokenizer: Tokenizer) -> PromptStream:
    dataset = PromptDataset(
        ParquetFile(path, cache),
        PromptEncoder(tokenizer, PromptFormat(chat_template="none")),
    )
    return PromptStream(dataset, dataset.sampler(16, seed=3))


@pytest.mark.parametrize(("budget", "most"), [(None, 1), (0, 4)])
def test_groups_are_decoded_once_in_all_or_once_a_step(
    budget: int | None, most: int, path: Path, tokenizer: Tokenizer
) -> None:
    cache = CountingCache(budget)
    stream = open_stream(path, cache, tokenizer)
    taken = [record.prompt for _ in range(3) for record in stream.take(16)]
    assert taken == [f"a {number}" for number in stream.sampler.rows(0, 48)], (
        "the order is the sampler's"
    )
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


def write_bomb(
    kind: str, path: Path, num_rows: int = 64, num_letters: int = 2**20
) -> None:
    """Write rows of the same long text, which take some kilobytes in the file.

    Args:
        kind: "page": in compressed pages, whose size the footer says; "repeated": the text once, for all rows.
    """
    text = "7" * num_letters
    answers = [str(number) for number in range(num_rows)]
    if kind == "page":
        table = pyarrow.table({"prompt": [text] * num_rows, "answer": answers})
        pyarrow.parquet.write_table(
            table, path, compression="zstd", use_dictionary=False
        )
        return
    column = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * num_rows, pyarrow.int32()), [text]
    )
    table = pyarrow.table({"prompt": column, "answer": answers})
    pyarrow.parquet.write_table(
        table, path, compression="zstd", store_schema=False
    )  # else it is read as it was written


@pytest.mark.parametrize("kind", ["page", "repeated"])
@pytest.mark.parametrize("reads", ["row", "front"])
def test_a_small_file_that_decodes_to_gigabytes_is_refused(
    kind: str,
    reads: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """It stops before the pages are decompressed, or at the rows that are too many."""
    monkeypatch.setattr(row_groups, "MAX_UNSUSPICIOUS_BYTES", 2**22)
    monkeypatch.setattr(sources, "DECODED_ROWS", 2)
    path = tmp_path / "bomb.parquet"
    write_bomb(kind, path)
    assert path.stat().st_size < 100_000
    default, pool = (
        pyarrow.default_memory_pool(),
        pyarrow.proxy_memory_pool(pyarrow.default_memory_pool()),
    )
    pyarrow.set_memory_pool(pool)
    request.addfinalizer(lambda: pyarrow.set_memory_pool(default))
    rows = ParquetFile(path, RowGroupCache(0))
    with pytest.raises(
        DataError,
        match=r"bomb.parquet, row 1: its row group decodes to more than .* smaller row groups",
    ):
        rows[0] if reads == "row" else list(rows.front(0, 16))
    assert (pool.max_memory() or 0) < 2**25, "of the 2**26 bytes that the rows have"


def test_a_group_that_does_not_fit_into_memory_is_refused(path: Path) -> None:
    bound = row_groups.GroupBound(stored=900, free_bytes=2000)
    bound.add(600)
    with pytest.raises(
        ValueError,
        match="decodes to more than 1,100 bytes, and 1,000 is half of the memory",
    ):
        bound.add(500)
    large = row_groups.GroupBound(stored=2**30, free_bytes=2**42)
    large.check(100 * 2**30)


def test_large_groups_are_the_same_rows(tmp_path: Path) -> None:
    """More than one batch, lists and mappings and nulls in them."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"a {number}"}],
            "answer": None if number % 3 else [number],
        }
        for number in range(sources.DECODED_ROWS + 10)
    ]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet"
    )
    read = ParquetFile(tmp_path / "rows.parquet", RowGroupCache(0))
    assert [read[number] for number in range(len(read))] == rows


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays(
        [pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"]
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(
        DataError, match="rows.parquet: more than one column has the name 'prompt'"
    ):
        ParquetFile(tmp_path / "rows.parquet", RowGroupCache(0))
