"""Rows of JSONL and Parquet files by number: read when asked for, not held in memory."""

from __future__ import annotations

import glob
import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megaverl.errors import DataError

SUFFIXES = (".jsonl", ".parquet")


class RowSource(Protocol):
    """Rows with a number each; `where` names a row as its reader would look for it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str: ...

    @property
    def fingerprint(self) -> str:
        """Changes when the rows do."""
        ...


class JsonlFile:
    """One JSON object a line. Memory: 12 bytes a row (where its line starts, and its number)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts = array("Q")
        self._lines = array("L")
        digest = hashlib.blake2b(digest_size=8)
        position = 0
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                digest.update(line)
                if line.strip():
                    self._starts.append(position)
                    self._lines.append(number)
                position += len(line)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, index: int) -> str:
        return f"{self.path}, line {self._lines[index]}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.path.open("rb") as stream:
            stream.seek(self._starts[index])
            line = stream.readline()
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DataError(
                f"{self.where(index)}: not valid JSON ({error}). Each line must hold one whole JSON object; "
                "mend or remove this line."
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f'{self.where(index)}: a JSON object is expected, like {{"prompt": "...", "answer": "..."}}; '
                f"found {_kind(row)}."
            )
        return row


class ParquetFile:
    """One Parquet file; the row group last read stays in memory, the others on disk."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self.path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{path}: not a whole Parquet file ({error}). Copy the file again from its source."
            ) from error
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._ends = _running_sum(sizes)
        self._group: tuple[int, Any] | None = None
        facts = f"{path.stat().st_size} {sizes} {self._file.schema_arrow}"
        self.fingerprint = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def where(self, index: int) -> str:
        return f"{self.path}, row {index + 1}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        import pyarrow

        group = bisect_right(self._ends, index)
        if self._group is None or self._group[0] != group:
            try:
                self._group = (group, self._file.read_row_group(group))
            except (pyarrow.ArrowException, OSError) as error:
                raise DataError(
                    f"{self.where(index)}: the file is damaged ({error}). Copy the file again from its source."
                ) from error
        first = self._ends[group - 1] if group else 0
        return self._group[1].slice(index - first, 1).to_pylist()[0]


class RowList:
    """Rows that are already in memory, such as those of a built-in task."""

    def __init__(self, rows: Sequence[dict[str, Any]], name: str = "rows") -> None:
        self._rows = rows
        self.name = name
        text = json.dumps(list(rows), sort_keys=True, default=str)
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


class RowChain:
    """Several sources, one after another."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self._sources = sources
        self._ends = _running_sum([len(source) for source in sources])
        joined = " ".join(source.fingerprint for source in sources)
        self.fingerprint = hashlib.blake2b(joined.encode(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _find(self, index: int) -> tuple[RowSource, int]:
        number = bisect_right(self._ends, index)
        return self._sources[number], index - (self._ends[number - 1] if number else 0)

    def where(self, index: int) -> str:
        source, local = self._find(index)
        return source.where(local)

    def __getitem__(self, index: int) -> dict[str, Any]:
        source, local = self._find(index)
        return source[local]


def expand_paths(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files that `paths` name, each a file or a pattern such as `data/*.jsonl` (sorted).

    Raises:
        DataError: a file that is not there, a pattern that nothing matches, or a suffix that is not read
            here.
    """
    files: list[Path] = []
    for entry in [paths] if isinstance(paths, str | Path) else paths:
        if Path(entry).is_file():
            found = [Path(entry)]
        elif any(mark in str(entry) for mark in "*?["):
            found = [Path(name) for name in sorted(glob.glob(str(entry), recursive=True)) if Path(name).is_file()]
            if not found:
                raise DataError(f"{entry}: no file matches this pattern (looked in {Path.cwd()}). Mend the path.")
        elif Path(entry).is_dir():
            raise DataError(f"{entry}: is a folder. Name its files, for example {Path(entry) / '*.jsonl'}.")
        else:
            raise DataError(f"{entry}: not found (looked in {Path.cwd()}). Mend the path.")
        for file in found:
            if file.suffix not in SUFFIXES:
                raise DataError(
                    f"{file}: a file that ends in {' or '.join(SUFFIXES)} is expected. Convert it, or "
                    "rename it if it holds one JSON object a line."
                )
        files.extend(found)
    return files


def open_rows(paths: str | Path | Sequence[str | Path]) -> RowSource:
    """All rows of all files that `paths` name, in that order.

    Raises:
        DataError: see `expand_paths`; a damaged Parquet file; a file without rows.
    """
    files = expand_paths(paths)
    if not files:
        raise DataError("no data file is named. Give at least one .jsonl or .parquet file.")
    sources: list[RowSource] = [ParquetFile(path) if path.suffix == ".parquet" else JsonlFile(path) for path in files]
    for source, path in zip(sources, files, strict=True):
        if len(source) == 0:
            raise DataError(f"{path}: the data set is empty. Put at least one row into it, or leave it out.")
    return sources[0] if len(sources) == 1 else RowChain(sources)


def _running_sum(sizes: Sequence[int]) -> list[int]:
    total, ends = 0, []
    for size in sizes:
        total += size
        ends.append(total)
    return ends


def _kind(value: Any) -> str:
    names = {
        list: "a list",
        str: "text",
        int: "a number",
        float: "a number",
        bool: "true/false",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
