"""The files of Megatron's `torch_dist` checkpoints, read by themselves: no process group, and nothing unpickled.

A folder holds `.metadata`, a pickled index of arrays, chunks and their places in `*.distcp` files; each chunk is a
zip as `torch.save` writes it (torch 2.13, `distributed/checkpoint/filesystem.py`,
`caffe2/serialize/inline_container.cc`).
The index and the chunks' descriptions are pickles; they are read with plain stand-ins for every class that they may
name, so that nothing in them can run.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megaverl.errors import CheckpointError
from megaverl.sharding.boxes import Box
from megaverl.weights.stored import Extent, StoredArray, row_major

INDEX_FILE = ".metadata"
FORMAT_FILE = "metadata.json"
COMMON_FILE = "common.pt"
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
MAX_NAMED = 12  # damaged chunks that a message names
MEND = "Copy the checkpoint again from its source, or take another one."

# dtype -> the name under which a chunk's pickle gives it
STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
}
_STAND_INS = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner",  # megatron-core leaves its plans in the index
    "pathlib",
    "pathlib._local",
}


class Chunk(NamedTuple):
    """Where a chunk's zip lies."""

    box: Box
    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class IndexedArray:
    """An array of a checkpoint as its index describes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[Chunk]


def is_torch_dist(folder: Path) -> bool:
    """Whether the folder looks like a distributed checkpoint."""
    return (folder / INDEX_FILE).is_file()


def read_index(folder: Path) -> dict[str, IndexedArray]:
    """Every array of a checkpoint by key (objects left out), and that its files are there and long enough.

    Raises:
        CheckpointError: no checkpoint, another format or a newer one, a damaged index, files that are missing or
            end too early (all of them are named).
    """
    _check_format(folder)
    index = folder / INDEX_FILE
    try:
        with index.open("rb") as file:
            metadata = _Unpickler(file).load()
        places = {
            (key.fqn, tuple(key.offset)): place
            for key, place in metadata.storage_data.items()
            if getattr(key, "offset", None) is not None  # None: a plain object
        }
        arrays = {}
        for name, entry in metadata.state_dict_metadata.items():
            if hasattr(entry, "chunks"):
                arrays[name] = _array(folder, name, entry, places)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read ({error}). {MEND}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{index}: refused: {type(error).__name__}: {error}. {MEND}") from error
    _check_files(folder, arrays.values())
    return arrays


def locate(arrays: Mapping[str, IndexedArray]) -> dict[str, StoredArray]:
    """The arrays with the places of their elements, found from the chunks' own descriptions.

    Raises:
        CheckpointError: a chunk is damaged, or is not what the index says.
    """
    files: dict[Path, int] = {}
    try:
        return {
            name: StoredArray(array.shape, array.dtype, [_extent(name, array.dtype, c, files) for c in array.chunks])
            for name, array in arrays.items()
        }
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def check_checksums(arrays: Mapping[str, IndexedArray], share: int = 0, shares: int = 1) -> None:
    """Read every byte of this share (of so many) of the chunks, and compare with the checksums in their zips.

    Raises:
        CheckpointError: names every chunk whose bytes were changed.
    """
    wrong = []
    chunks = [(name, chunk) for name, array in arrays.items() for chunk in array.chunks]
    for name, chunk in chunks[share::shares]:
        with chunk.file.open("rb") as file:
            try:
                with zipfile.ZipFile(_Window(file.fileno(), chunk.offset, chunk.length)) as archive:
                    whole = archive.testzip() is None
            except (OSError, zipfile.BadZipFile):
                whole = False
        if not whole:
            wrong.append(f"{chunk.file.name}: {name} {chunk.box}")
    if wrong:
        more = f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        named = "; ".join(wrong[:MAX_NAMED]) + more
        raise CheckpointError(f"{chunk.file.parent}: bytes were changed since it was written: {named}. {MEND}")


def _check_format(folder: Path) -> None:
    path = folder / FORMAT_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        backend, version = content["sharded_backend"], content["sharded_backend_version"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: not a whole distributed checkpoint: it has no {FORMAT_FILE}. {MEND}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({type(error).__name__}: {error}). {MEND}") from error
    if backend != BACKEND["sharded_backend"] or version != BACKEND["sharded_backend_version"]:
        raise CheckpointError(
            f"{path}: format {backend!r} version {version}; this megaverl reads torch_dist version 1. "
            "Take a checkpoint in that format, or a newer megaverl."
        )


def _array(folder: Path, name: str, entry: Any, places: Mapping[Any, Any]) -> IndexedArray:
    chunks = []
    for chunk in entry.chunks:
        start, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        place = places.get((name, start))
        if place is None:
            raise CheckpointError(f"{folder / INDEX_FILE}: names no file for {name} at {list(start)}. {MEND}")
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(f"{folder}: {name} is stored compressed, which cannot be read here.")
        box = Box(start, tuple(low + size for low, size in zip(start, sizes, strict=True)))
        file = folder / place.relative_path
        if not file.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{folder / INDEX_FILE}: {name} lies outside the folder, in {file}. Refused.")
        chunks.append(Chunk(box, file, place.offset, place.length))
    return IndexedArray(tuple(entry.size), entry.properties.state[0], chunks)


def _check_files(folder: Path, arrays: Iterable[IndexedArray]) -> None:
    ends: dict[Path, int] = {}
    for array in arrays:
        for chunk in array.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
    wrong = []
    for file, end in sorted(ends.items()):
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            wrong.append(f"{file.name} is missing")
        elif size < end:
            wrong.append(f"{file.name} is truncated: {size} bytes, at least {end} expected")
    if wrong:
        raise CheckpointError(f"{folder}: damaged: {'; '.join(wrong)}. {MEND}")


def _extent(name: str, dtype: torch.dtype, chunk: Chunk, files: dict[Path, int]) -> Extent:
    if chunk.file not in files:
        files[chunk.file] = os.open(chunk.file, os.O_RDONLY)
    descriptor = files[chunk.file]
    try:
        with zipfile.ZipFile(_Window(descriptor, chunk.offset, chunk.length)) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            storage, first, shape, strides = _ChunkUnpickler(io.BytesIO(archive.read(records["data.pkl"]))).load()
            if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
                raise ValueError("big-endian")
            data = records[f"data/{storage.key}"]
        header = os.pread(descriptor, 30, chunk.offset + data.header_offset)
        offset = chunk.offset + data.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        if (storage.dtype, tuple(shape)) != (dtype, chunk.box.shape) or data.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"it is {storage.dtype} {list(shape)}, the index says {dtype} {list(chunk.box.shape)}")
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if (last + 1) * dtype.itemsize > data.file_size or offset + data.file_size > chunk.offset + chunk.length:
            raise ValueError("it ends too early")
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{chunk.file}: {name} {chunk.box} is damaged ({type(error).__name__}: {error}). {MEND}"
        ) from error
    plain = tuple(strides) == row_major(shape)
    return Extent(chunk.box, chunk.file, offset + first * dtype.itemsize, None if plain else tuple(strides))


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        data = os.pread(self._descriptor, left if size < 0 else min(size, left), self._offset + self._at)
        self._at += len(data)
        return data


class _Plain:
    """Stands in for a class that a pickle names: keeps what it is given, and does nothing with it."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class _Unpickler(pickle.Unpickler):
    """Of the index."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _STAND_INS and "." not in name:
            return type(name, (_Plain,), {})
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found
            if name == "Size":
                return tuple
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str


class _ChunkUnpickler(pickle.Unpickler):
    """Of one tensor: gives (storage, first element, shape, strides)."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES.values():
            return next(dtype for dtype, storage in STORAGES.items() if storage == name)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, first, shape, strides, *_: (storage, first, shape, strides)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, identity: Any) -> _Storage:
        kind, dtype, key, _, _ = identity
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"it refers to {kind}")
        return _Storage(dtype, str(key))
