"""Sources of rows: files, folders, data sets on the hub, reasoning-gym, verifiers, and users' code.

Each gives rows by number, read on demand.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import itertools
import json
import re
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megaverl.config.evaluation import SUITE_PREFIX, parse_suite_source
from megaverl.config.run import SourceConfig, is_hub_name
from megaverl.data.row_groups import SHARED, GroupBound, RowGroupCache
from megaverl.data.row_source import RowSource
from megaverl.data.row_values import (
    Conversion,
    arrow_conversion,
    parse_row,
    without_null_fields,
)
from megaverl.data.suites import SUITES, CsvRows, SuiteRows
from megaverl.errors import DataError
from megaverl.plugins import load_object
from megaverl.rewards.reasoning_gym import PREFIX, ReasoningGymRows
from megaverl.rollout.environments import harbor, nemo_gym, verifiers
from megaverl.user_code import describe, user_code

# A source is named by what precedes its first colon.
NAMED_PREFIXES = (
    PREFIX,
    verifiers.PREFIX,
    harbor.PREFIX,
    nemo_gym.PREFIX,
    SUITE_PREFIX,
)
OWN = re.compile(r"(?:[\w./\\-]+\.py|[A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*")
HOW_TO_INSTALL = "pip install 'megaverl[datasets]'"
ROW_METHODS = ("__len__", "__getitem__", "where")
Entry = SourceConfig | str | Path


def as_source(entry: Entry) -> SourceConfig:
    """Return an entry in its long form."""
    return entry if isinstance(entry, SourceConfig) else SourceConfig(path=str(entry))


def kind_of(path: str) -> str:
    """Return the kind of a source, consulting only the local disk.

    It is `files` (or a pattern), `folder`, `saved` by datasets, `hub`, `reasoning_gym`,
    `verifiers`, `harbor`, `nemo_gym`, `suite`, or `own` code.
    """
    if path.startswith(NAMED_PREFIXES):
        return path.partition(":")[0]
    if OWN.fullmatch(path):
        return "own"
    if Path(path).is_dir():
        is_saved = any(
            Path(path, f"dataset_{name}.json").is_file() for name in ("info", "dict")
        )
        return "saved" if is_saved else "folder"
    # `org/name` may also be a relative path, which comes first.
    if (
        not Path(path).exists()
        and not glob.has_magic(path)
        and not path.endswith(SUFFIXES)
        and is_hub_name(path)
    ):
        return "hub"
    return "files"


def open_source(entry: Entry) -> RowSource:
    """Return all rows of one entry.

    Raises:
        DataError: the source is missing, damaged or empty, or the package that reads it is missing.
    """
    source = as_source(entry)
    check_revision(source)
    rows = _open(source)
    if len(rows) == 0:
        raise DataError(
            f"{source.path}: the data set is empty. Put at least one row into it, or leave it out."
        )
    return (
        rows
        if source.limit is None or source.limit >= len(rows)
        else FirstRows(rows, source.limit)
    )


def check_revision(source: SourceConfig) -> None:
    """Check that only a data set on the hub has a revision.

    Raises:
        DataError: names the source.
    """
    if source.revision is not None and (kind := kind_of(source.path)) != "hub":
        raise DataError(
            f"{source.path}: revision={source.revision} is of data sets on the hub, and this source is read from "
            f"elsewhere (found: {kind}). Leave revision out."
        )


def _open(source: SourceConfig) -> RowSource:
    """Return the rows of a source, which may be empty."""
    kind = kind_of(source.path)
    if kind == "own":
        return _own(source.path)
    if kind == "reasoning_gym":
        return ReasoningGymRows(source.path)
    if kind == "verifiers":
        return verifiers.VerifiersRows(source.path)
    if kind == "harbor":
        return harbor.HarborRows(source.path)
    if kind == "nemo_gym":
        return nemo_gym.GymRows(source.path)
    if kind == "suite":
        return _suite(source.path)
    if kind in ("saved", "hub"):
        return HubRows(source)
    return open_rows(
        folder_files(Path(source.path)) if kind == "folder" else source.path
    )


def _suite(text: str) -> RowSource:
    """Return the converted rows of `suite:NAME?path=...`."""
    try:
        suite = parse_suite_source(text)
    except ValueError as error:
        raise DataError(f"{text}: {error}.") from None
    rows: RowSource
    if Path(suite.path).suffix == ".csv":
        rows = CsvRows(Path(suite.path))
        limit = suite.options.get("limit")
        rows = rows if limit is None or limit >= len(rows) else FirstRows(rows, limit)
    else:
        rows = open_source(SourceConfig(path=suite.path, **suite.options))
    return SuiteRows(rows, SUITES[suite.name], suite.seed)


def folder_files(folder: Path) -> list[Path]:
    """Return the data files in a folder and its subfolders, sorted by name.

    Raises:
        DataError: there are none.
    """
    files = sorted(
        path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()
    )
    if not files:
        raise DataError(
            f"{folder}: no file in this folder ends in {' or '.join(SUFFIXES)}. Name another one."
        )
    return files


class HubRows:
    """Split of a data set of Hugging Face's `datasets`, from the hub or from save_to_disk, memory-mapped."""

    def __init__(self, source: SourceConfig) -> None:
        self._name = (
            source.path
            + (f", {source.subset}" if source.subset else "")
            + f", {source.split}"
        )
        self._rows = load_hub(source, streaming=False)
        self.fingerprint = str(self._rows._fingerprint)

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        """Return the name of a row, for messages."""
        return f"{self._name}, row {index + 1}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return hub_row(self._rows[index], self._rows.features)
        # `datasets` passes on errors of several libraries for damaged files and values.
        except Exception as error:
            raise DataError(
                f"{self.where(index)}: it cannot be read ({type(error).__name__}: {error})."
            ) from error


