"""Read the index of a `torch_dist` checkpoint safely: torch's own reader would execute whatever its pickle names.

`.metadata` (torch's distributed checkpointing) names arrays, their chunks and the
chunks' places in `*.distcp` files. This reader replaces every class that may occur by a
stand-in without behaviour, and refuses all others. It does not need torch.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megaverl.errors import CheckpointError
from megaverl.outside import read_json_file
from megaverl.sharding.boxes import Box

INDEX_FILE = ".metadata"
FORMAT_FILE = "metadata.json"
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
COPY_AGAIN = "Copy the checkpoint again from its source, or take another one."

ITEM_BYTES = {
    "complex128": 16,
    "complex64": 8,
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath"}
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # megatron-core also stores its save plans in the index.
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}


class Chunk(NamedTuple):
    """Place of the zip archive that holds a box of an array, or an object (an empty box)."""

    box: Box
    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class IndexedArray:
    """An array of a checkpoint. Layers are often stacked along the first axis.

    Attributes:
        dtype: name of the dtype without "torch.".
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: Sequence[Chunk]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class CheckpointIndex:
    """Contents of a checkpoint by name, in the order of the index: arrays, and objects that are not arrays."""

    arrays: dict[str, IndexedArray]
    objects: dict[str, Chunk]

    def wrong_sizes(self) -> list[str]:
        """List every file that is missing, or shorter than the index requires, in words."""
        ends: dict[Path, int] = {}
        for chunk in [
            *(chunk for array in self.arrays.values() for chunk in array.chunks),
            *self.objects.values(),
        ]:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
        wrong = []
        for file, end in sorted(ends.items()):
            size = file.stat().st_size if file.is_file() else None
            if size is None:
                wrong.append(f"{file.name} is missing")
            elif size < end:
                wrong.append(
                    f"{file.name} has {size} bytes, and the index names some up to {end}"
                )
        return wrong


def is_torch_dist(folder: Path) -> bool:
    """Return whether the folder looks like a distributed checkpoint."""
    return (folder / INDEX_FILE).is_file()


def read_arrays(folder: Path) -> dict[str, IndexedArray]:
    """Read the arrays of a checkpoint by key, and check that its files exist and are long enough.

    Raises:
        CheckpointError: there is no checkpoint, its format is unknown or newer, its index is damaged, or files are
            missing or too short (all are listed).
    """
    # The format is checked before the index, whose damage would give a less helpful
    # message.
    _check_format(folder)
    index = read_index(folder)
    if wrong := index.wrong_sizes():
        raise CheckpointError(f"{folder}: damaged: {'; '.join(wrong)}. {COPY_AGAIN}")
    return index.arrays


def read_index(folder: Path, fix: str = COPY_AGAIN) -> CheckpointIndex:
    """Read the index, but no other file.

    Args:
        fix: advice that ends error messages.

    Raises:
        CheckpointError: the index is missing or damaged, names a forbidden class, or a path outside the folder.
    """
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        return _index_of(folder, metadata)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). {fix}") from error
    except Exception as error:
        # A damaged pickle can raise anything.
        raise CheckpointError(
            f"{path}: refused: {type(error).__name__}: {error}. {fix}"
        ) from error


def _index_of(folder: Path, metadata: Any) -> CheckpointIndex:
    root, files = folder.resolve(), {}
    # Paths are checked before any file is opened: an index from elsewhere could name
    # any file of the machine.
    for key, place in metadata.storage_data.items():
        if place.relative_path not in files:
            files[place.relative_path] = folder / place.relative_path
            if not files[place.relative_path].resolve().is_relative_to(root):
                raise CheckpointError(
                    f"{folder / INDEX_FILE}: {key.fqn} lies outside of the folder. Refused."
                )
    places = {}
    for key, place in metadata.storage_data.items():
        # Arrays have one entry per chunk, found by the chunk's first index. Objects
        # have a single entry.
        start = getattr(key, "offset", None)  # an object has none
        places[key.fqn, None if start is None else tuple(start)] = place

    def chunk(
        name: str, start: tuple[int, ...] | None, sizes: Sequence[int] = ()
    ) -> Chunk:
        place = places.get((name, start))
        if place is None:
            raise CheckpointError(
                f"{folder / INDEX_FILE}: names no file for {name} at {start}. {COPY_AGAIN}"
            )
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{folder}: {name} is stored compressed, which cannot be read here."
            )
        low = start or ()
        box = Box(
            low, tuple(begin + size for begin, size in zip(low, sizes, strict=True))
        )
        return Chunk(box, files[place.relative_path], place.offset, place.length)

    arrays = {
        name: IndexedArray(
            tuple(entry.size),
            entry.properties.dtype,
            [
                chunk(name, tuple(stored_chunk.offsets), tuple(stored_chunk.sizes))
                for stored_chunk in entry.chunks
            ],
        )
        for name, entry in metadata.state_dict_metadata.items()
        # Entries of objects have no chunks.
        if hasattr(entry, "chunks")
    }
    return CheckpointIndex(
        arrays, {name: chunk(name, None) for name, start in places if start is None}
    )


def _check_format(folder: Path) -> None:
    path = folder / FORMAT_FILE
    try:
        content = read_json_file(path)
        backend, version = (
            content["sharded_backend"],
            content["sharded_backend_version"],
        )
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: not a whole distributed checkpoint: it has no {FORMAT_FILE}. {COPY_AGAIN}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: damaged ({type(error).__name__}: {error}). {COPY_AGAIN}"
        ) from error
    if {"sharded_backend": backend, "sharded_backend_version": version} != BACKEND:
        raise CheckpointError(
            f"{path}: format {backend!r} version {version}; this megaverl reads torch_dist version 1. "
            "Take a checkpoint in that format, or a newer megaverl."
        )


class _StandIn:
    """Stand-in for any class of the index: stores its state, and does nothing with it."""

    def __init__(self, *_: Any) -> None:
        """Accept any arguments: pickle calls an enum's class with its value."""

    def __setstate__(self, state: Any) -> None:
        # TensorProperties pickles a tuple whose first element is its dtype.
        self.__dict__.update({"dtype": state[0]} if isinstance(state, tuple) else state)


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler that refuses all classes except those in `_CLASSES`. An index that it accepts is safe for torch too."""

    def find_class(self, module: str, name: str) -> Any:
        # dtypes become their names, so that no torch is needed.
        if module == "torch" and name in ITEM_BYTES:
            return name
        # Shapes become tuples, which is all that a shape is.
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        if name in _CLASSES.get(module, ()):
            return _StandIn
        # Anything else might run code when torch loads the index.
        raise pickle.UnpicklingError(f"it names {module}.{name}")
