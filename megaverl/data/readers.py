"""Rows one after the other, from a place that can be written down and found again."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megaverl.config.run import SourceConfig
from megaverl.data.sources import (
    ParquetFile,
    Place,
    RowSource,
    expand_paths,
    folder_files,
    kind_of,
    load_hub,
    open_source,
)
from megaverl.errors import DataError


class Row(NamedTuple):
    """A row and where it stands, for messages."""

    columns: dict[str, Any]
    where: str


class SourceReader(Protocol):
    """Reads a source from its beginning to its end."""

    def read(self) -> Row | None:
        """The next row; None at the end, where the next `read` is the first row again."""

    def state(self) -> dict[str, Any]:
        """Where it stands: JSON, small."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back, or on, to where a `state` was taken."""


def open_reader(source: SourceConfig) -> SourceReader:
    """A reader of one source.

    Raises:
        DataError: nothing is there, or it is damaged.
    """
    kind = kind_of(source.path)
    if kind in ("own", "reasoning_gym", "verifiers"):
        reader: SourceReader = NumberedReader(open_source(source))
    elif kind in ("hub", "saved"):
        reader = HubReader(source)
    else:
        reader = FilesReader(folder_files(Path(source.path)) if kind == "folder" else expand_paths(source.path))
    return reader if source.limit is None else FirstReader(reader, source.limit)


class FilesReader:
    """JSONL and Parquet files. JSONL is read from a byte position, Parquet by row group."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._file, self._place, self._line = 0, 0, 0  # place: byte of a JSONL file, row of a Parquet file
        self._parquet: tuple[int, ParquetFile] | None = None

    def read(self) -> Row | None:
        while self._file < len(self._files):
            path = self._files[self._file]
            row = self._parquet_row(path) if path.suffix == ".parquet" else self._line_of(path)
            if row is not None:
                return row
            self._file, self._place, self._line = self._file + 1, 0, 0
        self._file = 0
        return None

    def state(self) -> dict[str, Any]:
        return {"file": self._file, "place": self._place, "line": self._line}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._file, self._place, self._line = int(state["file"]), int(state["place"]), int(state["line"])

    def _line_of(self, path: Path) -> Row | None:
        with path.open("rb") as stream:
            stream.seek(self._place)
            for line in stream:
                self._place += len(line)
                self._line += 1
                if not line.strip():
                    continue
                where = Place(f"{path}, line {self._line}", path.parent)
                try:
                    row = json.loads(line)
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    raise DataError(f"{where}: not valid JSON ({error}). Correct or remove this line.") from error
                if not isinstance(row, dict):
                    raise DataError(f"{where}: found {type(row).__name__}; expected a JSON object of columns.")
                return Row(row, where)
        return None

    def _parquet_row(self, path: Path) -> Row | None:
        if self._parquet is None or self._parquet[0] != self._file:
            self._parquet = (self._file, ParquetFile(path))
        rows = self._parquet[1]
        if self._place >= len(rows):
            return None
        row = Row(rows[self._place], rows.where(self._place))
        self._place += 1
        return row


class NumberedReader:
    """Rows that have numbers, one after the other."""

    def __init__(self, rows: RowSource) -> None:
        self._rows, self._next = rows, 0

    def read(self) -> Row | None:
        if self._next >= len(self._rows):
            self._next = 0
            return None
        row = Row(self._rows[self._next], self._rows.where(self._next))
        self._next += 1
        return row

    def state(self) -> dict[str, Any]:
        return {"next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["next"])


class HubReader:
    """A data set of Hugging Face's `datasets`, as it arrives. Its own state finds the place again."""

    def __init__(self, source: SourceConfig) -> None:
        self._name = f"{source.path}, {source.split}"
        self._data = load_hub(source, streaming=True)
        self._beginning = copy.deepcopy(self._data.state_dict())
        self._rows: Iterator[dict[str, Any]] = iter(self._data)
        self._next = 0

    def read(self) -> Row | None:
        try:
            row = next(self._rows)
        except StopIteration:
            self.restore({"next": 0, "stream": self._beginning})
            return None
        self._next += 1
        return Row(dict(row), f"{self._name}, row {self._next}")

    def state(self) -> dict[str, Any]:
        return {"next": self._next, "stream": copy.deepcopy(self._data.state_dict())}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._data.load_state_dict(copy.deepcopy(state["stream"]))
        self._rows, self._next = iter(self._data), int(state["next"])


class FirstReader:
    """The first rows of another reader, again and again."""

    def __init__(self, reader: SourceReader, count: int) -> None:
        self._reader, self._count, self._read = reader, count, 0
        self._begin = reader.state()

    def read(self) -> Row | None:
        row = self._reader.read() if self._read < self._count else None
        if row is None:
            self._read = 0
            self._reader.restore(self._begin)
            return None
        self._read += 1
        return row

    def state(self) -> dict[str, Any]:
        return {"read": self._read, "inner": self._reader.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._read = int(state["read"])
        self._reader.restore(state["inner"])