def hub_row(
    row: Mapping[str, Any], features: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a row of `datasets` without the null fields that Arrow adds to structs.

    Args:
        features: the data set's features. Nulls in a column of JSON text were written, and stay.
    """
    plain_row = {}
    for name, value in row.items():
        is_json = "Json(" in repr((features or {}).get(name))
        plain_row[name] = value if is_json else _without_null_fields_inside(value)
    return plain_row


def _without_null_fields_inside(value: Any) -> Any:
    """Remove null fields inside `value`, if it is a container."""
    return (
        without_null_fields(value)
        if isinstance(value, Mapping | list | tuple)
        else value
    )


def load_hub(source: SourceConfig, *, streaming: bool) -> Any:
    """Load a `datasets.Dataset`, or an `IterableDataset` if streamed.

    Raises:
        DataError: the package is missing, or cannot load the data set.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"{source.path}: reading it needs the package datasets: {HOW_TO_INSTALL}."
        )
    import datasets

    check_revision(source)
    try:
        if kind_of(source.path) == "saved":
            saved = datasets.load_from_disk(source.path)
            if isinstance(saved, datasets.DatasetDict):
                saved = saved[source.split]
            return _encoded_images(saved.to_iterable_dataset() if streaming else saved)
        return _encoded_images(
            datasets.load_dataset(
                source.path,
                source.subset,
                split=source.split,
                revision=source.revision,
                streaming=streaming,
            )
        )
    except KeyError as error:
        raise DataError(
            f"{source.path}: no split {error}; it has {', '.join(saved)}. Set split."
        ) from error
    # `datasets` passes on errors of several libraries: network, names, files and
    # columns.
    except Exception as error:
        raise DataError(
            f"{source.path}: datasets cannot load it: {type(error).__name__}: {error}. Look at the name and at the "
            "network (HF_HUB_OFFLINE must not be set), or name a local folder."
        ) from error


def _encoded_images(rows: Any) -> Any:
    """Keep images as they are stored.

    `datasets` would decode all images of a row; `data/images.py` reads them instead.
    """
    import datasets

    for name, feature in dict(rows.features or {}).items():
        # The feature of a list holds the feature of its elements.
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, datasets.Image):
            encoded = datasets.Image(decode=False)
            rows = rows.cast_column(
                name, encoded if inner is feature else datasets.List(encoded)
            )
    return rows


