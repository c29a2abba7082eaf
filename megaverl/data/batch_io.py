"""Lossless storage of a RolloutBatch as a safetensors file, without pickle."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
