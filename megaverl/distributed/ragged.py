"""Serialisation of rows of tensors: a JSON header, bytes in host memory, and bytes that stay on a device.

Column entries that hold tensors, such as images, are shared by rows. They are stored
and sent once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.distributed.collectives import gather_json, gather_rows
from megaverl.distributed.shared_item import SharedItem
from megaverl.errors import DataError
from megaverl.platform import page_locked

MARK = "\0shared"  # key of the JSON object that represents an item


def taken_out(
    columns: Mapping[str, Sequence[Any]],
) -> tuple[dict[str, list[Any]], dict[str, Tensor]]:
    """Replace the items in columns by their keys, and return the tensors of all items, each once.

    The tensors' names are "KEY/NAME".
    """
    tensors: dict[str, Tensor] = {}

    def name_of(entry: Any) -> Any:
        if not isinstance(entry, list) or not any(
            isinstance(item, SharedItem) for item in entry
        ):
            return entry
        for item in entry:
            # Rows with the same image have items with the same key, so the tensors are
            # stored once.
            for name, tensor in item.tensors.items():
                tensors[f"{item.key}/{name}"] = tensor
        return {MARK: [[item.key, item.size] for item in entry]}

    # Columns with entries of other kinds are unchanged.
    named = {name: list(map(name_of, column)) for name, column in columns.items()}
    return named, tensors


def put_back(
    columns: Mapping[str, Sequence[Any]], tensors: Mapping[str, Tensor]
) -> dict[str, list[Any]]:
    """Undo `taken_out`.

    Raises:
        KeyError: an item has no tensors.
    """
    by_key: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        # A key may contain slashes, a tensor's own name does not.
        key, _, tensor_name = name.rpartition("/")
        by_key.setdefault(key, {})[tensor_name] = tensor
    items: dict[str, SharedItem] = {}

    def item_of(key: str, size: int) -> SharedItem:
        if key not in items:
            item_tensors = by_key[key]
            items[key] = SharedItem(key, size, lambda: item_tensors)
        # The tensors are here already, and are shared by all rows with this key.
        return items[key]

    def entry_of(entry: Any) -> Any:
        if not isinstance(entry, dict) or MARK not in entry:
            return entry
        return [item_of(key, size) for key, size in entry[MARK]]

    return {name: list(map(entry_of, column)) for name, column in columns.items()}


def flattened(value: Any, tensors: dict[str, Tensor], known: Mapping[str, type]) -> Any:
    """Return `value` as JSON, and move its tensors into `tensors` under new names.

    Plain values stay as they are. Everything else becomes a pair of its kind and its
    content.

    Args:
        known: name -> dataclass that may be sent.

    Raises:
        DataError: the value contains a type that cannot be sent.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        key = f"tensor {len(tensors)}"
        tensors[key] = value
        return ["tensor", key]
    if isinstance(value, list | tuple):
        # JSON has one kind of sequence, so the header says which one it was.
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [flattened(part, tensors, known) for part in value]]
    kind = type(value).__name__
    # Only listed classes are sent: the receiver constructs nothing that a header alone
    # names.
    if known.get(kind) is type(value):
        entries: Mapping[Any, Any] = vars(value)
    elif isinstance(value, Mapping) and all(
        isinstance(key, str) or type(key) is int for key in value
    ):
        kind, entries = "dict", value
    else:
        raise DataError(
            f"a {kind} cannot go to other ranks: give tensors, batches, plain values, or lists and mappings of them"
        )
    # Pairs, because JSON keys are strings.
    return [
        kind,
        [[key, flattened(part, tensors, known)] for key, part in entries.items()],
    ]


def put_together(
    value: Any, tensors: Mapping[str, Tensor], known: Mapping[str, type]
) -> Any:
    """Undo `flattened`."""
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "tensor":
        return tensors[content]
    if kind in ("list", "tuple"):
        parts = [put_together(part, tensors, known) for part in content]
        return parts if kind == "list" else tuple(parts)
    entries = {key: put_together(part, tensors, known) for key, part in content}
    return entries if kind == "dict" else known[kind](**entries)


DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64",
        "int64",
        "float32",
        "int32",
        "bfloat16",
        "float16",
        "int16",
        "uint8",
        "int8",
        "bool",
    )
}
_SHARED = "shared/"


def pack_tensors(tensors: Mapping[str, Tensor]) -> tuple[list[list[Any]], Tensor]:
    """Concatenate the bytes of tensors of one device, and return `[name, dtype, shape]` of each.

    Wide dtypes come first, so that each tensor is aligned to its element size.

    Raises:
        DataError: a dtype cannot be sent.
    """
    entries = []
    chunks = []
    widest_first = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in widest_first:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise DataError(
                f"'{name}' is of {tensor.dtype}, which does not travel; dtypes that do: {', '.join(DTYPES)}"
            )
        entries.append([name, dtype, list(tensor.shape)])
        chunks.append(tensor.detach().contiguous().flatten().view(torch.uint8))
    # torch.cat refuses an empty list.
    payload = torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.uint8)
    return entries, payload