class FirstRows:
    """First rows of another source."""

    def __init__(self, rows: RowSource, count: int) -> None:
        self._rows = rows
        self._count = count
        self.where = rows.where
        self.fingerprint = f"{rows.fingerprint}-first-{count}"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


def _own(name: str) -> RowSource:
    """Return the rows of a user's function or object: a row source, or a plain list of mappings."""
    function = load_object(name, "data")
    with raised_by(name):
        rows = function() if callable(function) else function
        is_source = all(
            hasattr(rows, method) for method in (*ROW_METHODS, "fingerprint")
        )
    if is_source:
        return OwnRows(rows, name)
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise DataError(
            f"{name}: it gave {type(rows).__name__}; expected a list of rows (mappings), or an object with "
            f"{', '.join(ROW_METHODS)} and fingerprint."
        )
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(
                f"{name}, row {number + 1}: found {type(row).__name__}; expected a mapping of columns."
            )
    return RowList(rows, name)


def raised_by(name: str) -> AbstractContextManager[None]:
    """Return the context for calls of a user's data function or rows, which may raise anything."""
    return user_code(
        lambda error: DataError(f"{name}: it raised {describe(error)}"), keep=DataError
    )


class OwnRows:
    """Rows of a user's class. Whatever its methods raise becomes a DataError."""

    def __init__(self, rows: RowSource, name: str) -> None:
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        with raised_by(self._name):
            return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with raised_by(f"{self._name}, row {index + 1}"):
            row = self._rows[index]
        if not isinstance(row, Mapping):
            raise DataError(
                f"{self.where(index)}: found {type(row).__name__}; expected a mapping of columns."
            )
        return dict(row)

    def where(self, index: int) -> str:
        """Return the name of a row, for messages."""
        with raised_by(self._name):
            return self._rows.where(index)

    @property
    def fingerprint(self) -> str:
        """Return the rows' own fingerprint."""
        with raised_by(self._name):
            return self._rows.fingerprint


SUFFIXES = (".jsonl", ".parquet")


class Place(str):
    """Place of a row, for messages. Relative paths in the row start at `folder`."""

    folder: Path

    def __new__(cls, text: str, folder: Path) -> Place:
        place = super().__new__(cls, text)
        place.folder = folder
        return place


