"""Arrays in files, whole or in chunks, any box of which can be read directly into its place.

One reader serves both formats. safetensors' `get_slice` makes a tensor that must be
copied, and does not know chunks; torch's `mmap=True` needs one tensor per file.
Contiguous runs are read with `pread`, not through a memory map, where a disk error
would kill the process. Headers are parsed here because safetensors does not report
where a tensor lies in its file.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import _TYPES

from megaverl.errors import CheckpointError, ModelError
from megaverl.outside import read_json, read_json_file
from megaverl.sharding.boxes import Box, BoxIndex, whole
from megaverl.sharding.layout import Layout, whole_layout

# safetensors' dtype name -> torch dtype. safetensors maps names that this torch version
# lacks to None.
DTYPES = {name: dtype for name, dtype in _TYPES.items() if dtype is not None}

# Bytes of a file in memory at a time when only some columns are read.
MAPPED_BYTES = 1 << 20


class Extent(NamedTuple):
    """A box of an array that is contiguous in a file in row-major order, or has the given strides (in elements)."""

    box: Box
    file: Path
    offset: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class StoredArray:
    """An array in files: its shape, dtype, and the places of its parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    extents: Sequence[Extent]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return whole(self.shape).numel * self.dtype.itemsize

    def transposed(self, axes: Sequence[int]) -> StoredArray:
        """Return the array with its axes in this order. No element moves."""

        def moved(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values[axis] for axis in axes)

        # Strides describe the same bytes in the new order of axes.
        extents = [
            extent._replace(
                box=Box(moved(extent.box.start), moved(extent.box.stop)),
                strides=moved(extent.strides or row_major(extent.box.shape)),
            )
            for extent in self.extents
        ]
        return StoredArray(moved(self.shape), self.dtype, extents)

    @cached_property
    def index(self) -> BoxIndex:
        """Spatial index of the extents' boxes."""
        return BoxIndex([extent.box for extent in self.extents])


def stored_arrays(stored: Mapping[str, StoredTensor]) -> dict[str, StoredArray]:
    """Return the tensors of safetensors files as arrays, by name.

    Raises:
        ModelError: a tensor has an unknown dtype.
    """
    unknown = [
        f"{name} ({tensor.dtype})"
        for name, tensor in stored.items()
        if tensor.dtype not in DTYPES
    ]
    if unknown:
        raise ModelError(
            f"tensors of dtypes that cannot be read here: {', '.join(unknown[:8])}. Dequantise the model first."
        )
    return {
        name: StoredArray(
            tensor.shape,
            DTYPES[tensor.dtype],
            [Extent(whole(tensor.shape), tensor.file, tensor.offset)],
        )
        for name, tensor in stored.items()
    }


def with_views(
    arrays: Mapping[str, StoredArray], layout: Layout
) -> dict[str, StoredArray]:
    """Add the views of a layout to the arrays. Views of stored arrays can only transpose."""
    return {
        **arrays,
        **{
            name: arrays[local].transposed(view.axes)
            for name, (local, view) in layout.views.items()
        },
    }


