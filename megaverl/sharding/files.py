"""A folder of safetensors files as a layout: every tensor whole, its place read from the files' headers.

Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes (safetensors' README).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from megaverl.errors import ModelError
from megaverl.sharding.layout import Layout, whole_layout

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
AGAIN = "Copy or download the file again from its source."


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape, its dtype in safetensors' words (`F32`, `BF16`, ...), its first byte."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0


def read_folder(folder: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of a Hugging Face folder by name, from the headers alone.

    Raises:
        ModelError: no weights, a shard that the index names but is not there or lacks a tensor, a truncated
            or damaged file.
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
    """The layout of a folder: every tensor whole under its own name."""
    return whole_layout((name, tensor.shape) for name, tensor in stored.items())


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, by name.

    Raises:
        ModelError: the file is truncated or not safetensors.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{file}: truncated or not a safetensors file ({size} bytes). {AGAIN}")
        text = stream.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(file, tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()
        }
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{file}: its safetensors header is damaged ({error}). {AGAIN}") from error
    if size != end:
        raise ModelError(
            f"{file}: {'truncated' if size < end else 'damaged'}: {size} bytes found, {end} expected by its "
            f"header. {AGAIN}"
        )
    return tensors


def read_weight_map(index: Path) -> dict[str, str]:
    """tensor -> file, of a `model.safetensors.index.json`; ModelError if it is none."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a safetensors index ({error!r}). {AGAIN}") from error
