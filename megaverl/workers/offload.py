"""Moving tensors out of the accelerator's memory and back, in place: every view of them stays what it was.

What moves is storages. Weights and gradients are views of Megatron's buffers, an optimizer's master weights may be
views of the weights, an engine's parameters may be views of the actor's: a storage is emptied and filled again, and
all of these find their values in it. Nothing may be read in between.

On CUDA the copies go to pinned host memory, on a stream of their own. With a folder they go to files, also on a
machine without an accelerator, where it is the only place to go; without one, nothing moves there.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

import torch

from megaverl.errors import ConfigError, TrainingStopped
from megaverl.platform import platform

Storages = list[torch.UntypedStorage]
SMALLEST = 64  # bytes
SLAB = 2**28  # bytes of pinned memory at a time; a power of two
ALIGNMENT = 512  # bytes, of a storage's place in a slab


class PinnedMemory:
    """Host memory that the accelerator copies to and from by itself; kept for the next time.

    It lies in slabs of one size, over which the storages are laid end to end. torch rounds every pinned allocation up
    to a power of two (2.13, ATen/core/CachingHostAllocator.h): a copy of each storage by itself could take twice its
    size, while slabs of a power of two take what they hold.
    """

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are pinned."""
        return sum(slab.nbytes for slab in self._slabs)

    def store(self, storages: Storages) -> None:
        sizes = [storage.nbytes() for storage in storages]
        self._reserve(sum(aligned(size) for size in sizes))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for number, first, slab, start, size in slab_pieces(sizes):
                source = as_bytes(storages[number])[first : first + size]
                self._slabs[slab][start : start + size].copy_(source, non_blocking=True)
        self._stream.synchronize()  # the memory is given away next

    def fetch(self, storages: Storages) -> None:
        # what was computed last may still use the memory that the storages have got
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for number, first, slab, start, size in slab_pieces([storage.nbytes() for storage in storages]):
                target = as_bytes(storages[number])[first : first + size]
                target.copy_(self._slabs[slab][start : start + size], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _reserve(self, nbytes: int) -> None:
        """Have at least so many bytes; whole slabs are kept."""
        wanted = slab_sizes(nbytes)
        if sum(wanted) <= self.nbytes:
            return
        self._slabs = [slab for slab in self._slabs if slab.nbytes == SLAB]
        for size in wanted[len(self._slabs) :]:
            self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))


def slab_sizes(nbytes: int) -> list[int]:
    """Return the sizes of the slabs that hold so many bytes: whole ones, or one that is smaller."""
    if nbytes < SLAB:
        return [1 << (nbytes - 1).bit_length()] if nbytes else []
    return [SLAB] * -(-nbytes // SLAB)


def aligned(nbytes: int) -> int:
    """Return a size rounded up to where the next storage may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def slab_pieces(sizes: Iterable[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (storage, first byte in it, slab, first byte there, bytes) of storages that are laid end to end over slabs.

    Args:
        sizes: bytes of each storage.
    """
    begin = 0
    for number, size in enumerate(sizes):
        done = 0
        while done < size:
            slab, start = divmod(begin + done, SLAB)
            piece = min(size - done, SLAB - start)
            yield number, done, slab, start, piece
            done += piece
        begin += aligned(size)


class Files:
    """One file in a folder, without a name: it goes with the process."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as this is)
        except OSError as error:
            raise ConfigError(f"offload.folder={folder}: cannot be written ({error}). Name another one.") from error
        self._folder = folder

    def store(self, storages: Storages) -> None:
        self._file.seek(0)
        try:
            for storage in storages:
                left = memory_of(as_bytes(storage).cpu())
                while left:
                    left = left[self._file.write(left) :]
        except OSError as error:
            raise TrainingStopped(f"offload.folder={self._folder}: {error}. Make room, or name another one.") from error

    def fetch(self, storages: Storages) -> None:
        self._file.seek(0)
        for storage in storages:
            target = as_bytes(storage)
            read = target if target.device.type == "cpu" else torch.empty(target.numel(), dtype=torch.uint8)
            left = memory_of(read)
            while left:
                count = os.readv(self._file.fileno(), [left])
                if not count:
                    raise TrainingStopped(f"offload.folder={self._folder}: what was written there is gone.")
                left = left[count:]
            if read is not target:
                target.copy_(read)


class Nowhere:
    """Values are not kept: they come back as zeros."""

    def store(self, storages: Storages) -> None:
        """Nothing to keep."""

    def fetch(self, storages: Storages) -> None:
        for storage in storages:
            as_bytes(storage).zero_()


# Where copies of storages lie: when `store` returns, they may be emptied; `fetch` fills them when they have their size.
OffloadTarget = PinnedMemory | Files | Nowhere


class Offload:
    """Storages that are on the device inside `with` blocks, which may be nested, and offloaded outside.

    Args:
        storages: gives them, anew whenever they are offloaded: an optimizer has its state after its first step only.
        place: where they go.
    """

    def __init__(self, storages: Callable[[], Storages], place: OffloadTarget) -> None:
        self._storages, self._place = storages, place
        self._inside = 0
        self._offloaded: list[tuple[torch.UntypedStorage, int]] = []

    def __enter__(self) -> Offload:
        self._inside += 1
        self.onload()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._inside -= 1
        if not self._inside:
            self.offload()

    @torch.no_grad()
    def offload(self) -> None:
        """Empty the storages, after their bytes were copied. Those that are offloaded already stay so."""
        if self._offloaded:
            return
        storages = self._storages()
        self._place.store(storages)
        self._offloaded = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        if platform.is_cuda:
            torch.cuda.empty_cache()  # others, such as an engine that wakes up, ask the driver for memory

    @torch.no_grad()
    def onload(self) -> None:
        """The tensors are as they were. Nothing happens where they are here."""
        offloaded, self._offloaded = self._offloaded, []
        for storage, nbytes in offloaded:
            storage.resize_(nbytes)
        if offloaded:
            self._place.fetch([storage for storage, _ in offloaded])


def place_for(folder: str | None) -> OffloadTarget | None:
    """Where things go: None where there is neither an accelerator nor a folder, and nothing moves."""
    if folder is not None:
        return Files(Path(folder))
    return PinnedMemory() if platform.is_cuda else None


def storages_of(tensors: Iterable[torch.Tensor], without: Iterable[torch.Tensor] = ()) -> Storages:
    """The storages on the accelerator (on a CPU: all) that the tensors lie in, each once; none that `without` has, and
    none that cannot be emptied or is a mere number, such as an optimizer's count of steps."""
    left_out = {tensor.untyped_storage().data_ptr() for tensor in without}
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        moves = storage.nbytes() >= SMALLEST and storage.resizable() and tensor.device.type == platform.device.type
        if moves and storage.data_ptr() not in left_out:
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def memory_of(data: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor of a CPU. (numpy would make its storage one that cannot be emptied.)"""
    array = (ctypes.c_char * (data.numel() * data.element_size())).from_address(data.data_ptr())
    return memoryview(array).cast("B")


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """[bytes] uint8, the storage itself."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
