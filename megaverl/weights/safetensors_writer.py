"""Writing safetensors files as a stream: headers first, then the elements in the order of the weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megaverl.errors import CheckpointError
from megaverl.sharding.boxes import whole
from megaverl.sharding.files import INDEX_FILE, SINGLE_FILE
from megaverl.sharding.weight import Weight

# name, shape, dtype
Tensor = tuple[str, tuple[int, ...], torch.dtype]
DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class FolderWriter:
    """Streams tensors into safetensors files in the order of the weights. A rank that does not write idles.

    A disk that fails must not keep the other ranks waiting: the error is kept until `finish`, and what still
    comes is dropped. The folder is removed when anything went wrong.
    """

    def __init__(
        self, folder: Path, weights: Sequence[Weight], dtype: torch.dtype, shard_bytes: int, *, writes: bool
    ) -> None:
        self._folder = folder
        self._writes = writes
        self._files = shards_of([(weight.name, weight.shape, dtype) for weight in weights], shard_bytes)
        self._file_names = [file_name(number, len(self._files)) for number in range(len(self._files))]
        self._next = 0
        self._left = 0
        self._stream: BinaryIO | None = None
        self._error: CheckpointError | None = None
        self._done = False

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writes and not self._done:
            self._close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, chunks: Iterable[torch.Tensor]) -> None:
        """Append chunks, each contiguous and no longer than what is left of its tensor."""
        if not self._writes or self._error is not None:
            return
        try:
            for chunk in chunks:
                self._append(chunk.cpu())
        except OSError as error:
            self._error = cannot_write(self._folder, error)

    def finish(self) -> CheckpointError | None:
        """Close the last file and write the index. Returns what went wrong on the way, if anything did."""
        if not self._writes:
            return None
        try:
            self._close()
            if self._error is None and len(self._files) > 1:
                self._write_index()
        except OSError as error:
            self._error = cannot_write(self._folder, error)
        self._done = self._error is None
        return self._error

    def _append(self, chunk: torch.Tensor) -> None:
        if self._left == 0:
            self._open_next()
        assert self._stream is not None
        data = chunk.reshape(-1).view(torch.uint8).numpy()
        self._stream.write(data.data)
        self._left -= data.nbytes

    def _open_next(self) -> None:
        self._close()
        shard = self._files[self._next]
        text = header_of(shard).encode()
        self._stream = (self._folder / self._file_names[self._next]).open("wb")
        self._stream.write(len(text).to_bytes(8, "little") + text)
        self._left = sum(_nbytes(tensor) for tensor in shard)
        self._next += 1

    def _close(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            with stream:
                stream.flush()
                os.fsync(stream.fileno())

    def _write_index(self) -> None:
        pairs = [
            (name, file) for file, shard in zip(self._file_names, self._files, strict=True) for name, _, _ in shard
        ]
        total = sum(_nbytes(tensor) for shard in self._files for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(pairs))}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def header_of(shard: Sequence[Tensor]) -> str:
    """The JSON header of a safetensors file that holds these tensors one behind the other, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype in shard:
        start, end = end, end + _nbytes((name, shape, dtype))
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"))
    return text + " " * (-len(text.encode()) % 8)


def shards_of(tensors: Sequence[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    """The tensors in order, cut into files of at most `shard_bytes` (a file may hold one larger tensor).

    In a file the wider dtypes come first, so that every tensor lies where its dtype can be read.
    """
    files: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        nbytes = _nbytes(tensor)
        if files[-1] and filled + nbytes > shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += nbytes
    return [sorted(shard, key=lambda tensor: -tensor[2].itemsize) for shard in files]


def file_name(number: int, count: int) -> str:
    """The name of one of `count` files, counted from zero."""
    return SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _nbytes(tensor: Tensor) -> int:
    _, shape, dtype = tensor
    return whole(shape).numel * dtype.itemsize


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be written ({error}). Free space or choose another folder.")
