"""Chunks of `torch_dist` checkpoints: find their elements, and write zip archives like `torch.save` in parts.

`torch.save` and `torch.load` handle whole tensors. Here several ranks and threads write
one chunk slab by slab, since its length is known before its elements are, and any box
of it can be read. (torch 2.13, `caffe2/serialize/inline_container.cc`.)
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megaverl.errors import CheckpointError
from megaverl.sharding.boxes import whole
from megaverl.weights.stored import Extent, StoredArray, row_major
from megaverl.weights.torch_dist_index import (
    BACKEND,
    COPY_AGAIN,
    FORMAT_FILE,
    INDEX_FILE,
    Chunk,
    IndexedArray,
)

COMMON_FILE = "common.pt"
MAX_NAMED = 12  # damaged chunks that a message lists
# Largest chunk: small enough to share work between threads, and below zip's limit of 4
# GiB.
CHUNK_BYTES = 1 << 28
# megatron-core stores this as the extra state of a linear layer that has none.
NO_EXTRA_STATE: list[None] = [None]

# dtype -> name of its storage class in a chunk's pickle.
STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
}


def locate(arrays: Mapping[str, IndexedArray]) -> dict[str, StoredArray]:
    """Find the places of the arrays' elements from the chunks' own pickles. No element is read.

    Raises:
        CheckpointError: a chunk is damaged, or does not match the index.
    """
    located = {}
    with ExitStack() as stack:

        @cache
        def opened(path: Path) -> BinaryIO:
            # Many chunks lie in one file, which is opened once. Unbuffered, because
            # only descriptions are read.
            return stack.enter_context(path.open("rb", buffering=0))

        for name, array in arrays.items():
            dtype = getattr(torch, array.dtype)
            extents = [_extent(name, dtype, chunk, opened) for chunk in array.chunks]
            located[name] = StoredArray(array.shape, dtype, extents)
    return located


def check_checksums(
    arrays: Mapping[str, IndexedArray], share: int = 0, shares: int = 1
) -> None:
    """Read every byte of one of `shares` equal parts of the chunks, and compare the checksums in their zips.

    Raises:
        CheckpointError: lists every chunk whose bytes have changed.
    """
    wrong = []
    chunks = [(name, chunk) for name, array in arrays.items() for chunk in array.chunks]
    # Every `shares`-th chunk, so that ranks read about equally many bytes.
    for name, chunk in chunks[share::shares]:
        try:
            with (
                chunk.file.open("rb", buffering=0) as file,
                zipfile.ZipFile(_ChunkFile(file, chunk)) as archive,
            ):
                # torch does not compress its records. A compressed one could unpack to
                # any size.
                stored = all(
                    record.compress_type == zipfile.ZIP_STORED
                    for record in archive.infolist()
                )
                intact = stored and archive.testzip() is None
        except (OSError, zipfile.BadZipFile):
            intact = False
        if not intact:
            wrong.append(f"{chunk.file.name}: {name} {chunk.box}")
    if wrong:
        more = f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        named = "; ".join(wrong[:MAX_NAMED]) + more
        raise CheckpointError(
            f"{chunk.file.parent}: bytes were changed since it was written: {named}. {COPY_AGAIN}"
        )


def _extent(
    name: str, dtype: torch.dtype, chunk: Chunk, opened: Callable[[Path], BinaryIO]
) -> Extent:
    try:
        file: Any = _ChunkFile(opened(chunk.file), chunk)
        # Of a tensor on the meta device its description is read, and none of its elements.
        tensor = torch.load(file, weights_only=True, map_location="meta")
        if not isinstance(tensor, torch.Tensor) or (
            tensor.dtype,
            tuple(tensor.shape),
        ) != (dtype, chunk.box.shape):
            raise ValueError(
                f"it is {tensor}, the index says {dtype} {list(chunk.box.shape)}"
            )
        shape, strides = tuple(tensor.shape), tensor.stride()
        # torch records where the elements lie in the archive instead of reading them.
        begin = tensor.untyped_storage()._checkpoint_offset
        assert begin is not None, "torch.load marks it on the meta device"
        start = begin + int(tensor.storage_offset()) * dtype.itemsize
        # The last element's index decides whether the chunk is long enough, whatever
        # the strides are.
        last = sum(
            (size - 1) * stride for size, stride in zip(shape, strides, strict=True)
        )
        if start + (last + 1) * dtype.itemsize > chunk.length:
            raise ValueError("it ends too early")
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{chunk.file}: {name} {chunk.box} is damaged: it names more than a plain tensor's parts. {COPY_AGAIN}"
        ) from None  # torch's message would advise loading without safety checks
    except Exception as error:
        # A damaged pickle can raise anything.
        raise CheckpointError(
            f"{chunk.file}: {name} {chunk.box} is damaged ({type(error).__name__}: {error}). {COPY_AGAIN}"
        ) from error
    return Extent(
        chunk.box,
        chunk.file,
        chunk.offset + start,
        None if strides == row_major(shape) else strides,
    )


class _ChunkFile(io.RawIOBase):
    """File-like view of a chunk's bytes."""

    def __init__(self, file: BinaryIO, chunk: Chunk) -> None:
        self._file, self._chunk, self._at = file, chunk, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._chunk.length}[
            whence
        ] + offset
        if at < 0:
            raise OSError("before the beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._chunk.length - self._at)]
        # `preadv` does not move the file's position, which chunks of the same file
        # share.
        count = os.preadv(self._file.fileno(), [view], self._chunk.offset + self._at)
        self._at += count
        return count


class Frame:
    """The bytes around a chunk's elements in its zip archive. Only the checksum depends on the elements."""

    ALIGNMENT = 64

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        numel, self._shape = whole(shape).numel, tuple(shape)
        self._storage = ("storage", getattr(torch, STORAGES[dtype]), "0", "cpu", numel)
        stream = io.BytesIO()
        _FramePickler(stream, protocol=2).dump(self)
        self.nbytes = numel * dtype.itemsize
        self._small = [
            ("data.pkl", stream.getvalue()),
            ("byteorder", b"little"),
            ("version", b"3\n"),
        ]
        # Each local header of a zip file has 30 bytes, followed by name and data.
        unpadded = (
            sum(30 + len(_name(name)) + len(data) for name, data in self._small)
            + 30
            + len(_name("data/0"))
        )
        # torch pads the elements to 64 bytes with an extra field (`4246`, "FB"), which
        # itself needs four bytes.
        self._padding = -(unpadded + 4) % self.ALIGNMENT
        self.data_offset = unpadded + 4 + self._padding
        # The length of the tail does not depend on the checksum.
        self.length = self.data_offset + self.nbytes + len(self.tail(0))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle like the tensor that it frames, as `torch.save` does."""
        # Empty. OrderedDict[str, Any]() would be pickled differently from torch's.
        hooks: dict[str, Any] = OrderedDict()
        arguments = (
            self._storage,
            0,
            self._shape,
            row_major(self._shape),
            False,
            hooks,
        )
        return torch._utils._rebuild_tensor_v2, arguments

    def head(self, crc: int) -> bytes:
        """Return all bytes before the elements."""
        parts = [
            # The small records are whole here, so their checksums are known.
            _local_header(name, zlib.crc32(data), len(data)) + data
            for name, data in self._small
        ]
        extra = struct.pack("<HH", 0x4246, self._padding) + b"Z" * self._padding
        return b"".join([*parts, _local_header("data/0", crc, self.nbytes, extra)])

    def tail(self, crc: int) -> bytes:
        """Return all bytes after the elements."""
        entries, at = [], 0
        for name, data in self._small:
            entries.append(_directory_entry(name, zlib.crc32(data), len(data), at))
            at += 30 + len(_name(name)) + len(data)
        entries.append(_directory_entry("data/0", crc, self.nbytes, at))
        directory = b"".join(entries)
        end = struct.pack(
            "<4sHHHHIIH",
            b"PK\5\6",
            0,
            0,
            len(entries),
            len(entries),
            len(directory),
            self.data_offset + self.nbytes,
            0,
        )
        return directory + end


class _FramePickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        # Storages become persistent ids, as in `torch.save`. All other objects are
        # pickled as usual.
        return obj if isinstance(obj, tuple) and obj[:1] == ("storage",) else None


def _name(name: str) -> bytes:
    return b"archive/" + name.encode()


def _local_header(name: str, crc: int, size: int, extra: bytes = b"") -> bytes:
    return struct.pack(
        "<4sHHHHHIIIHH",
        b"PK\3\4",
        20,
        0,
        0,
        0,
        0,
        crc,
        size,
        size,
        len(_name(name)),
        len(extra),
    ) + (_name(name) + extra)


def _directory_entry(name: str, crc: int, size: int, offset: int) -> bytes:
    return struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        *(
            b"PK\1\2",
            20,
            20,
            0,
            0,
            0,
            0,
            crc,
            size,
            size,
            len(_name(name)),
            0,
            0,
            0,
            0,
            0,
            offset,
        ),
    ) + _name(name)


def write_index(
    folder: Path, arrays: Mapping[str, IndexedArray], objects: Mapping[str, Chunk]
) -> None:
    """Write `.metadata`, `metadata.json` and an empty `common.pt`."""
    from torch.distributed.checkpoint import metadata as words
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for name, array in arrays.items():
        entries[name] = words.TensorStorageMetadata(
            words.TensorProperties(dtype=getattr(torch, array.dtype)),
            torch.Size(array.shape),
            [
                words.ChunkStorageMetadata(
                    torch.Size(c.box.start), torch.Size(c.box.shape)
                )
                for c in array.chunks
            ],
        )
        for number, chunk in enumerate(array.chunks):
            index = words.MetadataIndex(name, torch.Size(chunk.box.start), number)
            # Relative names, so that the folder can be moved.
            places[index] = _StorageInfo(chunk.file.name, chunk.offset, chunk.length)
    for name, chunk in objects.items():
        entries[name] = words.BytesStorageMetadata()
        places[words.MetadataIndex(name)] = _StorageInfo(
            chunk.file.name, chunk.offset, chunk.length
        )
    content = words.Metadata(
        entries, storage_data=places, storage_meta=words.StorageMeta()
    )
    with (folder / INDEX_FILE).open("wb") as file:
        pickle.dump(content, file)
    # megatron-core expects the file even if nothing is common.
    torch.save({}, folder / COMMON_FILE)
    versions = BACKEND | {"common_backend": "torch", "common_backend_version": 1}
    (folder / FORMAT_FILE).write_text(json.dumps(versions), encoding="utf-8")