class StoredArrayReader:
    """Reads boxes of stored arrays. Several threads may share a reader. It holds open files, but no data."""

    def __init__(self, arrays: Mapping[str, StoredArray]) -> None:
        self.arrays = arrays
        self._files: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def __enter__(self) -> StoredArrayReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        # A map is unmapped when the last tensor that uses it is freed.
        self._maps.clear()

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (CPU, any strides, any dtype) with a box of an array. Shapes agree up to axes of size one.

        Raises:
            CheckpointError: the file cannot be read, or is too short.
        """
        array = self.arrays[name]
        # Shapes agree up to axes of size one, so the target can be viewed in the box's
        # shape.
        target = out.view(box.shape)
        for number, common in array.index.meeting(box):
            part = target[_within(common, box)]
            self._read_extent(array.dtype, array.extents[number], common, part)

    def _read_extent(
        self, dtype: torch.dtype, extent: Extent, box: Box, out: torch.Tensor
    ) -> None:
        try:
            # Index of the first element if the box is one run of the extent. None: the
            # box must be copied row by row.
            first = None if extent.strides else _run_start(box, extent.box)
            # Elements can be read straight into the target if neither dtype nor strides
            # differ.
            straight = out.dtype == dtype and (first is None or out.is_contiguous())
            read = (
                out
                if straight
                else self._buffer(box.numel * dtype.itemsize)
                .view(dtype)
                .view(box.shape)
            )
            if first is None:
                self._copy_strided(dtype, extent, box, read)
            else:
                self._pread(
                    extent.file,
                    read.reshape(-1).view(torch.uint8),
                    extent.offset + first * dtype.itemsize,
                )
            if not straight:
                out.copy_(read)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{extent.file}: cannot be read ({error}). {AGAIN}"
            ) from error

    def _pread(self, file: Path, out: torch.Tensor, offset: int) -> None:
        data = out.numpy().data
        while data:
            count = os.preadv(self._descriptor(file), [data], offset)
            if count == 0:
                raise CheckpointError(
                    f"{file}: truncated: it ends before byte {offset + len(data)}. {AGAIN}"
                )
            # `preadv` may read less than it was asked for.
            data, offset = data[count:], offset + count

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """Return this thread's buffer.

        It is reused, since a new one for each read would fragment the allocator's
        memory.
        """
        buffer: torch.Tensor | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._local.buffer = torch.empty(nbytes, dtype=torch.uint8)
        return buffer[:nbytes]

    def _copy_strided(
        self, dtype: torch.dtype, extent: Extent, box: Box, out: torch.Tensor
    ) -> None:
        """Copy columns, or a transposed chunk, through the page cache, some rows at a time."""
        mapped, size = self._map(extent.file), dtype.itemsize
        numel, strides = (
            whole(extent.box.shape).numel,
            extent.strides or row_major(extent.box.shape),
        )
        if extent.offset + numel * size > len(mapped):
            raise CheckpointError(
                f"{extent.file}: truncated: it ends before byte {extent.offset + numel * size}. {AGAIN}"
            )
        # A view of the file's pages, without a copy.
        flat = torch.frombuffer(
            mapped, dtype=torch.uint8, count=numel * size, offset=extent.offset
        )
        # View the file as bytes, since chunks may start at addresses that are not
        # aligned to their dtype.
        array = flat.as_strided(
            (*extent.box.shape, size), (*(stride * size for stride in strides), 1)
        )
        source, dest = (
            array[_within(box, extent.box)],
            out.unsqueeze(-1).view(torch.uint8),
        )
        # Rows of a transposed chunk are not adjacent in the file, so it is copied in
        # one go.
        if extent.strides is not None:
            dest.copy_(source)
            _give_back(mapped, extent.offset, extent.offset + numel * size)
            return
        # The box is not a single run, so some axis is longer than one.
        axis = next(axis for axis, length in enumerate(box.shape) if length > 1)
        row, length = strides[axis] * size, box.shape[axis]
        begin = extent.offset + size * sum(
            (low - base) * stride
            for low, base, stride in zip(
                box.start[: axis + 1], extent.box.start, strides, strict=False
            )
        )
        # Some rows at a time, and their pages are given back at once. Otherwise the
        # process would seem to hold the whole file in memory.
        step = max(1, MAPPED_BYTES // row)
        for low in range(0, length, step):
            rows = min(step, length - low)
            dest.narrow(axis, low, rows).copy_(source.narrow(axis, low, rows))
            _give_back(mapped, begin + low * row, begin + (low + rows) * row)

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY)
            return self._files[file]

    def _map(self, file: Path) -> mmap.mmap:
        descriptor = self._descriptor(file)
        with self._lock:
            if file not in self._maps:
                # torch accepts only writable buffers, so map copy-on-write. Nothing
                # writes to it.
                self._maps[file] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
            return self._maps[file]


def _within(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(
        slice(low - base, high - base)
        for low, high, base in zip(inner.start, inner.stop, outer.start, strict=True)
    )


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides in elements of an array in row-major order."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def _run_start(inner: Box, outer: Box) -> int | None:
    """Return the offset of `inner` in `outer`'s elements if it is one contiguous run; otherwise None."""
    strides = row_major(outer.shape)
    # True once a faster axis is taken only in part; every slower axis must then have
    # length one.
    free = False
    for low, high, base, end in zip(
        reversed(inner.start),
        reversed(inner.stop),
        reversed(outer.start),
        reversed(outer.stop),
        strict=True,
    ):
        if free and high - low > 1:
            return None
        free = free or (low, high) != (base, end)
    # Offset of the first element in the row-major order of the outer box.
    return sum(
        (low - base) * stride
        for low, base, stride in zip(inner.start, outer.start, strides, strict=True)
    )


