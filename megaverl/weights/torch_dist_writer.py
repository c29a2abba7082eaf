"""Writing the files of Megatron's `torch_dist` checkpoints: chunks as `torch.save` frames them, and the index.

Formats: `torch_dist.py`; the zip of one tensor as in torch 2.13's `caffe2/serialize/inline_container.cc`. All lengths
are known before any element is, so that threads and ranks can write their chunks side by side.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megaverl.sharding.boxes import whole
from megaverl.weights.stored import row_major
from megaverl.weights.torch_dist import BACKEND, COMMON_FILE, FORMAT_FILE, INDEX_FILE, STORAGES, Chunk, IndexedArray

CHUNK_BYTES = 1 << 28  # the largest chunk: parts that several threads work on, far from zip's limit of 4 GiB
# what megatron-core stores for the extra state of a linear layer that has none
NO_EXTRA_STATE: list[None] = [None]


class _Reference:
    """A storage in the pickle of a tensor."""

    def __init__(self, storage: Any, numel: int) -> None:
        self.identity = ("storage", storage, "0", "cpu", numel)


class _Description:
    """A tensor in its pickle."""

    def __init__(self, shape: Sequence[int], storage: Any) -> None:
        self.arguments: tuple[Any, ...] = (
            _Reference(storage, whole(shape).numel),
            0,
            tuple(shape),
            row_major(shape),
            False,
            OrderedDict(),
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return torch._utils._rebuild_tensor_v2, self.arguments


class _ChunkPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.identity if isinstance(obj, _Reference) else None


class Frame:
    """What stands around a chunk's elements in its zip; only its checksum depends on them."""

    ALIGNMENT = 64

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        stream = io.BytesIO()
        _ChunkPickler(stream, protocol=2).dump(_Description(shape, getattr(torch, STORAGES[dtype])))
        self.nbytes = whole(shape).numel * dtype.itemsize
        self._small = [("data.pkl", stream.getvalue()), ("byteorder", b"little"), ("version", b"3\n")]
        unpadded = sum(30 + len(_name(name)) + len(data) for name, data in self._small) + 30 + len(_name("data/0"))
        self._padding = -(unpadded + 4) % self.ALIGNMENT
        self.data_offset = unpadded + 4 + self._padding
        self.length = self.data_offset + self.nbytes + len(self.tail(0))

    def head(self, crc: int) -> bytes:
        """All before the elements."""
        parts = [_local_header(name, zlib.crc32(data), len(data)) + data for name, data in self._small]
        extra = struct.pack("<HH", 0x4246, self._padding) + b"Z" * self._padding
        return b"".join([*parts, _local_header("data/0", crc, self.nbytes, extra)])

    def tail(self, crc: int) -> bytes:
        """All behind them."""
        entries, at = [], 0
        for name, data in self._small:
            entries.append(_directory_entry(name, zlib.crc32(data), len(data), at))
            at += 30 + len(_name(name)) + len(data)
        entries.append(_directory_entry("data/0", crc, self.nbytes, at))
        directory = b"".join(entries)
        end = struct.pack(
            "<4sHHHHIIH", b"PK\5\6", 0, 0, len(entries), len(entries), len(directory), self.data_offset + self.nbytes, 0
        )
        return directory + end


def _name(name: str) -> bytes:
    return b"archive/" + name.encode()


def _local_header(name: str, crc: int, size: int, extra: bytes = b"") -> bytes:
    return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 20, 0, 0, 0, 0, crc, size, size, len(_name(name)), len(extra)) + (
        _name(name) + extra
    )


def _directory_entry(name: str, crc: int, size: int, offset: int) -> bytes:
    return struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        *(b"PK\1\2", 20, 20, 0, 0, 0, 0, crc, size, size, len(_name(name)), 0, 0, 0, 0, 0, offset),
    ) + _name(name)


def write_index(folder: Path, arrays: Mapping[str, IndexedArray], objects: Mapping[str, Chunk]) -> None:
    """Write `.metadata`, `metadata.json` and an empty `common.pt`.

    Args:
        objects: keys of plain objects and where their pickles lie.
    """
    from torch.distributed.checkpoint import metadata as words
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for name, array in arrays.items():
        entries[name] = words.TensorStorageMetadata(
            words.TensorProperties(dtype=array.dtype),
            torch.Size(array.shape),
            [words.ChunkStorageMetadata(torch.Size(c.box.start), torch.Size(c.box.shape)) for c in array.chunks],
        )
        for number, chunk in enumerate(array.chunks):
            index = words.MetadataIndex(name, torch.Size(chunk.box.start), number)
            places[index] = _StorageInfo(chunk.file.name, chunk.offset, chunk.length)
    for name, chunk in objects.items():
        entries[name] = words.BytesStorageMetadata()
        places[words.MetadataIndex(name)] = _StorageInfo(chunk.file.name, chunk.offset, chunk.length)
    content = words.Metadata(entries, storage_data=places, storage_meta=words.StorageMeta())
    with (folder / INDEX_FILE).open("wb") as file:
        pickle.dump(content, file)
    torch.save({}, folder / COMMON_FILE)
    versions = BACKEND | {"common_backend": "torch", "common_backend_version": 1}
    (folder / FORMAT_FILE).write_text(json.dumps(versions), encoding="utf-8")
