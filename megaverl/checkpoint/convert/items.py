"""Arrays that a conversion writes, the parts that fill them, and the threads that copy."""

from __future__ import annotations

import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megaverl.sharding.boxes import Box, BoxIndex, carry, split, whole
from megaverl.sharding.layout import Layout
from megaverl.sharding.plan import intersect_layouts
from megaverl.weights.stored import StoredArrayReader
from megaverl.weights.torch_dist import Frame

# Bytes that a thread holds at a time: small enough for the processor's cache.
SLAB_BYTES = 1 << 20


class ArrayPart(NamedTuple):
    """Elements of a source array, and their place in the target array."""

    source: str
    source_box: Box
    box: Box


@dataclass(frozen=True)
class Item:
    """One array of one file: a tensor of a safetensors file, or a chunk of a distributed checkpoint.

    Attributes:
        name: name of the tensor or key, for messages.
        offset: offset in the file of the first element, or of the frame if there is one.
        parts: source of the elements; those that no part covers are padding, and zero.
    """

    name: str
    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Sequence[ArrayPart]
    frame: Frame | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return whole(self.shape).numel * self.dtype.itemsize

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that it is written to."""
        return (self.file,)

    def pieces(self, reader: StoredArrayReader) -> Iterator[FileBytes]:
        """Yield the bytes to write. Each piece is overwritten by the next."""
        start = self.offset + (self.frame.data_offset if self.frame else 0)
        at, crc = start, 0
        for slab in slabs(reader, self.shape, self.dtype, self.parts):
            data = bytes_of(slab)
            if self.frame:
                crc = zlib.crc32(data, crc)
            yield FileBytes(self.file, at, data)
            at += len(data)
        if self.frame:
            # The head holds the checksum, which is only known after the data.
            head = memoryview(self.frame.head(crc))
            yield FileBytes(self.file, self.offset, head, is_data=False)
            tail = memoryview(self.frame.tail(crc))
            yield FileBytes(self.file, at, tail, is_data=False)


class FileBytes(NamedTuple):
    """Bytes of an item, and their place in a file. `is_data` is False for a frame around the elements."""

    file: str
    offset: int
    data: memoryview
    is_data: bool = True


class FileItem(Protocol):
    """Array that a conversion writes: an `Item`, or a matrix that becomes several tensors."""

    @property
    def name(self) -> str: ...

    @property
    def file(self) -> str: ...

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def files(self) -> tuple[str, ...]: ...

    def pieces(self, reader: StoredArrayReader) -> Iterator[FileBytes]: ...


ItemType = TypeVar("ItemType", bound=FileItem)


def parts_of(source_layout: Layout, dest: Layout) -> dict[str, list[ArrayPart]]:
    """Return target array -> its parts.

    If only the target holds a weight transposed, the source's array is read transposed
    (`ModelSource.arrays`).

    Raises:
        ReshardError: see `intersect_layouts`.
    """
    by_array: dict[str, list[ArrayPart]] = {}
    for transfer in intersect_layouts(source_layout, dest):
        source, box = transfer.source_local, transfer.source_box
        local, dest_box = stored_box(dest, transfer.dest_local, transfer.dest_box)
        # Both sides hold it transposed: the stored arrays are copied as they are.
        if transfer.dest_local != local and source in source_layout.views:
            source, box = stored_box(source_layout, source, box)
        elif transfer.dest_local != local:
            source, box = transposed_name(source), last_axes_swapped(box)
        by_array.setdefault(local, []).append(ArrayPart(source, box, dest_box))
    return by_array


def stored_box(layout: Layout, local: str, box: Box) -> tuple[str, Box]:
    """Return (array, box of the array) of a box of a local array or view. A view swaps the last two axes."""
    return (
        (local, box)
        if local not in layout.views
        else (layout.stored_in(local), last_axes_swapped(box))
    )


def transposed_name(array: str) -> str:
    """Return the name of a stored array with its last two axes swapped."""
    return f"{array}.transposed"


def last_axes_swapped(box: Box) -> Box:
    """Return the box with its last two axes swapped."""
    return Box(*((*corner[:-2], corner[-1], corner[-2]) for corner in box))


class Parts:
    """Parts of a target array, searchable by box."""

    def __init__(self, parts: Sequence[ArrayPart]) -> None:
        self._parts = parts
        self._index = BoxIndex([part.box for part in parts])

    def within(self, box: Box) -> list[ArrayPart]:
        """Return the parts inside a box of the target array, in the box's coordinates."""
        inside_box = []
        for number, common in self._index.meeting(box):
            part = self._parts[number]
            inside = Box(
                tuple(
                    low - base
                    for low, base in zip(common.start, box.start, strict=True)
                ),
                tuple(
                    high - base
                    for high, base in zip(common.stop, box.start, strict=True)
                ),
            )
            inside_box.append(
                ArrayPart(part.source, carry(common, part.box, part.source_box), inside)
            )
        return inside_box