def num_bytes_on_device(header: bytes) -> int | None:
    """Return the number of bytes that `RaggedBatch.pack` left on a device, or None if it left none."""
    entries = json.loads(header).get("on_device")
    return None if entries is None else num_bytes(entries)


def num_bytes(entries: Sequence[Sequence[Any]]) -> int:
    """Return the number of bytes of the tensors that `pack_tensors` described."""
    return sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in entries)


def unpack_tensors(
    entries: Sequence[Sequence[Any]], payload: Tensor
) -> dict[str, Tensor]:
    """Undo `pack_tensors`: return views of the payload by name.

    Raises:
        ValueError: the entries do not match the number of bytes.
        KeyError, TypeError, RuntimeError: the entries are malformed.
    """
    tensors: dict[str, Tensor] = {}
    start = 0
    for name, dtype_name, shape in entries:
        dtype = DTYPES[dtype_name]
        stop = start + math.prod(shape) * dtype.itemsize
        # Slicing beyond the end would silently give fewer bytes.
        if stop > payload.numel():
            raise ValueError(
                f"the message ends at byte {payload.numel()}, within '{name}'"
            )
        tensors[name] = payload[start:stop].view(dtype).reshape(shape)
        start = stop
    if start != payload.numel():
        raise ValueError(
            f"the message has {payload.numel()} bytes, and its header describes {start}"
        )
    return tensors


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

    def pack(
        self, places: Sequence[int], device: torch.device | None = None
    ) -> tuple[bytes, Tensor, Tensor]:
        """Serialise the rows at `places`: a header, bytes in host memory, and bytes on `device`.

        Tensors on `device` stay there, and the host does not wait for them. None: all
        tensors are in host memory.

        Raises:
            DataError: a dtype or a column cannot be sent.
        """
        index = torch.tensor(places, dtype=torch.int64)
        lengths = {
            axis: values.cpu()[index].to(torch.int64)
            for axis, values in self.lengths.items()
        }
        rows = {
            name: tensor[beside(tensor, index)] for name, tensor in self.tensors.items()
        }
        ragged = {}
        for name, axis in self.axes.items():
            padded = rows[name]
            # The receiver pads again to this shape.
            ragged[name] = [axis, list(padded.shape)]
            used = _tokens(lengths[axis], padded.shape[1])
            rows[name] = padded.flatten(0, 1)[beside(padded, used)]
        columns, shared = taken_out(
            {
                name: [column[place] for place in places]
                for name, column in self.columns.items()
            }
        )
        # Lengths are packed with the host's tensors, because the receiver needs them to
        # unpack.
        host_tensors = {_length_of(axis): values for axis, values in lengths.items()}
        device_tensors = {}
        for name, tensor in rows.items():
            if tensor.device == device:
                device_tensors[name] = tensor
            else:
                host_tensors[name] = tensor
        host_tensors |= {_SHARED + key: tensor for key, tensor in shared.items()}
        parts, payload = pack_tensors(host_tensors)
        on_device_parts, on_device = pack_tensors(device_tensors)
        content = {
            "axes": list(lengths),
            "parts": parts,
            "ragged": ragged,
            "columns": columns,
        }
        # The receiver waits for a second message if this entry is present.
        if on_device_parts:
            content["on_device"] = on_device_parts
        try:
            header = json.dumps(content)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"a column of {', '.join(self.columns)} cannot be sent to another rank, because JSON cannot hold "
                f"it: {error}"
            ) from error
        return header.encode(), payload, on_device

    def on_host(self) -> RaggedBatch:
        """Return the batch with all tensors in host memory, each copied from its device at once."""
        return replace(
            self, tensors={name: tensor.cpu() for name, tensor in self.tensors.items()}
        )

    def gather(self, group: dist.ProcessGroup | None = None) -> RaggedBatch:
        """Return the rows of all ranks of the group in rank order, in host memory. Collective."""
        header, payload, _ = self.on_host().pack(range(self._num_rows))
        headers = gather_json([header.decode(), payload.numel()], group)
        sizes = [size for _, size in headers]
        payloads = gather_rows(payload, group).cpu().split(sizes)
        parts = []
        count = 0
        for (rank_header, _), rank_payload in zip(headers, payloads, strict=True):
            # A copy is aligned for wide elements, unlike a slice of the payload.
            part = RaggedBatch.unpack(
                rank_header.encode(), rank_payload.clone(), self.fills
            )
            num_rows = part._num_rows
            parts.append((range(count, count + num_rows), part, range(num_rows)))
            count += num_rows
        return merge(count, parts)

    @property
    def _num_rows(self) -> int:
        return len(next(iter(self.tensors.values())))

    @classmethod
    def unpack(
        cls,
        header: bytes,
        payload: Tensor,
        fills: Mapping[str, float | bool],
        on_device: Tensor | None = None,
    ) -> RaggedBatch:
        """Undo `pack`. The rows lie where their bytes are.

        Raises:
            DataError: the header does not match the bytes.
        """
        try:
            content = json.loads(header)
            tensors = unpack_tensors(content["parts"], payload)
            if on_device is not None:
                tensors |= unpack_tensors(content.get("on_device", []), on_device)
            lengths = {axis: tensors.pop(_length_of(axis)) for axis in content["axes"]}
            shared = {}
            for name in list(tensors):
                if name.startswith(_SHARED):
                    shared[name.removeprefix(_SHARED)] = tensors.pop(name)
            axes = {}
            for name, (axis, shape) in content["ragged"].items():
                axes[name] = axis
                padded = tensors[name].new_full(shape, fills.get(name, 0))
                used = _tokens(lengths[axis], shape[1])
                padded.flatten(0, 1)[beside(padded, used)] = tensors[name]
                tensors[name] = padded
            columns = put_back(content["columns"], shared)
            return cls(tensors, axes, lengths, fills, columns)
        except (KeyError, ValueError, TypeError, RuntimeError, IndexError) as error:
            raise DataError(f"a message of rows cannot be read: {error}") from error


