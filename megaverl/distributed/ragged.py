"""Serialisation of rows of tensors: a JSON header, bytes in host memory, and bytes that stay on a device.

Column entries that hold tensors, such as images, are shared by rows. They are stored and sent once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.distributed.collectives import gather_json, gather_rows
from megaverl.distributed.shared_item import SharedItem
from megaverl.errors import DataError
from megaverl.platform import page_locked

MARK = "\0shared"  # key of the JSON object that represents an item


def taken_out(columns: Mapping[str, Sequence[Any]]) -> tuple[dict[str, list[Any]], dict[str, Tensor]]:
    """Replace the items in columns by their keys, and return the tensors of all items, each once.

    The tensors' names are "KEY/NAME".
    """
    tensors: dict[str, Tensor] = {}

    def name_of(entry: Any) -> Any:
        if not isinstance(entry, list) or not any(isinstance(item, SharedItem) for item in entry):
            return entry
        tensors.update({f"{item.key}/{name}": tensor for item in entry for name, tensor in item.tensors.items()})
        return {MARK: [[item.key, item.size] for item in entry]}

    return {name: [name_of(entry) for entry in column] for name, column in columns.items()}, tensors


def put_back(columns: Mapping[str, Sequence[Any]], tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Undo `taken_out`.

    Raises:
        KeyError: an item has no tensors.
    """
    by_key: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        key, _, own = name.rpartition("/")
        by_key.setdefault(key, {})[own] = tensor
    made: dict[str, SharedItem] = {}

    def item(key: str, size: int) -> SharedItem:
        if key not in made:
            held = by_key[key]
            made[key] = SharedItem(key, size, lambda: held)
        return made[key]

    def entry_of(entry: Any) -> Any:
        return [item(*each) for each in entry[MARK]] if isinstance(entry, dict) and MARK in entry else entry

    return {name: [entry_of(entry) for entry in column] for name, column in columns.items()}


def flattened(value: Any, tensors: dict[str, Tensor], known: Mapping[str, type]) -> Any:
    """Return `value` as JSON, and move its tensors into `tensors` under new names.

    Args:
        known: name -> dataclass that may be sent.

    Raises:
        DataError: the value contains a type that cannot be sent.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[key := f"tensor {len(tensors)}"] = value
        return {"tensor": key}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [flattened(each, tensors, known) for each in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: flattened(each, tensors, known) for key, each in value.items()}}
    if isinstance(value, Mapping) and all(type(key) is int for key in value):
        # JSON keys are strings, so integer keys become pairs.
        return {"by number": [[key, flattened(each, tensors, known)] for key, each in value.items()]}
    name = type(value).__name__
    if known.get(name) is type(value) and is_dataclass(value):
        given = {each.name: getattr(value, each.name) for each in fields(value)}
        return {"of": name, "dict": {key: flattened(each, tensors, known) for key, each in given.items()}}
    raise DataError(
        f"a {name} cannot go to other ranks: give tensors, batches, plain values, or lists and mappings of them"
    )


def put_together(value: Any, tensors: Mapping[str, Tensor], known: Mapping[str, type]) -> Any:
    """Undo `flattened`."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "list" in value or "tuple" in value:
        parts = [put_together(each, tensors, known) for each in value["list" if "list" in value else "tuple"]]
        return parts if "list" in value else tuple(parts)
    if "by number" in value:
        return {key: put_together(each, tensors, known) for key, each in value["by number"]}
    found = {key: put_together(each, tensors, known) for key, each in value["dict"].items()}
    return known[value["of"]](**found) if "of" in value else found


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
_SHARED = "shared/"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pack_tensors(tensors: Mapping[str, Tensor]) -> tuple[list[list[Any]], Tensor]:
    """Concatenate the bytes of tensors of one device, and return `[name, dtype, shape]` of each.

    Wide dtypes come first, so that each tensor is aligned to its element size.

    Raises:
        DataError: a dtype cannot be sent.
    """
    entries, chunks = [], []
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if tensor.dtype not in _NAMES:
            raise DataError(
                f"'{name}' is of {tensor.dtype}, which does not travel; dtypes that do: {', '.join(DTYPES)}"
            )
        entries.append([name, _NAMES[tensor.dtype], list(tensor.shape)])
        chunks.append(tensor.detach().contiguous().flatten().view(torch.uint8))
    return entries, torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.uint8)


def num_bytes_on_device(header: bytes) -> int | None:
    """Return the number of bytes that `RaggedBatch.pack` left on a device, or None if it left none."""
    entries = json.loads(header).get("on_device")
    return None if entries is None else num_bytes(entries)