def _give_back(mapped: mmap.mmap, start: int, stop: int) -> None:
    """Drop the pages of a range from this process's memory. The kernel keeps them cached."""
    page = mmap.PAGESIZE
    # `madvise` takes whole pages. The page of the first byte is dropped as well, and
    # read again if needed.
    low = start // page * page
    mapped.madvise(mmap.MADV_DONTNEED, low, min(stop, len(mapped)) - low)


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
AGAIN = "Copy or download the file again from its source."


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape, its dtype in safetensors' notation (`F32`, `BF16`,
    ...), and the offset of its first byte.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0


def read_folder(folder: str | Path) -> dict[str, StoredTensor]:
    """Read the names and places of all tensors of a Hugging Face folder, from the headers alone.

    Raises:
        ModelError: there are no weights, a shard of the index is missing or lacks a tensor, or a file is truncated or
            damaged.
    """
    folder = Path(folder)
    index = folder / INDEX_FILE
    if not index.is_file():
        if (folder / SINGLE_FILE).is_file():
            return read_header(folder / SINGLE_FILE)
        raise ModelError(
            f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there. `model.path` must name a folder "
            "with safetensors weights (convert others with transformers' `save_pretrained`)."
        )
    weight_map = read_weight_map(index)
    headers = {}
    # Every shard's header is read once, however many tensors the index places in it.
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
            raise ModelError(
                f"{folder / name}: not found, but {INDEX_FILE} names it. Copy the missing file into the folder."
            )
        headers[name] = read_header(folder / name)
    stored = {}
    for tensor, file in weight_map.items():
        if tensor not in headers[file]:
            raise ModelError(
                f"{folder / file}: has no tensor {tensor}, but {INDEX_FILE} says so. "
                "Copy index and files again from the same source."
            )
        stored[tensor] = headers[file][tensor]
    return stored


def folder_layout(stored: dict[str, StoredTensor]) -> Layout:
    """Return the layout of a folder, where every tensor is whole under its own name."""
    return whole_layout((name, tensor.shape) for name, tensor in stored.items())


MAX_DIMS = 16


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the tensors of one safetensors file, by name.

    Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes
    (safetensors' README).

    Raises:
        ModelError: the file is truncated or not safetensors.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        # A damaged length must not make the reader allocate gigabytes.
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ModelError(
                f"{file}: truncated or not a safetensors file ({size} bytes). {AGAIN}"
            )
        text = stream.read(length)
    try:
        header = read_json(text)
        header.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(
                file,
                tuple(entry["shape"]),
                entry["dtype"],
                8 + length + entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }
        for name, entry in header.items():
            # The header comes from outside: negative or huge numbers in it must not
            # reach the arithmetic and the reads below.
            sizes = [*entry["shape"], *entry["data_offsets"]]
            if (
                not all(isinstance(size, int) and 0 <= size < 2**63 for size in sizes)
                or len(entry["shape"]) > MAX_DIMS
            ):
                raise ValueError(
                    f"{name}: shape {entry['shape']}, offsets {entry['data_offsets']}"
                )
        end = (
            8
            + length
            + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(
            f"{file}: its safetensors header is damaged ({error}). {AGAIN}"
        ) from error
    # Both cases are errors: a shorter file was cut off, a longer one does not belong to
    # this header.
    if size != end:
        raise ModelError(
            f"{file}: {'truncated' if size < end else 'damaged'}: {size} bytes found, {end} expected by its "
            f"header. {AGAIN}"
        )
    return tensors


def read_weight_map(index: Path) -> dict[str, str]:
    """Read tensor -> file from a `model.safetensors.index.json`.

    Raises:
        ModelError: the file is not such an index.
    """
    try:
        weight_map = read_json_file(index)["weight_map"]
        return {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index}: not a safetensors index ({error!r}). {AGAIN}"
        ) from error