def beside(like: Tensor, values: Tensor) -> Tensor:
    """Return host `values` on the device of `like`, without a blocking copy."""
    if like.device == values.device:
        return values
    # Only copies from page-locked memory are asynchronous.
    return like.new_empty(values.shape, dtype=values.dtype).copy_(
        page_locked(values), non_blocking=True
    )


def on_one_device(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move all tensors to the device that any of them is on, or keep them if all are in host memory."""
    like = next(
        (tensor for tensor in tensors.values() if tensor.device.type != "cpu"), None
    )
    if like is None:
        return dict(tensors)
    return {name: beside(like, tensor) for name, tensor in tensors.items()}


def _length_of(axis: str) -> str:
    return f"length of {axis}"


def _tokens(lengths: Tensor, width: int) -> Tensor:
    """Return the flat indices of the used entries of [rows, width], [n] int64."""
    is_used = torch.arange(width) < lengths.unsqueeze(1)
    return is_used.flatten().nonzero()[:, 0]


def merge(
    count: int, parts: Sequence[tuple[Sequence[int], RaggedBatch, Sequence[int]]]
) -> RaggedBatch:
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
        different = (first.tensors.keys() ^ part.tensors.keys()) | (
            first.columns.keys() ^ part.columns.keys()
        )
        if different:
            raise DataError(
                f"the ranks' rows differ in what they hold: {', '.join(sorted(different))}"
            )
    # Ranks pad their rows to their own longest one, so the result is as wide as the
    # widest part.
    widths: dict[str, int] = {}
    for _, part, _ in parts:
        for name, axis in part.axes.items():
            widths[axis] = max(int(part.tensors[name].shape[1]), widths.get(axis, 0))
    tensors: dict[str, Tensor] = {}
    for name, example in first.tensors.items():
        if name in first.axes:
            shape = (count, widths[first.axes[name]], *example.shape[2:])
        else:
            shape = (count, *example.shape[1:])
        of_all_parts = (part.tensors[name] for _, part, _ in parts)
        # The result lies on the device if one part does: a copy to it need not block,
        # one from it would.
        like = next(
            (tensor for tensor in of_all_parts if tensor.device.type != "cpu"), example
        )
        tensors[name] = like.new_full(shape, first.fills.get(name, 0))
    lengths = {
        axis: torch.zeros(count, dtype=values.dtype)
        for axis, values in first.lengths.items()
    }
    columns: dict[str, list[Any]] = {name: [None] * count for name in first.columns}
    for dest_rows, part, part_rows in parts:
        if not dest_rows:
            continue
        target_rows = torch.tensor(list(dest_rows))
        source_rows = torch.tensor(list(part_rows))
        for axis, values in part.lengths.items():
            lengths[axis][target_rows] = values[source_rows].cpu()
        for name, tensor in part.tensors.items():
            rows = tensor[beside(tensor, source_rows)]
            whole = tensors[name]
            # A narrower part leaves the padding at the end of its rows.
            columns_kept = (slice(0, rows.shape[1]),) if name in first.axes else ()
            whole[beside(whole, target_rows), *columns_kept] = beside(whole, rows)
        for name, column in part.columns.items():
            for target, origin in zip(dest_rows, part_rows, strict=True):
                columns[name][target] = column[origin]
    return RaggedBatch(tensors, first.axes, lengths, first.fills, columns)
