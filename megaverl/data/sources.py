"""Where rows come from: files, folders, data sets on the hub, the user's own code. Each as rows by number."""

from __future__ import annotations

import glob
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaverl.config.data_sources import SourceConfig
from megaverl.config.sources import is_hub_name
from megaverl.data.rows import SUFFIXES, RowList, RowSource, open_rows
from megaverl.errors import DataError
from megaverl.plugins import load_object

OWN = re.compile(r"(?:[\w./\\-]+\.py|[A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*")
HOW_TO_INSTALL = "pip install 'megaverl[datasets]'"
ROW_METHODS = ("__len__", "__getitem__", "where")
Entry = SourceConfig | str | Path


def as_source(entry: Entry) -> SourceConfig:
    """The long form of an entry that is only a path."""
    return entry if isinstance(entry, SourceConfig) else SourceConfig(path=str(entry))


def kind_of(path: str) -> str:
    """`files` (or a pattern), `folder` of such, `saved` by datasets, `hub`, or `own` code. Looks at the disk only."""
    if OWN.fullmatch(path):
        return "own"
    if Path(path).is_dir():
        return "saved" if is_saved_dataset(Path(path)) else "folder"
    if not Path(path).exists() and not glob.has_magic(path) and not path.endswith(SUFFIXES) and is_hub_name(path):
        return "hub"
    return "files"


def is_saved_dataset(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` has made it."""
    return (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()


def open_source(entry: Entry) -> RowSource:
    """All rows of one entry.

    Raises:
        DataError: nothing is there, it is damaged or empty, or the package that reads it is missing.
    """
    source = as_source(entry)
    rows = _open(source)
    if len(rows) == 0:
        raise DataError(f"{source.path}: the data set is empty. Put at least one row into it, or leave it out.")
    return rows if source.limit is None or source.limit >= len(rows) else FirstRows(rows, source.limit)


def _open(source: SourceConfig) -> RowSource:
    kind = kind_of(source.path)
    if kind == "own":
        return _own(source.path)
    if kind in ("saved", "hub"):
        return HubRows(source)
    return open_rows(folder_files(Path(source.path)) if kind == "folder" else source.path)


def folder_files(folder: Path) -> list[Path]:
    """The data files in a folder and its folders, by name.

    Raises:
        DataError: there is none.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise DataError(f"{folder}: no file in this folder ends in {' or '.join(SUFFIXES)}. Name another one.")
    return files


class HubRows:
    """A split of a data set of Hugging Face's `datasets`: of the hub, or of save_to_disk; memory-mapped."""

    def __init__(self, source: SourceConfig) -> None:
        self._name = source.path + (f", {source.subset}" if source.subset else "") + f", {source.split}"
        self._rows = load_hub(source, streaming=False)
        self.fingerprint = str(self._rows._fingerprint)

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        return f"{self._name}, row {index + 1}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._rows[index]
        return row


def load_hub(source: SourceConfig, *, streaming: bool) -> Any:
    """A `datasets.Dataset`, or, streamed, an `IterableDataset`.

    Raises:
        DataError: the package is missing, or it says why it cannot.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DataError(f"{source.path}: reading it needs the package datasets: {HOW_TO_INSTALL}.")
    import datasets

    try:
        if kind_of(source.path) == "saved":
            found = datasets.load_from_disk(source.path)
            if isinstance(found, datasets.DatasetDict):
                found = found[source.split]
            return found.to_iterable_dataset() if streaming else found
        return datasets.load_dataset(source.path, source.subset, split=source.split, streaming=streaming)
    except KeyError as error:
        raise DataError(f"{source.path}: no split {error}; it has {', '.join(found)}. Set split.") from error
    except Exception as error:  # whatever it raises of networks, names, files and columns
        raise DataError(
            f"{source.path}: datasets cannot load it: {type(error).__name__}: {error}. Look at the name and at the "
            "network (HF_HUB_OFFLINE must not be set), or name a local folder."
        ) from error


class FirstRows:
    """The first rows of another source."""

    def __init__(self, rows: RowSource, count: int) -> None:
        self._rows, self._count = rows, count
        self.where = rows.where
        self.fingerprint = f"{rows.fingerprint}-first-{count}"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


def _own(name: str) -> RowSource:
    """What the user's function returns: rows with `where` and `fingerprint`, or a plain list of mappings.

    Raises:
        DataError: it raises, or returns something else.
    """
    function = load_object(name, "data")
    try:
        found = function() if callable(function) else function
    except Exception as error:  # whatever the user's function raises
        raise DataError(f"{name}: it raised {type(error).__name__}: {error}") from error
    if all(hasattr(found, method) for method in (*ROW_METHODS, "fingerprint")):
        rows: RowSource = found
        return rows
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise DataError(
            f"{name}: it gave {type(found).__name__}; expected a list of rows (mappings), or an object with "
            f"{', '.join(ROW_METHODS)} and fingerprint."
        )
    for number, row in enumerate(found):
        if not isinstance(row, dict):
            raise DataError(f"{name}, row {number + 1}: found {type(row).__name__}; expected a mapping of columns.")
    return RowList(found, name)
