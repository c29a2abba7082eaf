"""Offload tensors from device memory and bring them back in place, so that every view of them stays valid.

Offloading works on storages. Weights and gradients are views of Megatron's buffers, an
optimizer's master weights may be views of the weights, and an engine's parameters may
be views of the actor's. A storage is emptied and later refilled, and all views see its
values again. Nothing may read it in between.

On CUDA the copies go to pinned host memory, on a separate stream. If a folder is
configured they go to files, also on a machine without an accelerator. Without a folder,
a machine without an accelerator offloads nothing.
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
SMALLEST = 64  # bytes; smaller storages are not worth a copy
SLAB = 2**28  # bytes of one pinned allocation; must be a power of two
ALIGNMENT = 512  # bytes; alignment of a storage in a slab


class PinnedMemory:
    """Pinned host memory that is allocated once and reused.

    The memory consists of slabs of one size, over which the storages are laid end to
    end. torch rounds every pinned allocation up to a power of two (2.13,
    ATen/core/CachingHostAllocator.h): one allocation per storage could take twice its
    size, while slabs of a power of two waste nothing.
    """

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream()

    @property
    def nbytes(self) -> int:
        """Number of pinned bytes."""
        return sum(slab.nbytes for slab in self._slabs)

    # Streams of both directions, with time running to the right. The host blocks only
    # at the end of `store`:
    #
    #   store   current  ...kernels|
    #           side                | wait, copy to the host |
    #           host                                         | free the device memory
    #   fetch   current  ...kernels|                          | kernels that read...
    #           side                | wait, copy to the device |
    def store(self, storages: Storages) -> None:
        sizes = [storage.nbytes() for storage in storages]
        self._reserve(sum(aligned(size) for size in sizes))
        # The copy starts after all kernels that write the storages.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for number, first, slab, start, size in slab_pieces(sizes):
                source = as_bytes(storages[number])[first : first + size]
                self._slabs[slab][start : start + size].copy_(source, non_blocking=True)
        self._stream.synchronize()  # the caller frees the device memory next

    def fetch(self, storages: Storages) -> None:
        # The new device memory of the storages may still be in use by kernels on the
        # current stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for number, first, slab, start, size in slab_pieces(
                [storage.nbytes() for storage in storages]
            ):
                target = as_bytes(storages[number])[first : first + size]
                target.copy_(self._slabs[slab][start : start + size], non_blocking=True)
        # Kernels of the current stream wait for the copy, the host does not.
        torch.cuda.current_stream().wait_stream(self._stream)

    def _reserve(self, nbytes: int) -> None:
        """Pin at least `nbytes` bytes, keeping existing full-size slabs."""
        wanted = slab_sizes(nbytes)
        if sum(wanted) <= self.nbytes:
            return
        # A smaller slab is replaced by a full one, since offsets count in full slabs.
        self._slabs = [slab for slab in self._slabs if slab.nbytes == SLAB]
        for size in wanted[len(self._slabs) :]:
            self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))


def slab_sizes(nbytes: int) -> list[int]:
    """Return the sizes of the slabs that hold `nbytes` bytes: several full slabs, or one smaller slab."""
    if nbytes < SLAB:
        return [1 << (nbytes - 1).bit_length()] if nbytes else []
    return [SLAB] * -(-nbytes // SLAB)


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to the next possible start of a storage."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def slab_pieces(sizes: Iterable[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (storage, offset in it, slab, offset in the slab, bytes) for storages laid end to end over slabs.

    Args:
        sizes: bytes of each storage.
    """
    begin = 0
    for number, size in enumerate(sizes):
        # A storage may span several slabs.
        done = 0
        while done < size:
            slab, start = divmod(begin + done, SLAB)
            piece = min(size - done, SLAB - start)
            yield number, done, slab, start, piece
            done += piece
        begin += aligned(size)


