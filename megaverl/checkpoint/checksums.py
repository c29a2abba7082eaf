"""CRC-32 of files, found while they are written and again while they are read. Pure files, no torch."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

# zlib's polynomial with the processor's own instruction: five times as fast as zlib, and as fast as memory.
from isal.isal_zlib import crc32, crc32_combine

PIECE_BYTES = 1 << 24


class ChecksummedFile(io.FileIO):
    """A new file that counts and sums up what is written to it, front to back."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "wb")
        self.num_bytes, self.crc32 = 0, 0

    def write(self, data: Any, known_crc32: int | None = None) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):  # the system may take less than it is given
            done += super().write(view[done:]) or 0
        self.num_bytes += len(view)
        own = crc32(view) if known_crc32 is None else known_crc32
        self.crc32 = crc32_combine(self.crc32, own, len(view))
        return len(view)

    @property
    def record(self) -> list[Any]:
        """[bytes, CRC-32] of what was written."""
        return [self.num_bytes, f"{self.crc32:08x}"]


def write_bytes(path: Path, data: bytes) -> list[Any]:
    """Write a file that is on the disk when this returns; its [bytes, CRC-32]."""
    with ChecksummedFile(path) as file:
        file.write(data)
        os.fsync(file.fileno())
    return file.record


def synced_record(path: Path) -> list[Any]:
    """Put a file that something else wrote on the disk; its [bytes, CRC-32]."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return [path.stat().st_size, crc32_of(path)]


def crc32_of(path: Path) -> str:
    """The CRC-32 of a file, as eight hex digits."""
    value = 0
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # Linux then reads twice as far ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        block = bytearray(1 << 22)
        view = memoryview(block)
        while count := file.readinto(block):
            value = crc32(view[:count], value)
    return f"{value:08x}"


def read_into(file: io.FileIO, view: memoryview, offset: int, *, keep_cached: bool = True) -> int:
    """Fill `view` from `offset` on, and return its CRC-32.

    Args:
        keep_cached: False: nobody reads these bytes again, so the system need not find memory to keep them in.

    Raises:
        EOFError: the file ends before.
    """
    value = 0
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
            os.posix_fadvise(file.fileno(), at, len(piece), os.POSIX_FADV_DONTNEED)
    return value
