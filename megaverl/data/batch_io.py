"""A RolloutBatch as JSON and as a safetensors file, exactly and without pickle."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megaverl.data.batch import RolloutBatch
from megaverl.errors import DataError

_DTYPES = {"int64": torch.int64, "float32": torch.float32, "bool": torch.bool}


def to_json(batch: RolloutBatch) -> str:
    """The batch as one JSON object; tensors as base64 of their little-endian bytes, so bit for bit.

    Raises:
        DataError: a column holds what JSON cannot.
    """
    tensors = {name: _encoded(tensor) for name, tensor in batch.tensors.items()}
    return f'{{"columns": {_columns_json(batch)}, "tensors": {json.dumps(tensors)}}}'


def from_json(text: str) -> RolloutBatch:
    """Undo `to_json`, on the CPU.

    Raises:
        DataError: not such an object, or tensors that do not fit the schema.
    """
    try:
        content = json.loads(text)
        tensors = {name: _decoded(entry) for name, entry in content["tensors"].items()}
        columns = content["columns"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"this is not a batch in JSON: {type(error).__name__}: {error}") from error
    return RolloutBatch(tensors, columns)


def save(batch: RolloutBatch, path: str | Path) -> None:
    """Write the batch as a safetensors file, columns in its metadata; it appears whole or not at all."""
    path = Path(path)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in batch.tensors.items()}
    scratch = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, scratch, metadata={"columns": _columns_json(batch)})
        scratch.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # it is gone when all went well
            scratch.unlink()


def load(path: str | Path) -> RolloutBatch:
    """Read what `save` wrote, onto the CPU.

    Raises:
        DataError: the file is missing, damaged, or not a batch; it is named.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            columns = json.loads((file.metadata() or {})["columns"])
        return RolloutBatch(tensors, columns)
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError, DataError) as error:
        raise DataError(f"{path} is not a batch that can be read: {type(error).__name__}: {error}") from error


def _columns_json(batch: RolloutBatch) -> str:
    for name, column in batch.columns.items():
        try:
            json.dumps(column)
        except (TypeError, ValueError) as error:
            raise DataError(f"column '{name}' cannot be written as JSON: {error}") from error
    return json.dumps(batch.columns)


def _encoded(tensor: Tensor) -> dict[str, Any]:
    array = tensor.detach().cpu().contiguous().numpy()
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = base64.b64encode(little.tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def _decoded(entry: dict[str, Any]) -> Tensor:
    dtype = _DTYPES[entry["dtype"]]
    data = base64.b64decode(entry["data"], validate=True)
    array = numpy.frombuffer(data, numpy.dtype(entry["dtype"]).newbyteorder("<"))
    native = array.astype(entry["dtype"]).reshape(entry["shape"])
    return torch.from_numpy(native).to(dtype)


__all__ = ["from_json", "load", "save", "to_json"]
