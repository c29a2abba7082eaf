"""Lossless storage of a RolloutBatch as JSON or as a safetensors file, without pickle."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_bytes
from safetensors.torch import save_file
from torch import Tensor

from megaverl.data.batch import RolloutBatch
from megaverl.distributed.ragged import put_back, taken_out
from megaverl.errors import DataError
from megaverl.outside import read_json

# Prefix of tensors that rows of a column share, such as images.
_SHARED = "shared/"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int64, torch.float32, torch.int16, torch.uint8, torch.bool)
}


def to_json(batch: RolloutBatch) -> str:
    """Return the batch as one JSON object. Tensors are base64 of their little-endian bytes, so they stay bitwise equal.

    Raises:
        DataError: a column holds a value that JSON cannot.
    """
    columns, shared = taken_out(batch.columns)
    tensors = {
        name: _encoded(tensor)
        for name, tensor in {**batch.tensors, **_named(shared)}.items()
    }
    return f'{{"columns": {_columns_json(columns)}, "tensors": {json.dumps(tensors)}}}'


def from_json(text: str) -> RolloutBatch:
    """Return the batch that `to_json` converted, on the CPU.

    Raises:
        DataError: the text is not such an object, or its tensors do not match the schema.
    """
    try:
        content = read_json(text, not_finite=True, keeps_texts=True)
        tensors = {name: _decoded(entry) for name, entry in content["tensors"].items()}
        return _batch(tensors, content["columns"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"this is not a batch in JSON: {type(error).__name__}: {error}"
        ) from error


def save(batch: RolloutBatch, path: str | Path) -> None:
    """Write the batch as a safetensors file, atomically, with its columns in the metadata."""
    path = Path(path)
    tensors, metadata = _stored(batch)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, scratch, metadata)
        scratch.replace(path)
    finally:
        # After a successful write the scratch file has been renamed.
        with contextlib.suppress(FileNotFoundError):
            scratch.unlink()


def to_bytes(batch: RolloutBatch) -> bytes:
    """Return the contents of the file that `save` writes."""
    return save_bytes(*_stored(batch))


def _stored(batch: RolloutBatch) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a batch on the host, and its columns as metadata."""
    columns, shared = taken_out(batch.columns)
    stored = {**batch.tensors, **_named(shared)}
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in stored.items()
    }
    return tensors, {"columns": _columns_json(columns)}


def load(path: str | Path) -> RolloutBatch:
    """Read a batch that `save` wrote, onto the CPU.

    Raises:
        DataError: the file is missing, damaged, or not a batch. Names the file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            columns = read_json(
                (file.metadata() or {})["columns"], not_finite=True, keeps_texts=True
            )
        return _batch(tensors, columns)
    except (
        SafetensorError,
        OSError,
        ValueError,
        KeyError,
        AttributeError,
        DataError,
    ) as error:
        raise DataError(
            f"{path} is not a batch that can be read: {type(error).__name__}: {error}"
        ) from error


def _named(shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return shared tensors under their names in a file."""
    return {_SHARED + name: tensor for name, tensor in shared.items()}


def _batch(
    tensors: Mapping[str, Tensor], columns: Mapping[str, list[Any]]
) -> RolloutBatch:
    """Return a batch from the tensors and columns of a file."""
    shared = {
        name.removeprefix(_SHARED): tensor
        for name, tensor in tensors.items()
        if name.startswith(_SHARED)
    }
    per_sample = {
        name: tensor for name, tensor in tensors.items() if not name.startswith(_SHARED)
    }
    return RolloutBatch(per_sample, put_back(columns, shared))


def _columns_json(columns: Mapping[str, list[Any]]) -> str:
    """Return columns as JSON.

    Raises:
        DataError: names a column that JSON cannot hold.
    """
    for name, column in columns.items():
        try:
            json.dumps(column)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"column '{name}' cannot be written as JSON: {error}"
            ) from error
    return json.dumps(columns)


def _encoded(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor as a JSON value."""
    array = tensor.detach().cpu().contiguous().numpy()
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = base64.b64encode(little.tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def _decoded(entry: dict[str, Any]) -> Tensor:
    """Return the tensor of a JSON value."""
    dtype = _DTYPES[entry["dtype"]]
    data = base64.b64decode(entry["data"], validate=True)
    array = numpy.frombuffer(data, numpy.dtype(entry["dtype"]).newbyteorder("<"))
    native = array.astype(entry["dtype"]).reshape(entry["shape"])
    return torch.from_numpy(native).to(dtype)


__all__ = ["from_json", "load", "save", "to_json"]
