"""Tensors in files, the zips that `torch.save` makes, without the copies that it and `torch.load` make of each.

All that stands around the elements is known from shape, dtype and their CRC-32. So a tensor is read in one go, straight
into where it belongs, and one comparison tells whether every byte is as it was written.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence

import torch

from megaverl.checkpoint.checksums import ChecksummedFile, crc32, read_into
from megaverl.errors import DamagedCheckpoint
from megaverl.weights.torch_dist import STORAGES, Frame

LARGEST = (1 << 32) - (1 << 20)  # what a zip holds without its 64-bit extension


def frame_of(shape: Sequence[int], dtype: torch.dtype) -> Frame | None:
    """What stands around a tensor's elements; None where that is left to torch (no plain dtype, or too large)."""
    if dtype not in STORAGES or torch.Size(shape).numel() * dtype.itemsize > LARGEST:
        return None
    return Frame(tuple(shape), dtype)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_tensor(file: ChecksummedFile, tensor: torch.Tensor) -> None:
    """Append a tensor to a file; one on a device is copied to the host first."""
    tensor = tensor.detach().cpu().contiguous()
    frame = frame_of(tensor.shape, tensor.dtype)
    if frame is None:
        torch.save(tensor.clone(), file)  # a clone: torch writes all of the memory that a tensor is a part of
        return
    elements = bytes_of(tensor)
    checksum = crc32(elements)
    file.write(frame.head(checksum))
    file.write(elements, checksum)
    file.write(frame.tail(checksum))


def read_tensor(file: io.FileIO, offset: int, frame: Frame, into: torch.Tensor, *, keep_cached: bool = True) -> None:
    """Read a tensor that `write_tensor` has written.

    Args:
        frame: of its shape and dtype.
        into: contiguous, in host memory.
        keep_cached: as of `read_into`.

    Raises:
        DamagedCheckpoint: a byte is not as it was written.
    """
    head, tail = bytearray(frame.data_offset), bytearray(len(frame.tail(0)))
    try:
        read_into(file, memoryview(head), offset)
        checksum = read_into(file, bytes_of(into), offset + frame.data_offset, keep_cached=keep_cached)
        read_into(file, memoryview(tail), offset + frame.length - len(tail))
    except EOFError as error:
        raise DamagedCheckpoint(str(error)) from error
    if head != frame.head(checksum) or tail != frame.tail(checksum):
        raise DamagedCheckpoint("its bytes are not those that were written")


def read_object(file: io.FileIO, offset: int, length: int) -> bytes:
    """Read what torch has written: an object, or a tensor that has no `frame_of`.

    Raises:
        DamagedCheckpoint: a byte of its contents is not as it was written.
    """
    data = bytearray(length)
    try:
        read_into(file, memoryview(data), offset)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()
    except (EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        raise DamagedCheckpoint(f"its bytes are not those that were written ({error})") from error
    if damaged is not None:
        raise DamagedCheckpoint(f"its bytes are not those that were written ({damaged})")
    return bytes(data)