def slabs(
    reader: StoredArrayReader,
    shape: Sequence[int],
    dtype: torch.dtype,
    parts: Sequence[ArrayPart],
) -> Iterator[torch.Tensor]:
    """Yield the elements of a target array in order, slab by slab. Each slab is overwritten by the next."""
    numel = max(1, SLAB_BYTES // dtype.itemsize)
    buffer, filling = (
        torch.empty(min(numel, whole(shape).numel), dtype=dtype),
        Parts(parts),
    )
    for box in split(whole(shape), numel):
        slab = buffer[: box.numel].view(box.shape)
        wanted = filling.within(box)
        # Elements that no part covers are the padding of a vocabulary.
        if sum(part.box.numel for part in wanted) < box.numel:
            slab.zero_()
        for part in wanted:
            reader.read(part.source, part.source_box, slab[part.box.slices])
        yield slab


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, without a copy."""
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data


def write_items(
    folder: Path,
    items: Sequence[FileItem],
    reader: StoredArrayReader,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Write items into existing files of full size, several in parallel.

    Args:
        progress: called with the bytes just written, from any thread.
    """
    stop = threading.Event()
    with _opened(folder, items, os.O_WRONLY) as files:

        def write(item: FileItem) -> None:
            for piece in item.pieces(reader):
                if stop.is_set():
                    return
                _write(files[piece.file], piece.data, piece.offset)
                if piece.is_data:
                    progress(len(piece.data))

        in_threads(write, items, stop)
        # Write errors that the kernel has deferred appear here.
        for descriptor in files.values():
            os.fsync(descriptor)


def differing_items(
    folder: Path,
    items: Sequence[FileItem],
    reader: StoredArrayReader,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Compute items again, and return the names of those whose bytes in the files differ."""
    differing: set[str] = set()
    with _opened(folder, items, os.O_RDONLY) as files:

        def compare(item: FileItem) -> None:
            for piece in item.pieces(reader):
                size = len(piece.data)
                if os.pread(files[piece.file], size, piece.offset) != piece.data:
                    differing.add(item.name)
                if piece.is_data:
                    progress(size)

        in_threads(compare, items, threading.Event())
    return sorted(differing)


@contextmanager
def _opened(
    folder: Path, items: Iterable[FileItem], flags: int
) -> Iterator[dict[str, int]]:
    """Open the files of items: name -> descriptor."""
    files: dict[str, int] = {}
    try:
        for item in items:
            for name in item.files:
                if name not in files:
                    files[name] = os.open(folder / name, flags)
        yield files
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def in_threads(
    work: Callable[[ItemType], None], items: Iterable[ItemType], stop: threading.Event
) -> None:
    """Run `work` on all items in threads. The first error stops the others and is raised."""
    # Reading, checksums and writing release the interpreter lock.
    with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            # Running items see `stop` at their next slab, and the others never start.
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    # `pwrite` may write less than it was asked for. It has its own offset, so threads
    # can share the descriptor.
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def share_of(items: Sequence[ItemType], rank: int, world: int) -> list[ItemType]:
    """Return the items of one of `world` ranks: largest first, each to the rank with the fewest bytes so far."""
    # Every rank computes the same assignment, without communication.
    load = [0] * world
    chosen = []
    for item in sorted(items, key=lambda item: -item.nbytes):
        taker = load.index(min(load))
        load[taker] += item.nbytes
        if taker == rank:
            chosen.append(item)
    # Ordered by place, so that each rank writes its files front to back.
    return sorted(chosen, key=lambda item: (item.file, item.offset))


@contextmanager
def bar(label: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts bytes, from any thread. Show a bar on a terminal, and one line at the end."""
    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    progress = Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True
    )
    task = progress.add_task(label, total=total)
    lock = threading.Lock()
    done, start = 0, time.perf_counter()

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
        progress.advance(task, nbytes)

    # A log file gets only the line at the end.
    if not (shown and console.is_terminal):
        yield lambda nbytes: None
    else:
        with progress:
            yield count
    if shown:
        seconds = max(time.perf_counter() - start, 1e-9)
        console.print(
            f"{label}: {total / 1e9:.3f} GB in {seconds:.1f} s ({total / 1e9 / seconds:.2f} GB/s)",
            highlight=False,
        )
