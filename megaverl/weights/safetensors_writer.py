"""Stream tensors into safetensors files: headers first, then elements as they arrive.

Why by hand: for a file of 1 GiB, safetensors' own writer needed 1,027 MiB of memory and
this one 68 MiB, one tensor. torch's (DCP's HuggingFaceStorageWriter, torch 2.13) wrote
512 MiB for 256 MiB of weights: every byte twice.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megaverl.errors import CheckpointError
from megaverl.sharding.boxes import whole
from megaverl.sharding.weight import Weight
from megaverl.weights.stored import DTYPES, INDEX_FILE, SINGLE_FILE

# (name, shape, dtype)
Tensor = tuple[str, tuple[int, ...], torch.dtype]
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class FolderWriter:
    """Streams tensors into safetensors files in the order of the weights. On ranks that do not write, it does nothing.

    A disk error must not block the other ranks. So the error is kept until `finish`,
    and later chunks are dropped. The folder is removed if anything fails.
    """

    def __init__(
        self,
        folder: Path,
        weights: Sequence[Weight],
        dtype: torch.dtype,
        shard_bytes: int,
        *,
        writes: bool,
    ) -> None:
        self._folder, self._writes = folder, writes
        self._headers = shard_headers(
            [(weight.name, weight.shape, dtype) for weight in weights], shard_bytes
        )
        self._coming = iter(self._headers.items())
        self._left = 0
        self._stream: BinaryIO | None = None
        self._error: CheckpointError | None = None
        self._done = False

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, *_: object) -> None:
        # An error leaves no half-written folder behind.
        if self._writes and not self._done:
            self._close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, chunks: Iterable[torch.Tensor]) -> None:
        """Append contiguous chunks, each at most as long as the rest of its tensor."""
        if not self._writes or self._error is not None:
            return
        try:
            for chunk in chunks:
                if self._left == 0:
                    self._open_next()
                assert self._stream is not None
                # A copy to the host only if the chunk is on a device.
                data = chunk.cpu().reshape(-1).view(torch.uint8).numpy()
                self._stream.write(data.data)
                self._left -= data.nbytes
        except OSError as error:
            self._error = cannot_write(self._folder, error)

    def finish(self) -> CheckpointError | None:
        """Close the last file and write the index; return the first error, if any."""
        if not self._writes:
            return None
        try:
            self._close()
            # The index is written last: a reader that finds it finds all shards.
            if self._error is None and len(self._headers) > 1:
                (self._folder / INDEX_FILE).write_text(
                    index_text(self._headers), encoding="utf-8"
                )
        except OSError as error:
            self._error = cannot_write(self._folder, error)
        self._done = self._error is None
        return self._error

    def _open_next(self) -> None:
        self._close()
        file, header = next(self._coming)
        self._stream = (self._folder / file).open("wb")
        self._stream.write(framed(header))
        self._left = data_bytes(header)

    def _close(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            with stream:
                # The data must be on the disk before the folder gets its final name.
                stream.flush()
                os.fsync(stream.fileno())


def shard_headers(tensors: Iterable[Tensor], shard_bytes: int) -> dict[str, str]:
    """Return file name -> JSON header of the files that hold the tensors, in order.

    A file has at most `shard_bytes`, or one larger tensor. Wider dtypes come first in a
    file, so that every tensor is aligned to its dtype.
    """
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        nbytes = _nbytes(tensor)
        if shards[-1] and filled + nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += nbytes
    count = len(shards)
    names = [
        f"model-{number:05d}-of-{count:05d}.safetensors"
        for number in range(1, count + 1)
    ]
    names = [SINGLE_FILE] if count == 1 else names
    return {name: _header(shard) for name, shard in zip(names, shards, strict=True)}


def _header(shard: Sequence[Tensor]) -> str:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Wider dtypes first keep every tensor aligned to its item size.
    for name, shape, dtype in sorted(shard, key=lambda tensor: -tensor[2].itemsize):
        start, end = end, end + _nbytes((name, shape, dtype))
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"))
    # Padded with spaces to a multiple of 8, so that the elements begin aligned.
    return text + " " * (-len(text.encode()) % 8)


def framed(header: str) -> bytes:
    """Return the bytes with which a file of this header begins."""
    text = header.encode()
    return len(text).to_bytes(8, "little") + text


def entries_of(header: str) -> dict[str, dict[str, Any]]:
    """Return tensor -> its header entry: `dtype`, `shape` and `data_offsets` (begin,
    end) from the first element of the file.
    """
    return {
        name: entry
        for name, entry in json.loads(header).items()
        if name != "__metadata__"
    }


def data_bytes(header: str) -> int:
    """Return the bytes of all tensors of a file."""
    return max(
        (entry["data_offsets"][1] for entry in entries_of(header).values()), default=0
    )


def index_text(headers: Mapping[str, str]) -> str:
    """Return the text of the index of these files (name -> header)."""
    weight_map = {
        name: file for file, header in headers.items() for name in entries_of(header)
    }
    total = sum(map(data_bytes, headers.values()))
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2) + "\n"


def _nbytes(tensor: Tensor) -> int:
    _, shape, dtype = tensor
    return whole(shape).numel * dtype.itemsize


def replace_folder(finished: Path, folder: Path) -> None:
    """Rename a finished folder to its final name, and remove an older folder of that name afterwards.

    Raises:
        CheckpointError: the renaming failed; the older folder is unchanged.
    """
    old = folder.with_name(folder.name + ".old")
    try:
        # The older folder stays until the new one has its name, so that one of both
        # exists at any moment.
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        finished.rename(folder)
    except OSError as error:
        # The second rename failed: the older folder gets its name back.
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise cannot_write(folder, error) from error
    shutil.rmtree(old, ignore_errors=True)


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a path that cannot be written."""
    return CheckpointError(
        f"{path}: cannot be written ({error}). Free space or choose another folder."
    )
