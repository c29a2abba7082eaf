"""Prompts from sources that are read as needed: rows are not examined in advance, and the position is exact.

Readers yield one row after the other, from a position that can be saved and restored.
Rows are taken in blocks of `shuffle_buffer`, and every block is shuffled by (seed,
number of the block). A checkpoint stores the readers' positions at the beginning of the
block, and how many of its rows were taken. A resumed run reads that block again, and
continues with the same rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megaverl.config.run import SourceConfig
from megaverl.data.datasets import (
    Mixture,
    PromptDataset,
    PromptRecord,
    PromptSampler,
    make_record,
    weights_of,
)
from megaverl.data.digests import digest_of_files, digest_of_rows, written_times
from megaverl.data.prompts import Columns, PromptEncoder
from megaverl.data.row_groups import RowGroupCache
from megaverl.data.row_source import RowSource
from megaverl.data.row_values import parse_row
from megaverl.data.sources import (
    Entry,
    ParquetFile,
    Place,
    as_source,
    check_revision,
    expand_paths,
    folder_files,
    hub_row,
    kind_of,
    load_hub,
    open_source,
)
from megaverl.errors import DataError


class Row(NamedTuple):
    """Row and its place, for messages."""

    columns: dict[str, Any]
    where: str


def open_reader(source: SourceConfig) -> SourceReader:
    """Return a reader of one source.

    Raises:
        DataError: the source is missing or damaged.
    """
    check_revision(source)
    kind = kind_of(source.path)
    if kind in ("own", "reasoning_gym", "verifiers", "harbor", "nemo_gym"):
        reader: SourceReader = NumberedReader(open_source(source))
    elif kind in ("hub", "saved"):
        reader = HubReader(source)
    else:
        reader = FilesReader(
            folder_files(Path(source.path))
            if kind == "folder"
            else expand_paths(source.path)
        )
    return reader if source.limit is None else FirstReader(reader, source.limit)


class FilesReader:
    """Reader of JSONL and Parquet files. JSONL is read from a byte position, Parquet by row group."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        # The place is a byte in a JSONL file, and a row in a Parquet file.
        self._file = 0
        self._place = 0
        self._line = 0
        self._parquet: tuple[int, ParquetFile] | None = None

    def read(self) -> Row | None:
        """Return the next row, or None once after the last one."""
        # Files without rows are skipped.
        while self._file < len(self.files):
            path = self.files[self._file]
            row = (
                self._parquet_row(path)
                if path.suffix == ".parquet"
                else self._line_of(path)
            )
            if row is not None:
                return row
            self._file = self._file + 1
            self._place = 0
            self._line = 0
        # The next read starts again with the first file.
        self._file = 0
        return None

    @property
    def fingerprint(self) -> str:
        """Return a digest of the files, of samples if they are large."""
        return digest_of_files(self.files)

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {"file": self._file, "place": self._place, "line": self._line}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state` returned."""
        self._file = int(state["file"])
        self._place = int(state["place"])
        self._line = int(state["line"])

    def _line_of(self, path: Path) -> Row | None:
        """Return the next row of a JSONL file, or None at its end."""
        with path.open("rb") as stream:
            # The file is opened for every row, since an open file could not be stored
            # in a checkpoint.
            stream.seek(self._place)
            for line in stream:
                self._place += len(line)
                self._line += 1
                if not line.strip():
                    continue
                where = Place(f"{path}, line {self._line}", path.parent)
                return Row(parse_row(line, where), where)
        return None

    def _parquet_row(self, path: Path) -> Row | None:
        """Return the next row of a Parquet file, or None at its end."""
        if self._parquet is None or self._parquet[0] != self._file:
            # Rows are read in order, so one row group in memory is enough.
            self._parquet = (self._file, ParquetFile(path, RowGroupCache(0)))
        rows = self._parquet[1]
        if self._place >= len(rows):
            return None
        row = Row(rows[self._place], rows.where(self._place))
        self._place += 1
        return row


class NumberedReader:
    """Reader of rows that have numbers, in order."""

    # None are listed, since the fingerprint covers every row.
    files: Sequence[Path] = ()

    def __init__(self, rows: RowSource) -> None:
        self._rows = rows
        self._next = 0

    def read(self) -> Row | None:
        """Return the next row, or None once after the last one."""
        if self._next >= len(self._rows):
            self._next = 0
            return None
        row = Row(self._rows[self._next], self._rows.where(self._next))
        self._next += 1
        return row

    @property
    def fingerprint(self) -> str:
        """Return the rows' own fingerprint."""
        return self._rows.fingerprint

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {"next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state` returned."""
        self._next = int(state["next"])


class HubReader:
    """Reader of a data set of Hugging Face's `datasets`, streamed. Its own state restores the position."""

    def __init__(self, source: SourceConfig) -> None:
        self._name = f"{source.path}, {source.split}"
        self._folder = Path(source.path)
        self._data = load_hub(source, streaming=True)
        # The state at the start, to begin again after the last row: iterating anew
        # would continue from the last state.
        self._beginning = copy.deepcopy(self._data.state_dict())
        self._rows: Iterator[dict[str, Any]] = iter(self._data)
        self._next = 0
        # Until the first row after a restore is read, the data set reports its state
        # from before the restore.
        self._restored: dict[str, Any] | None = None

    def read(self) -> Row | None:
        """Return the next row, or None once after the last one."""
        where = f"{self._name}, row {self._next + 1}"
        try:
            row = hub_row(next(self._rows), self._data.features)
        except StopIteration:
            self.restore({"next": 0, "stream": self._beginning})
            return None
        # `datasets` passes on errors of several libraries: network, damaged files and
        # values.
        except Exception as error:
            raise DataError(
                f"{where}: it cannot be read ({type(error).__name__}: {error})."
            ) from error
        self._next += 1
        self._restored = None
        return Row(row, where)

    @property
    def fingerprint(self) -> str:
        """Return a digest of a saved data set's files, or "" for one on the hub.

        The contents of the latter are unknown in advance.
        """
        return digest_of_files(self.files) if self.files else ""

    @property
    def files(self) -> Sequence[Path]:
        """Return the files of a saved data set."""
        return sorted(self._folder.rglob("*.arrow")) if self._folder.is_dir() else ()

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        # `datasets` changes the dictionary in place, so it is copied on the way out and
        # on the way in.
        stream = self._data.state_dict() if self._restored is None else self._restored
        return {"next": self._next, "stream": copy.deepcopy(stream)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state` returned."""
        self._restored = copy.deepcopy(state["stream"])
        self._data.load_state_dict(copy.deepcopy(state["stream"]))
        self._rows = iter(self._data)
        self._next = int(state["next"])


class FirstReader:
    """Reader of the first rows of another reader, repeatedly."""

    def __init__(self, reader: SourceReader, count: int) -> None:
        self._reader = reader
        self._count = count
        self._read = 0
        # To go back to after `count` rows.
        self._begin = reader.state()

    def read(self) -> Row | None:
        """Return the next row, or None once after the last one."""
        row = self._reader.read() if self._read < self._count else None
        if row is None:
            self._read = 0
            self._reader.restore(self._begin)
            return None
        self._read += 1
        return row

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the other reader."""
        return self._reader.fingerprint

    @property
    def files(self) -> Sequence[Path]:
        """Return the files of the other reader."""
        return self._reader.files

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {"read": self._read, "inner": self._reader.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state` returned."""
        self._read = int(state["read"])
        self._reader.restore(state["inner"])


# A reader returns None at the end of its source and then starts again. Its state, the
# position, is a small JSON value.
SourceReader = FilesReader | NumberedReader | HubReader | FirstReader
# Limit of consecutive dropped rows, after which something must be wrong.
MOST_DROPPED = 100_000


class StreamedPrompts:
    """Endless stream of prompts, with the interface of `PromptStream`.

    Args:
        entries: sources, read one after the other; or, with weights, mixed by their shares, each repeated endlessly.
        shuffle_buffer: number of rows that are shuffled together. 1: no shuffling.

    Attributes:
        position: number of prompts taken so far.
        num_dropped: rows dropped because of their length.
        notes: what the user must know about resuming the sources from a checkpoint.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        encoder: PromptEncoder,
        columns: Columns,
        *,
        seed: int,
        shuffle_buffer: int = 1,
    ) -> None:
        sources = [as_source(entry) for entry in entries]
        self._names = [source.path for source in sources]
        self._weights = weights_of(sources)
        self._mixture = Mixture(self._weights, seed) if self._weights else None
        self._readers: list[SourceReader] = [open_reader(source) for source in sources]
        self._fingerprints = [reader.fingerprint for reader in self._readers]
        self._written = written_times(
            [path for reader in self._readers for path in reader.files]
        )
        self.notes: list[str] = []
        self._encoder = encoder
        self._columns = columns
        self._seed = seed
        self._buffer = shuffle_buffer
        self.position = self.num_dropped = 0
        self._block = 0
        self._within = 0
        self._rows: list[Row] = []
        self._block_digest = ""
        self._read = self._passes = self._current = 0
        # Where a resumed run would read this block again.
        self._begin = self._place()
        for reader in self._readers:
            self._check_first_row(reader)

    def take(self, count: int) -> list[PromptRecord]:
        """Return the next `count` prompts.

        Raises:
            DataError: a row cannot be used (names file and line), or the sources have no rows.
        """
        taken: list[PromptRecord] = []
        dropped = 0
        while len(taken) < count:
            # Rows that are too long or too short are dropped, and counted.
            row = self._next()
            record = make_record(
                self._columns.read(row.columns, row.where),
                self._encoder,
                self.position + len(taken),
                row.where,
            )
            if record is None:
                self.num_dropped += 1
                dropped += 1
                if dropped > MOST_DROPPED:
                    raise DataError(
                        f"{row.where}: {dropped} rows in a row are dropped for their length. Correct data."
                    )
                continue
            dropped = 0
            taken.append(record)
        self.position += count
        return taken

    def _check_first_row(self, reader: SourceReader) -> None:
        """Read the first row of a source, so that an unusable column fails a run at its start.

        Raises:
            DataError: the row cannot be used.
        """
        # The reader is put back afterwards, so this row is still the first one that is
        # read.
        beginning = reader.state()
        row = reader.read()
        if row is not None:
            self._columns.read(row.columns, row.where)
        reader.restore(beginning)

    @property
    def losses(self) -> str:
        """Number of rows dropped so far, in words; empty if there are none."""
        return (
            f"{self.position} prompts; {self.num_dropped} dropped for their length"
            if self.num_dropped
            else ""
        )

    def seek(self, position: int) -> None:
        """Advance to a position, by taking prompts."""
        if position < self.position:
            raise DataError(
                f"prompt {position} of a stream is behind: {self.position} have been taken."
            )
        while self.position < position:
            # Positions are not byte offsets: rows may be dropped for their length, so
            # only taking them shows where a position is.
            self.take(min(self._buffer, position - self.position))

    @property
    def epoch(self) -> float:
        """Number of passes over all rows. Unknown with weights, and 0 then."""
        return float(self._passes)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the order depends on, and the position, as small JSON values."""
        return {
            "sources": self._names,
            "weights": self._weights,
            "seed": self._seed,
            "shuffle_buffer": self._buffer,
            "position": self.position,
            "dropped": self.num_dropped,
            "block": self._block,
            "within": self._within,
            "begin": copy.deepcopy(self._begin),
            "fingerprints": self._fingerprints,
            "written": self._written,
            "block_rows": self._block_digest,
        }

    def load_state_dict(self, state: Mapping[str, Any], next_step: int = 0) -> None:
        """Continue where a checkpoint was made; see `PromptStream.load_state_dict`.

        Raises:
            DataError: the checkpoint was made with other sources or in another order.
        """
        current = self.state_dict()
        keys = ("sources", "weights", "seed", "shuffle_buffer")
        changed = [
            f"{key}: was {state.get(key)!r}, is {current[key]!r}"
            for key in keys
            if state.get(key) != current[key]
        ]
        # Checkpoints of earlier versions do not store this entry.
        before = state.get("fingerprints", self._fingerprints)
        if len(before) == len(self._names):
            facts = zip(self._names, self._fingerprints, before, strict=True)
            changed += [
                f"{name}: its data are others"
                for name, digest, was in facts
                if digest != was
            ]
        if changed:
            raise DataError(
                "the checkpoint was made with other prompts, so the run cannot go on exactly: "
                f"{'; '.join(changed)}. Restore the data and these settings, or start a new run from the saved weights."
            )
        self.notes = self._compare_times(state.get("written", {}))
        self.position = int(state["position"])
        self.num_dropped = int(state["dropped"])
        self._block = int(state["block"])
        self._restore(state["begin"])
        # The checkpoint stores where the block begins, not its rows. They are read and
        # shuffled again in the same order.
        if state["within"]:
            self._fill()
            if self._block_digest != state.get("block_rows", self._block_digest):
                raise DataError(
                    f"{self._rows[0].where}, and the rows read with it, are not those that the checkpoint was made "
                    "with, so the run cannot go on exactly. Restore the data, or start a new run from the saved "
                    "weights."
                )
        self._within = int(state["within"])

    def _compare_times(self, before: Mapping[str, int]) -> list[str]:
        """Return a note about large files that were written since the checkpoint although their samples are equal."""
        newer = [
            path
            for path, written in self._written.items()
            if path in before and written != before[path]
        ]
        if not newer:
            return []
        names = ", ".join(newer[:4]) + (
            f" and {len(newer) - 4} more" if len(newer) > 4 else ""
        )
        return [
            f"written again since the checkpoint: {names}. Their sizes and samples of them are the same; rows between "
            "the samples are not compared. If rows have changed, the run does not go on exactly."
        ]

    def _next(self) -> Row:
        """Return the next row of the shuffled block."""
        if self._within >= len(self._rows):
            self._block += bool(self._rows)
            self._fill()
        self._within += 1
        return self._rows[self._within - 1]

    def _fill(self) -> None:
        """Read and shuffle the next block of rows."""
        # Recorded before reading, since a resumed run reads this block again.
        self._begin = self._place()
        rows = [self._read_one() for _ in range(self._buffer)]
        self._block_digest = digest_of_rows(row.columns for row in rows)
        # Seeded by the number of the block, so that a resumed run can shuffle any block
        # without those before it.
        order = np.random.Generator(
            np.random.PCG64([self._seed, self._block])
        ).permutation(len(rows))
        self._rows = [rows[number] for number in order] if self._buffer > 1 else rows
        self._within = 0

    def _read_one(self) -> Row:
        """Return the next row of the source whose turn it is. A source that ends starts again."""
        if self._mixture is not None:
            source, _ = self._mixture.at(self._read)
            self._read += 1
            # The second call starts the next pass over a source that has just ended.
            row = self._readers[source].read() or self._readers[source].read()
            if row is None:
                raise DataError(f"{self._names[source]}: has no row. Remove it.")
            return row
        # One more than there are readers: the current one may be at its end, and all
        # others empty.
        for _ in range(len(self._readers) + 1):
            row = self._readers[self._current].read()
            if row is not None:
                return row
            self._current = (self._current + 1) % len(self._readers)
            self._passes += self._current == 0
        raise DataError(f"{', '.join(self._names)}: none of them has a row.")

    def _place(self) -> dict[str, Any]:
        """Return the positions of all readers."""
        return {
            "read": self._read,
            "passes": self._passes,
            "current": self._current,
            "readers": [reader.state() for reader in self._readers],
        }

    def _restore(self, place: Mapping[str, Any]) -> None:
        """Go to positions that `_place` returned."""
        self._read = int(place["read"])
        self._passes = int(place["passes"])
        self._current = int(place["current"])
        for reader, state in zip(self._readers, place["readers"], strict=True):
            reader.restore(state)
        self._begin = dict(place)
        self._rows = []
        self._within = 0


class PromptStream:
    """Endless stream of a sampler's prompts.

    A step takes `prompts_per_step`, or more if groups are refilled
    (`algorithm.dynamic_sampling`).

    Attributes:
        position: number of prompts taken so far.
        notes: always empty, because every row is compared with the checkpoint.
    """

    notes: Sequence[str] = ()

    def __init__(self, dataset: PromptDataset, sampler: PromptSampler) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.position = 0

    def take(self, count: int) -> list[PromptRecord]:
        """Return the next `count` prompts.

        They are read in the order of the files, so each row group is decoded at most
        once.
        """
        rows = self.sampler.rows(self.position, count)
        self.position += count
        in_file_order = sorted(range(count), key=rows.__getitem__)
        records = {place: self.dataset[rows[place]] for place in in_file_order}
        return [records[place] for place in range(count)]

    @property
    def losses(self) -> str:
        """Numbers of rows dropped or cut because of their length, in words; empty if there are none."""
        report = self.dataset.report
        return (
            str(report)
            if report.num_dropped + report.num_truncated + report.num_short
            else ""
        )

    def seek(self, position: int) -> None:
        """Set the position."""
        self.position = position

    @property
    def epoch(self) -> float:
        """Number of epochs completed; 1.5 is half-way through the second."""
        return self.position / self.sampler.num_rows

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the order depends on, and the position, as a few bytes of JSON values."""
        return {**self.sampler.state_dict(), "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any], next_step: int) -> None:
        """Continue where a checkpoint was made.

        Args:
            next_step: for checkpoints without a position: `prompts_per_step` prompts were taken in every step before
                this one.

        Raises:
            DataError: the checkpoint was made with other prompts or in another order.
        """
        self.sampler.check_state(state)
        self.position = int(
            state.get("position", next_step * self.sampler.prompts_per_step)
        )


# An endless stream of prompts.
Prompts = PromptStream | StreamedPrompts