class JsonlFile:
    """File with one JSON object per line. Memory: 12 bytes per row, for its offset and its line number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Arrays of machine integers: a list would take several times as much.
        self._starts = array("Q")
        self._lines = array("L")
        # Read once: offsets, line numbers and digest come from the same pass.
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
        """Return the name of a row, for messages."""
        return Place(f"{self.path}, line {self._lines[index]}", self.path.parent)

    def __getitem__(self, index: int) -> dict[str, Any]:
        # Opened for every row, so that readers can be shared by threads and processes.
        with self.path.open("rb") as stream:
            stream.seek(self._starts[index])
            line = stream.readline()
        return parse_row(line, self.where(index))


# Rows decoded at a time. Memory is checked between two such batches.
DECODED_ROWS = 1024


class ParquetFile:
    """Parquet file, decoded by row group.

    Args:
        cache: cache of row groups. None: the one that all files of this process share.
    """

    _numbers = itertools.count()

    def __init__(self, path: Path, cache: RowGroupCache | None = None) -> None:
        import pyarrow
        import pyarrow.parquet

        self.path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
            schema = self._file.schema_arrow
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{path}: not a whole Parquet file ({error}). Copy the file again from its source."
            ) from error
        # A row is a mapping, in which the last of two columns would silently replace
        # the first.
        if repeated := sorted(
            {name for name in schema.names if schema.names.count(name) > 1}
        ):
            raise DataError(
                f"{path}: more than one column has the name {repeated[0]!r}. Rename or remove the others."
            )
        self._conversions = _arrow_conversions(path, schema)
        metadata = self._file.metadata
        sizes = [
            # Row groups are decoded as a whole, so rows are found by group.
            metadata.row_group(group).num_rows
            for group in range(metadata.num_row_groups)
        ]
        self._ends = _running_sum(sizes)
        self._cache = SHARED if cache is None else cache
        # The cache knows files by number, since an id may be reused after a file is
        # gone.
        self._number = next(self._numbers)
        weakref.finalize(self, self._cache.forget, self._number)
        # The footer stands for the rows. Reading them all would take as long as an
        # epoch.
        facts = f"{path.stat().st_size} {sizes} {schema}"
        self.fingerprint = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def where(self, index: int) -> str:
        """Return the name of a row, for messages."""
        return Place(f"{self.path}, row {index + 1}", self.path.parent)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import pyarrow

        # The group whose rows include this one.
        group = bisect_right(self._ends, index)
        try:
            table = self._cache.get((self._number, group), lambda: self._decode(group))
        except (pyarrow.ArrowException, OSError) as error:
            raise self._damaged(index, error) from error
        except ValueError as error:
            raise DataError(f"{self.where(index)}: {error}.") from error
        return self._row(table, index - self.first_row(group), index)

    def _decode(self, group: int) -> Any:
        """Return a row group's table.

        Raises:
            ValueError: see `GroupBound`.
        """
        import pyarrow

        return pyarrow.Table.from_batches(
            list(self._bounded_batches(group, DECODED_ROWS))
        )

    def _bounded_batches(self, group: int, num_rows: int) -> Iterator[Any]:
        """Yield a row group in batches of so many rows, as far as its size has bounds.

        Raises:
            ValueError: see `GroupBound`.
        """
        metadata = self._file.metadata.row_group(group)
        columns = [metadata.column(number) for number in range(metadata.num_columns)]
        bound = GroupBound(sum(column.total_compressed_size for column in columns))
        # A page is decompressed whole, and the footer holds its size. Only reading batches
        # shows how far repeated values expand.
        bound.check(sum(column.total_uncompressed_size for column in columns))
        # The file may claim less than it holds, so every batch is counted.
        for batch in self._file.iter_batches(num_rows, row_groups=[group]):
            bound.add(batch.nbytes)
            yield batch

    @property
    def num_groups(self) -> int:
        """Return the number of row groups."""
        return len(self._ends)

    def first_row(self, group: int) -> int:
        """Return the number of a row group's first row."""
        return self._ends[group - 1] if group else 0

    def front(self, group: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield the first rows of a row group without decoding the rest of it.

        Args:
            count: largest number of rows.
        """
        import pyarrow

        first = self.first_row(group)
        if group >= self.num_groups:
            return
        try:
            batch = next(self._bounded_batches(group, count), None)
        except (pyarrow.ArrowException, OSError) as error:
            raise self._damaged(first, error) from error
        except ValueError as error:
            raise DataError(f"{self.where(first)}: {error}.") from error
        for number in range(0 if batch is None else batch.num_rows):
            yield self._row(batch, number, first + number)

    def _damaged(self, index: int, error: Exception) -> DataError:
        """Return the error for a row that cannot be decoded."""
        return DataError(
            f"{self.where(index)}: the file is damaged ({error}). Copy the file again from its source."
        )

    def _row(self, table: Any, number: int, index: int) -> dict[str, Any]:
        """Return one row of a decoded table.

        Args:
            number: index of the row in the table.
            index: index of the row in the file, for messages.
        """
        import pyarrow

        try:
            row: dict[str, Any] = table.slice(number, 1).to_pylist()[0]
        # Such as dates beyond Python's range, or text that is not UTF-8.
        except (ValueError, OverflowError, pyarrow.ArrowException) as error:
            raise DataError(
                f"{self.where(index)}: it holds a value that cannot be read ({type(error).__name__}: {error}). Correct "
                # The first row of the group, in the batch that has been decoded.
                "or remove the row, or convert the column to text."
            ) from error
        for name, conversion in self._conversions.items():
            row[name] = conversion(row[name])
        return row


def _arrow_conversions(path: Path, schema: Any) -> dict[str, Conversion]:
    """Return the conversion of each column that needs one."""
    conversions = {}
    for column in schema:
        try:
            conversion = arrow_conversion(column.type)
        except DataError as error:
            raise DataError(
                f"{path}: the column {column.name!r} has {error}. Convert it, or remove it."
            ) from error
        if conversion is not None:
            conversions[column.name] = conversion
    return conversions


class RowList:
    """Rows in memory, such as those of a built-in task."""

    def __init__(self, rows: Sequence[dict[str, Any]], name: str = "rows") -> None:
        self._rows = rows
        self.name = name
        try:
            text = json.dumps(list(rows), sort_keys=True, default=str)
        # A reader of the rows refuses such values, and names the row and the column.
        except (TypeError, ValueError, RecursionError):
            text = str(len(rows))
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        """Return the name of a row, for messages."""
        return f"{self.name}, row {index + 1}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


class RowChain:
    """Several sources, one after the other."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self._sources = sources
        self._ends = _running_sum([len(source) for source in sources])
        joined = " ".join(source.fingerprint for source in sources)
        self.fingerprint = hashlib.blake2b(joined.encode(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _find(self, index: int) -> tuple[RowSource, int]:
        """Return the source of a row and the row's index in it."""
        number = bisect_right(self._ends, index)
        return self._sources[number], index - (self._ends[number - 1] if number else 0)

    def where(self, index: int) -> str:
        """Return the name of a row, for messages."""
        source, local = self._find(index)
        return source.where(local)

    def __getitem__(self, index: int) -> dict[str, Any]:
        source, local = self._find(index)
        return source[local]


def expand_paths(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files that `paths` name. Each is a file or a pattern such as `data/*.jsonl` (sorted).

    Raises:
        DataError: a file is missing, a pattern matches nothing, or a suffix is not supported.
    """
    files: list[Path] = []
    for entry in [paths] if isinstance(paths, str | Path) else paths:
        if Path(entry).is_file():
            matches = [Path(entry)]
        # Checked after the file's existence, since a name may contain these characters.
        elif any(mark in str(entry) for mark in "*?["):
            names = sorted(glob.glob(str(entry), recursive=True))
            matches = [Path(name) for name in names if Path(name).is_file()]
            if not matches:
                raise DataError(
                    f"{entry}: no file matches this pattern (looked in {Path.cwd()}). Correct the path."
                )
        elif Path(entry).is_dir():
            raise DataError(
                f"{entry}: is a folder. Name its files, for example {Path(entry) / '*.jsonl'}."
            )
        else:
            raise DataError(
                f"{entry}: not found (looked in {Path.cwd()}). Correct the path."
            )
        for file in matches:
            if file.suffix not in SUFFIXES:
                raise DataError(
                    f"{file}: a file that ends in {' or '.join(SUFFIXES)} is expected. Convert it, or "
                    "rename it if it holds one JSON object a line."
                )
        files.extend(matches)
    return files


def open_rows(paths: str | Path | Sequence[str | Path]) -> RowSource:
    """Return all rows of all files that `paths` name, in order.

    Raises:
        DataError: see `expand_paths`; or a Parquet file is damaged, or a file has no rows.
    """
    files = expand_paths(paths)
    if not files:
        raise DataError(
            "no data file is named. Give at least one .jsonl or .parquet file."
        )
    sources: list[RowSource] = [
        ParquetFile(path) if path.suffix == ".parquet" else JsonlFile(path)
        for path in files
    ]
    for source, path in zip(sources, files, strict=True):
        if len(source) == 0:
            raise DataError(
                f"{path}: the data set is empty. Put at least one row into it, or leave it out."
            )
    return sources[0] if len(sources) == 1 else RowChain(sources)


def _running_sum(sizes: Sequence[int]) -> list[int]:
    """Return the cumulative sums of `sizes`."""
    total = 0
    ends = []
    for size in sizes:
        total += size
        ends.append(total)
    return ends