def num_bytes(entries: Sequence[Sequence[Any]]) -> int:
    """Return the number of bytes of the tensors that `pack_tensors` described."""
    return sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in entries)


def unpack_tensors(entries: Sequence[Sequence[Any]], payload: Tensor) -> dict[str, Tensor]:
    """Undo `pack_tensors`: return views of the payload by name.

    Raises:
        ValueError: the entries do not match the number of bytes.
        KeyError, TypeError, RuntimeError: the entries are malformed.
    """
    found: dict[str, Tensor] = {}
    start = 0
    for name, dtype, shape in entries:
        stop = start + math.prod(shape) * DTYPES[dtype].itemsize
        if stop > payload.numel():
            raise ValueError(f"the message ends at byte {payload.numel()}, within '{name}'")
        found[name] = payload[start:stop].view(DTYPES[dtype]).reshape(shape)
        start = stop
    if start != payload.numel():
        raise ValueError(f"{payload.numel()} bytes came, and the header speaks of {start}")
    return found


@dataclass(frozen=True)
class RaggedBatch:
    """Rows of tensors with ragged dimensions, as a rank holds them.

    Attributes:
        tensors: by name, with rows as dimension 0.
        axes: name of a tensor with a ragged dimension 1 -> name of that axis.
        lengths: axis -> [rows] int64, used length of dimension 1. The remainder is not sent.
        fills: ragged tensor -> padding value; 0 by default.
        columns: one entry per row: JSON values, or lists of `SharedItem`.

    Example:
        header, payload, on_device = batch.pack([0, 2])
        rows = RaggedBatch.unpack(header, payload, batch.fills)  # rows 0 and 2
    """

    tensors: Mapping[str, Tensor]
    axes: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, Tensor] = field(default_factory=dict)
    fills: Mapping[str, float | bool] = field(default_factory=dict)
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def pack(self, places: Sequence[int], device: torch.device | None = None) -> tuple[bytes, Tensor, Tensor]:
        """Serialise the rows at `places`: a header, bytes in host memory, and bytes on `device`.

        Tensors on `device` stay there, and the host does not wait for them. None: all tensors are in host memory.

        Raises:
            DataError: a dtype or a column cannot be sent.
        """
        index = torch.tensor(places, dtype=torch.int64)
        lengths = {axis: values.cpu()[index].to(torch.int64) for axis, values in self.lengths.items()}
        rows = {name: tensor[beside(tensor, index)] for name, tensor in self.tensors.items()}
        ragged = {name: [axis, list(rows[name].shape)] for name, axis in self.axes.items()}
        for name, axis in self.axes.items():
            inside = _tokens(lengths[axis], rows[name].shape[1])
            rows[name] = rows[name].flatten(0, 1)[beside(rows[name], inside)]
        columns, shared = taken_out({n: [column[place] for place in places] for n, column in self.columns.items()})
        own = {_length_of(axis): values for axis, values in lengths.items()}
        own |= {name: tensor for name, tensor in rows.items() if tensor.device != device}
        parts, payload = pack_tensors(own | {_SHARED + key: tensor for key, tensor in shared.items()})
        # Lengths are packed with the host's tensors, because the receiver needs them to unpack.
        stays, on_device = pack_tensors({name: tensor for name, tensor in rows.items() if name not in own})
        found = {"axes": list(lengths), "parts": parts, "ragged": ragged, "columns": columns}
        try:
            header = json.dumps(found | ({"on_device": stays} if stays else {}))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"a column of {', '.join(self.columns)} holds what JSON cannot, and cannot go to another rank: {error}"
            ) from error
        return header.encode(), payload, on_device

    def on_host(self) -> RaggedBatch:
        """Return the batch with all tensors in host memory, each copied from its device at once."""
        return replace(self, tensors={name: tensor.cpu() for name, tensor in self.tensors.items()})

    def gather(self, group: dist.ProcessGroup | None = None) -> RaggedBatch:
        """Return the rows of all ranks of the group in rank order, in host memory. Collective."""
        header, payload, _ = self.on_host().pack(range(len(next(iter(self.tensors.values())))))
        headers = gather_json([header.decode(), payload.numel()], group)
        payloads = gather_rows(payload, group).cpu().split([size for _, size in headers])
        parts, count = [], 0
        for (text, _), data in zip(headers, payloads, strict=True):
            # A copy is aligned for wide elements, unlike a slice of the payload.
            one = RaggedBatch.unpack(text.encode(), data.clone(), self.fills)
            num_rows = len(next(iter(one.tensors.values())))
            parts.append((range(count, count + num_rows), one, range(num_rows)))
            count += num_rows
        return merge(count, parts)

    @classmethod
    def unpack(
        cls, header: bytes, payload: Tensor, fills: Mapping[str, float | bool], on_device: Tensor | None = None
    ) -> RaggedBatch:
        """Undo `pack`. The rows lie where their bytes are.

        Raises:
            DataError: the header does not match the bytes.
        """
        try:
            found = json.loads(header)
            tensors = unpack_tensors(found["parts"], payload)
            if on_device is not None:
                tensors |= unpack_tensors(found.get("on_device", []), on_device)
            lengths = {axis: tensors.pop(_length_of(axis)) for axis in found["axes"]}
            shared = {key.removeprefix(_SHARED): tensors.pop(key) for key in [*tensors] if key.startswith(_SHARED)}
            axes = {name: axis for name, (axis, _) in found["ragged"].items()}
            for name, (axis, shape) in found["ragged"].items():
                rows = tensors[name].new_full(shape, fills.get(name, 0))
                rows.flatten(0, 1)[beside(rows, _tokens(lengths[axis], shape[1]))] = tensors[name]
                tensors[name] = rows
            return cls(tensors, axes, lengths, fills, put_back(found["columns"], shared))
        except (KeyError, ValueError, TypeError, RuntimeError, IndexError) as error:
            raise DataError(f"a message of rows cannot be read: {error}") from error


