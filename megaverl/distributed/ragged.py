"""Rows of tensors as bytes: a JSON header that says what is there, and one run of bytes on the device."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megaverl.errors import DataError

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.int64,
        torch.float32,
        torch.int32,
        torch.bfloat16,
        torch.float16,
        torch.int16,
        torch.uint8,
        torch.int8,
        torch.bool,
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Table:
    """Rows, as they are held by a rank.

    Attributes:
        tensors: by name, rows first.
        axes: the tensors whose dimension 1 is ragged -> the name of its axis.
        lengths: axis -> [rows] int64, how much of dimension 1 counts. What is beyond does not travel.
        fills: ragged tensor -> what stands beyond; 0 where nothing is said.
        columns: one entry a row, anything that JSON can hold.
    """

    tensors: Mapping[str, Tensor]
    axes: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, Tensor] = field(default_factory=dict)
    fills: Mapping[str, float | bool] = field(default_factory=dict)
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def widths(self) -> dict[str, int]:
        """Axis -> size of dimension 1 of the tensors on it."""
        return {axis: int(self.tensors[name].shape[1]) for name, axis in self.axes.items()}


def pack(table: Table, places: Sequence[int]) -> tuple[bytes, Tensor]:
    """The rows at these places, as a header and bytes on the tensors' device."""
    device = next((tensor.device for tensor in table.tensors.values()), torch.device("cpu"))
    index = torch.tensor(places, dtype=torch.int64, device=device)
    lengths = {axis: values.to(device)[index] for axis, values in table.lengths.items()}
    chunks: list[tuple[str, Tensor]] = []
    entries: list[dict[str, Any]] = []
    # the widest elements first, so that every run begins at a multiple of its element
    order = sorted(table.tensors, key=lambda name: (-table.tensors[name].element_size(), name))
    for name in order:
        tensor = table.tensors[name]
        if tensor.dtype not in _NAMES:
            raise DataError(
                f"'{name}' is of {tensor.dtype}, which does not travel; dtypes that do: {', '.join(DTYPES)}"
            )
        rows = tensor[index]
        axis = table.axes.get(name, "")
        entries.append({"name": name, "dtype": _NAMES[tensor.dtype], "axis": axis, "shape": list(rows.shape)})
        if axis:
            rows = rows[_mask(lengths[axis], rows.shape[1])]
        chunks.append((name, rows.contiguous().flatten().view(torch.uint8)))
    # the lengths are 64 bits wide as well, so before all else
    heads = [values.to(torch.int64).contiguous().view(torch.uint8) for _, values in sorted(lengths.items())]
    header = {
        "rows": len(places),
        "axes": sorted(lengths),
        "tensors": entries,
        "columns": {name: [column[place] for place in places] for name, column in table.columns.items()},
    }
    try:
        text = json.dumps(header, allow_nan=True)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"a column of {', '.join(table.columns)} holds what JSON cannot, and cannot go to another rank: {error}"
        ) from error
    parts = [*heads, *(chunk for _, chunk in chunks)]
    payload = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
    return text.encode(), payload


def unpack(header: bytes, payload: Tensor, fills: Mapping[str, float | bool]) -> Table:
    """Undo `pack`; the rows are on the host, wherever their bytes have arrived.

    Raises:
        DataError: the header does not go with the bytes.
    """
    payload = payload.cpu()  # in one copy, instead of one for each field
    try:
        said = json.loads(header)
        count, places = int(said["rows"]), 0
        lengths: dict[str, Tensor] = {}
        for axis in said["axes"]:
            lengths[axis] = _take(payload, places, count, torch.int64)
            places += count * 8
        tensors: dict[str, Tensor] = {}
        axes: dict[str, str] = {}
        for entry in said["tensors"]:
            name, dtype, axis, shape = entry["name"], DTYPES[entry["dtype"]], entry["axis"], tuple(entry["shape"])
            mask = _mask(lengths[axis], shape[1]) if axis else None
            num = math.prod(shape) if mask is None else int(mask.sum()) * math.prod(shape[2:])
            flat = _take(payload, places, num, dtype)
            places += num * dtype.itemsize
            if mask is None:
                tensors[name] = flat.reshape(shape)
            else:
                axes[name] = axis
                tensors[name] = payload.new_full(shape, fills.get(name, 0), dtype=dtype)
                tensors[name][mask] = flat.reshape(-1, *shape[2:])
        if places != payload.numel():
            raise ValueError(f"{payload.numel()} bytes came, and the header speaks of {places}")
    except (KeyError, ValueError, TypeError, RuntimeError, IndexError) as error:
        raise DataError(f"a message of rows cannot be read: {error}") from error
    return Table(tensors, axes, lengths, fills, said["columns"])


def _take(payload: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    part = payload[start : start + count * dtype.itemsize]
    if part.numel() != count * dtype.itemsize:
        raise ValueError(f"the message ends at byte {payload.numel()}, within a tensor")
    # a view where the start allows, which it always does for what `pack` made
    return (part if start % dtype.itemsize == 0 else part.clone()).view(dtype)


def _mask(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)


def merge(count: int, parts: Sequence[tuple[Sequence[int], Table, Sequence[int]]]) -> Table:
    """One table of `count` rows from parts of others, on the host, wherever those are.

    Args:
        parts: (places here, table, places in it). Together they fill every row once; an empty one gives its names.

    Raises:
        DataError: tables that do not hold the same names.
    """
    first = parts[0][1]
    for _, table, _ in parts:
        for mine, other in ((first.tensors, table.tensors), (first.columns, table.columns)):
            if different := mine.keys() ^ other.keys():
                raise DataError(f"the ranks' rows differ in what they hold: {', '.join(sorted(different))}")
    widths: dict[str, int] = {}
    for _, table, _ in parts:
        for axis, width in table.widths().items():
            widths[axis] = max(width, widths.get(axis, 0))
    tensors: dict[str, Tensor] = {}
    for name, like in first.tensors.items():
        axis = first.axes.get(name, "")
        shape = (count, widths[axis], *like.shape[2:]) if axis else (count, *like.shape[1:])
        tensors[name] = torch.full(shape, first.fills.get(name, 0), dtype=like.dtype)
    lengths = {axis: torch.zeros(count, dtype=values.dtype) for axis, values in first.lengths.items()}
    columns: dict[str, list[Any]] = {name: [None] * count for name in first.columns}
    for here, table, there in parts:
        if not here:
            continue
        to, index = torch.tensor(list(here)), torch.tensor(list(there))
        for axis, values in table.lengths.items():
            lengths[axis][to] = values[index].cpu()
        for name, tensor in table.tensors.items():
            rows = tensor[index].cpu()
            if first.axes.get(name):
                tensors[name][to, : rows.shape[1]] = rows
            else:
                tensors[name][to] = rows
        for name, column in table.columns.items():
            for target, origin in zip(here, there, strict=True):
                columns[name][target] = column[origin]
    return Table(tensors, first.axes, lengths, first.fills, columns)