class Files:
    """Unnamed temporary file in a folder. The file system deletes it when the process ends."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as this is)
        except OSError as error:
            raise ConfigError(
                f"offload.folder={folder}: cannot be written ({error}). Name another one."
            ) from error
        self._folder = folder

    def store(self, storages: Storages) -> None:
        self._file.seek(0)
        try:
            for storage in storages:
                left = memory_of(as_bytes(storage).cpu())
                while left:
                    # An unbuffered `write` may take less than it was given.
                    left = left[self._file.write(left) :]
        except OSError as error:
            raise TrainingStopped(
                f"offload.folder={self._folder}: {error}. Make room, or name another one."
            ) from error

    def fetch(self, storages: Storages) -> None:
        self._file.seek(0)
        for storage in storages:
            target = as_bytes(storage)
            read = (
                target
                # Memory of a device is filled by way of the host.
                if target.device.type == "cpu"
                else torch.empty(target.numel(), dtype=torch.uint8)
            )
            left = memory_of(read)
            while left:
                count = os.readv(self._file.fileno(), [left])
                if not count:
                    raise TrainingStopped(
                        f"offload.folder={self._folder}: the files that this run wrote are gone."
                    )
                left = left[count:]
            if read is not target:
                target.copy_(read)


class Nowhere:
    """Offload target that keeps no values: they come back as zeros."""

    def store(self, storages: Storages) -> None:
        """Do nothing."""

    def fetch(self, storages: Storages) -> None:
        for storage in storages:
            as_bytes(storage).zero_()


# Target of offloaded storages. They may be emptied once `store` returns; `fetch` fills
# them after they are resized.
OffloadTarget = PinnedMemory | Files | Nowhere


class Offload:
    """Context manager that keeps storages on the device inside `with` blocks, and offloads them outside.

    Blocks may nest.

    Args:
        storages: returns the storages. It is called at every offload, because some optimizers create their state in
            their first step.
        place: target of the copies.

    Example:
        weights = Offload(lambda: storages_of(model.parameters()), PinnedMemory())
        weights.offload()  # device memory is free
        with weights:  # values are back
            model(tokens)
    """

    def __init__(self, storages: Callable[[], Storages], place: OffloadTarget) -> None:
        self._storages, self._place = storages, place
        self._inside = 0
        self._offloaded: list[tuple[torch.UntypedStorage, int]] = []

    def __enter__(self) -> Offload:
        self._inside += 1
        self.onload()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._inside -= 1
        if not self._inside:
            self.offload()

    @torch.no_grad()
    def offload(self) -> None:
        """Copy the storages to the target and empty them. Does nothing if they are already offloaded."""
        if self._offloaded:
            return
        # Asked anew each time: some optimizers create their state in their first step.
        storages = self._storages()
        self._place.store(storages)
        self._offloaded = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            # Resizing to 0 frees the memory, while all views keep pointing to the
            # storage.
            storage.resize_(0)
        if platform.is_cuda:
            # Other allocators, such as a waking engine's, can only use memory that was
            # returned to the driver.
            torch.cuda.empty_cache()

    @torch.no_grad()
    def onload(self) -> None:
        """Refill the storages from the target. Does nothing if they are on the device."""
        # Taken before the copies: an error in between must not refill the storages a
        # second time.
        offloaded, self._offloaded = self._offloaded, []
        for storage, nbytes in offloaded:
            storage.resize_(nbytes)
        if offloaded:
            self._place.fetch([storage for storage, _ in offloaded])


def place_for(folder: str | None) -> OffloadTarget | None:
    """Return the offload target: files in `folder`, else pinned memory on CUDA, else None (nothing is offloaded)."""
    if folder is not None:
        return Files(Path(folder))
    return PinnedMemory() if platform.is_cuda else None


def storages_of(
    tensors: Iterable[torch.Tensor], without: Iterable[torch.Tensor] = ()
) -> Storages:
    """Return the storages of the tensors, each once, except those that `without` uses.

    It leaves out storages that are not on the platform's device, cannot be resized, or
    are smaller than `SMALLEST` bytes, such as an optimizer's step count.
    """
    left_out = {tensor.untyped_storage().data_ptr() for tensor in without}
    # Views share a storage, and each storage moves once.
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        moves = (
            storage.nbytes() >= SMALLEST
            and storage.resizable()
            and tensor.device.type == platform.device.type
        )
        if moves and storage.data_ptr() not in left_out:
            storages.setdefault(storage.data_ptr(), storage)
    return list(storages.values())


def memory_of(data: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without numpy, which would make its storage non-resizable."""
    array = (ctypes.c_char * (data.numel() * data.element_size())).from_address(
        data.data_ptr()
    )
    return memoryview(array).cast("B")


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a [bytes] uint8 view of the storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