def beside(like: Tensor, values: Tensor) -> Tensor:
    """Return host `values` on the device of `like`, without a blocking copy."""
    if like.device == values.device:
        return values
    # Only copies from page-locked memory are asynchronous.
    return like.new_empty(values.shape, dtype=values.dtype).copy_(page_locked(values), non_blocking=True)


def on_one_device(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move all tensors to the device that any of them is on, or keep them if all are in host memory."""
    like = next((tensor for tensor in tensors.values() if tensor.device.type != "cpu"), None)
    return {name: tensor if like is None else beside(like, tensor) for name, tensor in tensors.items()}


def _length_of(axis: str) -> str:
    return f"length of {axis}"


def _tokens(lengths: Tensor, width: int) -> Tensor:
    """Return the flat indices of the used entries of [rows, width], [n] int64."""
    return (torch.arange(width) < lengths.unsqueeze(1)).flatten().nonzero()[:, 0]


def merge(count: int, parts: Sequence[tuple[Sequence[int], RaggedBatch, Sequence[int]]]) -> RaggedBatch:
    """Merge parts of several batches into one batch of `count` rows.

    A tensor lies on the device if any part has it there, else in host memory.

    Args:
        parts: (rows here, batch, rows of that batch). Together they fill every row once. An empty part only has to have
            the same names.

    Raises:
        DataError: the batches have different tensors or columns.
    """
    first = parts[0][1]
    for _, part, _ in parts:
        for mine, other in ((first.tensors, part.tensors), (first.columns, part.columns)):
            if different := mine.keys() ^ other.keys():
                raise DataError(f"the ranks' rows differ in what they hold: {', '.join(sorted(different))}")
    widths: dict[str, int] = {}
    for _, part, _ in parts:
        for name, axis in part.axes.items():
            widths[axis] = max(int(part.tensors[name].shape[1]), widths.get(axis, 0))
    tensors: dict[str, Tensor] = {}
    for name, like in first.tensors.items():
        axis = first.axes.get(name, "")
        shape = (count, widths[axis], *like.shape[2:]) if axis else (count, *like.shape[1:])
        held = (part.tensors[name] for _, part, _ in parts)
        on_device = next((tensor for tensor in held if tensor.device.type != "cpu"), like)
        tensors[name] = on_device.new_full(shape, first.fills.get(name, 0))
    lengths = {axis: torch.zeros(count, dtype=values.dtype) for axis, values in first.lengths.items()}
    columns: dict[str, list[Any]] = {name: [None] * count for name in first.columns}
    for here, part, there in parts:
        if not here:
            continue
        to, index = torch.tensor(list(here)), torch.tensor(list(there))
        for axis, values in part.lengths.items():
            lengths[axis][to] = values[index].cpu()
        for name, tensor in part.tensors.items():
            rows, whole = tensor[beside(tensor, index)], tensors[name]
            kept = (slice(0, rows.shape[1]),) if first.axes.get(name) else ()
            whole[beside(whole, to), *kept] = beside(whole, rows)
        for name, column in part.columns.items():
            for target, origin in zip(here, there, strict=True):
                columns[name][target] = column[origin]
    return RaggedBatch(tensors, first.axes, lengths, first.fills, columns)
