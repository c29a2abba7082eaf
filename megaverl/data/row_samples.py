"""Bounded samples of a source's rows, for checks before a run starts.

Small sources are sampled by row number: the first rows, and some spread over the
others. Counting the rows of large files would take as long as starting the run, so
these are sampled by position: the front of the first file, then rows after some byte
positions (JSONL) or at the beginning of some row groups (Parquet). For a data set on the
hub, the first rows are streamed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from megaverl.config.run import SourceConfig
from megaverl.data.row_groups import RowGroupCache
from megaverl.data.row_values import parse_row
from megaverl.data.sources import (
    ParquetFile,
    Place,
    expand_paths,
    folder_files,
    kind_of,
    open_source,
)
from megaverl.data.streaming import FilesReader, HubReader, Row
from megaverl.errors import DataError

FIRST_ROWS = 16
SPREAD_ROWS = 16
ANSWER_SECONDS = 5.0  # timeout for the hub's answer
# Sources with more bytes are sampled by position.
LARGE_BYTES = 256 * 2**20
# A longer line of JSONL cannot be a row that fits a model, and is not read to its end.
LONGEST_LINE = 64 * 2**20


class RowSample:
    """Sample of a source's rows. Iterating reads them.

    Args:
        source: the source, with its `limit`.

    Attributes:
        num_rows: rows of the whole source, or None if they were not counted.

    Raises:
        DataError: the source is missing, damaged or empty, or the package that reads it is missing.
    """

    def __init__(self, source: SourceConfig) -> None:
        self.num_rows: int | None = None
        kind = kind_of(source.path)
        if kind in ("files", "folder"):
            files = (
                folder_files(Path(source.path))
                if kind == "folder"
                else expand_paths(source.path)
            )
            if is_large(files):
                self._rows = _by_place(files, source.limit)
                return
        if kind == "hub" and os.environ.get("HF_HUB_OFFLINE", "0").lower() not in (
            "1",
            "true",
            "yes",
            "on",
        ):
            check_reached(source)
            reader = HubReader(source)
            self._rows = islice(
                iter(reader.read, None), min(FIRST_ROWS, source.limit or FIRST_ROWS)
            )
            return
        rows = open_source(source)
        self.num_rows = len(rows)
        self._rows = (
            Row(rows[number], rows.where(number))
            for number in sampled_numbers(self.num_rows)
        )

    def __iter__(self) -> Iterator[Row]:
        return self._rows


def check_reached(source: SourceConfig) -> None:
    """Ask the hub for a data set once. `datasets` would retry for half a minute before it gives up.

    Raises:
        DataError: there is no connection to the hub.
    """
    from huggingface_hub import HfApi

    try:
        HfApi(endpoint=os.environ.get("HF_ENDPOINT")).dataset_info(
            source.path, revision=source.revision, timeout=ANSWER_SECONDS
        )
    # Names of huggingface_hub's HTTP libraries. What else is wrong, `datasets` reports.
    except Exception as error:
        if type(error).__name__ in ("ConnectError", "ConnectionError"):
            raise DataError(
                f"{source.path}: the hub is not reached ({error})."
            ) from error


def is_large(files: Sequence[Path]) -> bool:
    """Return whether the files together have more than `LARGE_BYTES`."""
    return sum(file.stat().st_size for file in files) > LARGE_BYTES


def sampled_numbers(count: int) -> list[int]:
    """Return the numbers of the first rows and of some spread over the others, including the last one."""
    first = range(min(FIRST_ROWS, count))
    further = {
        count - 1 - number * count // SPREAD_ROWS for number in range(SPREAD_ROWS)
    }
    return [*first, *sorted(number for number in further if number >= FIRST_ROWS)]


def _by_place(files: Sequence[Path], limit: int | None) -> Iterator[Row]:
    """Yield rows of large files: from the front of the first file, then from positions all over them.

    Args:
        limit: number of rows of the source that are used. With a limit, only the front is sampled, because later rows
            may be beyond it.
    """
    first = _front(files[0])
    yield from islice(first, min(FIRST_ROWS, limit or FIRST_ROWS))
    if limit is not None:
        return
    total = sum(file.stat().st_size for file in files)
    for number in range(1, SPREAD_ROWS + 1):
        file, position = _place_of(files, number * total // (SPREAD_ROWS + 1))
        row = (
            _group_row(file, position)
            if file.suffix == ".parquet"
            else _row_after(file, position)
        )
        if row is not None:
            yield row


def _place_of(files: Sequence[Path], position: int) -> tuple[Path, int]:
    """Return the file, and the position in it, of a byte offset into all files together."""
    for file in files:
        size = file.stat().st_size
        if position < size:
            return file, position
        position -= size
    return files[-1], 0


def _front(file: Path) -> Iterator[Row]:
    """Yield the rows of a file in order, reading only as far as needed."""
    if file.suffix == ".parquet":
        rows = ParquetFile(file, RowGroupCache(0))
        yield from (
            Row(row, rows.where(number))
            for number, row in enumerate(rows.front(0, FIRST_ROWS))
        )
    else:
        yield from iter(FilesReader([file]).read, None)


def _group_row(file: Path, position: int) -> Row | None:
    """Return the first row of the Parquet row group at about `position`, or None for a file without groups."""
    rows = ParquetFile(file, RowGroupCache(0))
    if not rows.num_groups:
        return None
    group = min(rows.num_groups - 1, position * rows.num_groups // file.stat().st_size)
    columns = next(iter(rows.front(group, 1)), None)
    return None if columns is None else Row(columns, rows.where(rows.first_row(group)))


def _row_after(file: Path, position: int) -> Row | None:
    """Return the row of the first whole line after a byte position of a JSONL file, or None if there is none."""
    with file.open("rb") as stream:
        stream.seek(position)
        if not stream.readline(LONGEST_LINE).endswith(b"\n"):
            if stream.tell() - position < LONGEST_LINE:
                # No whole line follows: this is the last one.
                return None
            raise DataError(
                f"{file}: the line at byte {position} has more than {LONGEST_LINE:,} bytes. Shorten it."
            )
        begin = stream.tell()
        line = stream.readline(LONGEST_LINE)
    if not line.strip():
        return None
    where = Place(f"{file}, the line at byte {begin}", file.parent)
    return Row(parse_row(line, where), where)
