"""Digests by which a resumed run detects that its data changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaverl.data.prompts import RowColumns

WHOLE_FILE = 16 * 2**20
"""Bytes of a file up to which all of it is read; of larger ones samples."""

# Number and bytes of samples that are read of a large file.
NUM_SAMPLES = 64
SAMPLE = 16 * 2**10
# Bytes read at the beginning and in the middle of every column chunk of a Parquet file.
CHUNK_SAMPLE = 4 * 2**10


class RowsDigest:
    """Digest of rows as a run reads them. Covers every value, and images by their contents."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, row: RowColumns) -> None:
        """Add the next row."""
        images = [image.key for image in row.images or ()]
        content = [row.prompt, row.reference, row.tools, row.extra, images]
        self._hash.update(json.dumps(content, sort_keys=True).encode())

    def value(self) -> str:
        """Return the digest of all rows added so far."""
        return self._hash.hexdigest()


def digest_of_rows(rows: Iterable[Any]) -> str:
    """Return a digest of raw rows of a source, before their columns are parsed."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        try:
            text = json.dumps(row, sort_keys=True, default=_shortened)
        # Such rows are refused later, when their columns are read.
        except (TypeError, ValueError, RecursionError):
            text = "unreadable"
        digest.update(text.encode())
    return digest.hexdigest()


def _shortened(value: Any) -> str:
    """Return a text for a value that JSON cannot hold. Bytes are replaced by their digest."""
    return (
        hashlib.blake2b(value, digest_size=8).hexdigest()
        if isinstance(value, bytes)
        else repr(value)
    )


def digest_of_files(files: Sequence[Path]) -> str:
    """Return a digest of files that reads at most about 20 MiB of each.

    It covers the size of every file, all bytes of files up to `WHOLE_FILE`, and
    `NUM_SAMPLES` samples of larger ones. For Parquet files it also covers the footer,
    with the statistics of every column chunk, and samples of every chunk.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{size} ".encode())
        with path.open("rb") as stream:
            for start, length in _samples(path, size):
                stream.seek(start)
                digest.update(stream.read(length))
    return digest.hexdigest()


def written_times(files: Sequence[Path]) -> dict[str, int]:
    """Return modification times of files that `digest_of_files` only samples, in nanoseconds since 1970."""
    times: dict[str, int] = {}
    for path in files:
        status = path.stat()
        if status.st_size > WHOLE_FILE:
            times[str(path)] = status.st_mtime_ns
    return times


def _samples(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of everything that is read of a file."""
    if size <= WHOLE_FILE:
        yield 0, size
        return
    for number in range(NUM_SAMPLES):
        yield number * (size - SAMPLE) // (NUM_SAMPLES - 1), SAMPLE
    if path.suffix == ".parquet":
        yield from _parquet_samples(path, size)


def _parquet_samples(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of a Parquet file's footer and of samples of every column chunk."""
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(path)
    yield size - metadata.serialized_size - 8, metadata.serialized_size + 8
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            length = min(CHUNK_SAMPLE, column.total_compressed_size)
            start = column.dictionary_page_offset or column.data_page_offset
            yield start, length
            yield start + (column.total_compressed_size - length) // 2, length
