"""Files of a checkpoint that are written and read with a CRC-32 checksum, and synced to the disk.

Checksums are computed while files are written, and again while they are read.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# CRC-32 with zlib's polynomial and the processor's own instructions: five times as fast
# as zlib, and as fast as memory.
from isal.isal_zlib import crc32, crc32_combine

from megaverl.errors import CheckpointError
from megaverl.outside import read_json_file

PIECE_BYTES = 1 << 24


class ChecksummedFile(io.FileIO):
    """A new file that counts its bytes and computes their CRC-32 as they are written in order."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "wb")
        self.num_bytes, self.crc32 = 0, 0

    def write(self, data: Any, known_crc32: int | None = None) -> int:
        """Append bytes and update the checksum.

        Args:
            known_crc32: the CRC-32 of `data`, if the caller knows it.
        """
        view = memoryview(data).cast("B")
        done = 0
        # A write may be partial.
        while done < len(view):
            done += super().write(view[done:]) or 0
        self.num_bytes += len(view)
        crc32_of_data = crc32(view) if known_crc32 is None else known_crc32
        # The checksum of the file so far and that of the new bytes give that of both,
        # without reading anything again.
        self.crc32 = crc32_combine(self.crc32, crc32_of_data, len(view))
        return len(view)

    @property
    def record(self) -> list[Any]:
        """[bytes, CRC-32] of everything written."""
        return [self.num_bytes, f"{self.crc32:08x}"]


def write_bytes(path: Path, data: bytes) -> list[Any]:
    """Write a file that is on the disk when this returns; return its [bytes, CRC-32]."""
    with ChecksummedFile(path) as file:
        file.write(data)
        os.fsync(file.fileno())
    return file.record


def synced_record(path: Path) -> list[Any]:
    """Flush a file that other code wrote to the disk; return its [bytes, CRC-32]."""
    with path.open("rb") as file:
        # Flushing works through any descriptor of the file.
        os.fsync(file.fileno())
    return [path.stat().st_size, crc32_of(path)]


def crc32_of(path: Path) -> str:
    """Return the CRC-32 of a file as eight hex digits."""
    value = 0
    with path.open("rb", buffering=0) as file:
        # With this advice, Linux reads twice as far ahead.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        block = bytearray(1 << 22)
        view = memoryview(block)
        while count := file.readinto(block):
            value = crc32(view[:count], value)
    return f"{value:08x}"


def read_into(
    file: io.FileIO, view: memoryview, offset: int, *, keep_cached: bool = True
) -> int:
    """Fill `view` with the file's bytes from `offset`, and return their CRC-32.

    Args:
        keep_cached: False if nobody reads these bytes again, so that the kernel need not keep them in memory.

    Raises:
        EOFError: the file is too short.
    """
    value = 0
    # In pieces, so that each is still in the processor's cache for its checksum.
    for start in range(0, len(view), PIECE_BYTES):
        piece, at = view[start : start + PIECE_BYTES], offset + start
        done = 0
        while done < len(piece):
            count = os.preadv(file.fileno(), [piece[done:]], at + done)
            if count == 0:
                raise EOFError(f"it ends at {at + done}")
            done += count
        value = crc32(piece, value)
        if not keep_cached and hasattr(os, "posix_fadvise"):
            # Bytes that are read once should not push the others out of the kernel's
            # cache.
            os.posix_fadvise(file.fileno(), at, len(piece), os.POSIX_FADV_DONTNEED)
    return value


USE_ANOTHER = "Take another checkpoint (checkpoint.resume=FOLDER), or start anew (checkpoint.resume=never)."
FIX = "Look at the folder's free space and rights, or point run.dir elsewhere. The checkpoints before it are untouched."


def crc32_of_json(content: dict[str, Any]) -> str:
    return f"{crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def write_json(path: Path, content: Any) -> None:
    # The same file is read with limits (`read_json`), since a folder may come from
    # elsewhere.
    """Write JSON that is on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        return read_json_file(path, not_finite=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}). {USE_ANOTHER}"
        ) from error


def sync_folder(folder: Path) -> None:
    """Flush the folder's entries (new names, renames) to the disk."""
    # Flushing a file does not flush its name: the folder that lists it is cached
    # separately.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Convert an OSError of the block to a CheckpointError with the folder and advice."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the checkpoint was not written: {error}. {FIX}"
        ) from error
