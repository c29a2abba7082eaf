"""Target in a compressed-tensors format: a Hugging Face folder whose linear layers have 4 or 8 bits.

The matrices are those that an engine with the same `rollout.vllm.quantization`
quantises, by the same arithmetic (`weights/low_precision.py`). Everything else is
written as it is. vLLM and transformers load such a folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from megaverl.checkpoint.convert import (
    ArrayPart,
    FileBytes,
    FileItem,
    Item,
    Parts,
    bytes_of,
    parts_of,
    slabs,
)
from megaverl.checkpoint.convert.source import ModelSource
from megaverl.checkpoint.convert.target import ModelTarget
from megaverl.errors import ConfigError
from megaverl.sharding.boxes import Box, whole
from megaverl.sharding.layout import whole_layout
from megaverl.sharding.quantization import (
    GROUP_FORMATS,
    straddled_groups,
    why_no_groups,
)
from megaverl.sharding.vllm import quantised_tensors
from megaverl.weights.low_precision import packed_tensors, quantise_groups
from megaverl.weights.safetensors_writer import (
    data_bytes,
    entries_of,
    framed,
    index_text,
    shard_headers,
)
from megaverl.weights.stored import INDEX_FILE, StoredArrayReader
from megaverl.weights.transports.quantised import packed_matrix

# Elements of a matrix that a thread quantises at a time.
ROWS_NUMEL = 1 << 20
# Rows of a slab are a multiple of this: an element of `weight_zero_point` has eight.
ROW_STEP = 8
# Tensors that describe a whole matrix, and not its rows.
OF_MATRIX = ("weight_shape", "weight_global_scale")


class StoredMatrix(NamedTuple):
    """A matrix of the source: its shape [rows, columns], and the parts that fill it."""

    shape: tuple[int, ...]
    parts: Sequence[ArrayPart]


@dataclass(frozen=True)
class PackedItem:
    """A matrix that is written as the tensors of `packed_tensors`.

    Attributes:
        name: name of the weight, for messages.
        matrix: the weight.
        dtype: dtype of the weight, and of int4 scales.
        method: name in `GROUP_FORMATS`.
        places: tensor without the layer's name, such as `weight_scale` -> (file, offset of its first element).
        nbytes: bytes of all tensors.
        sharing: matrices that vLLM fuses with this one, and this one. They have one global scale (nvfp4).
    """

    name: str
    matrix: StoredMatrix
    dtype: torch.dtype
    method: str
    places: Mapping[str, tuple[str, int]]
    nbytes: int
    sharing: Sequence[StoredMatrix] = field(repr=False)

    @property
    def file(self) -> str:
        """File of the first tensor."""
        return min(self.places.values())[0]

    @property
    def offset(self) -> int:
        """Offset of the first tensor in its file."""
        return min(self.places.values())[1]

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that its tensors are in."""
        return tuple(sorted({file for file, _ in self.places.values()}))

    def pieces(self, reader: StoredArrayReader) -> Iterator[FileBytes]:
        """Yield the bytes of all tensors, some rows at a time."""
        largest = self._largest(reader)
        for top, rows in _rows(self.matrix, self.dtype, reader):
            tensors = packed_matrix(rows, self.method, self.dtype, largest)
            for name, tensor in tensors.items():
                if name in OF_MATRIX and top > 0:
                    continue
                if name == "weight_shape":
                    tensor = torch.tensor(self.matrix.shape)
                lines = top // ROW_STEP if name == "weight_zero_point" else top
                file, offset = self.places[name]
                start = offset + lines * tensor[0].numel() * tensor.itemsize
                yield FileBytes(file, start, bytes_of(tensor.contiguous()))

    def _largest(self, reader: StoredArrayReader) -> torch.Tensor | None:
        """Return max|x| of all matrices with the same global scale, or None if the format has none."""
        if GROUP_FORMATS[self.method].kind != "nvfp4":
            return None
        largest = torch.zeros(())
        for matrix in self.sharing:
            for slab in slabs(reader, matrix.shape, self.dtype, matrix.parts):
                largest = torch.maximum(largest, slab.abs().max().float())
        return largest


def _rows(
    matrix: StoredMatrix, dtype: torch.dtype, reader: StoredArrayReader
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, rows [r, columns]) of a matrix."""
    rows, columns = matrix.shape
    step = max(ROW_STEP, ROWS_NUMEL // columns // ROW_STEP * ROW_STEP)
    filling = Parts(matrix.parts)
    for top in range(0, rows, step):
        box = Box((top, 0), (min(top + step, rows), columns))
        slab = torch.empty(box.shape, dtype=dtype)
        for part in filling.within(box):
            reader.read(part.source, part.source_box, slab[part.box.slices])
        yield top, slab


def packed_target(
    source: ModelSource,
    dtype: torch.dtype | None,
    shard_bytes: int,
    method: str,
) -> ModelTarget:
    """Plan a folder of safetensors files in a compressed-tensors format.

    Args:
        dtype: dtype of all weights before they are quantised. None: each as it is stored.
        shard_bytes: size of the largest file.
        method: name in `GROUP_FORMATS`.

    Raises:
        ConfigError: the format has no place for the model's layers.
        ReshardError: the source lacks a weight, or a part of one.
    """
    check_format(source, method)
    stored = source.dtypes
    weights = source.weights
    dtypes = {weight.name: dtype or stored[weight.name] for weight in weights}
    shapes = {weight.name: weight.shape for weight in weights}
    parts = parts_of(source.layout, whole_layout(shapes.items()))
    quantised = quantised_tensors(weights)
    # vLLM's parameter -> the matrices that it consists of.
    fused: dict[str, list[StoredMatrix]] = {}
    for weight in weights:
        if weight.vllm in quantised:
            matrix = StoredMatrix(weight.shape, parts[weight.name])
            fused.setdefault(weight.vllm, []).append(matrix)

    tensors: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    packed: dict[str, dict[str, torch.Tensor]] = {}
    for weight in weights:
        name = weight.name
        if weight.vllm not in quantised:
            tensors.append((name, weight.shape, dtypes[name]))
            continue
        packed[name] = _empty_tensors(weight.shape, method, dtypes[name])
        for suffix, tensor in packed[name].items():
            layer = name.removesuffix("weight")
            tensors.append((layer + suffix, tuple(tensor.shape), tensor.dtype))

    headers = shard_headers(tensors, shard_bytes)
    places: dict[str, tuple[str, int]] = {}
    files, heads = {}, []
    for file, header in headers.items():
        head = framed(header)
        heads.append((file, 0, head))
        files[file] = len(head) + data_bytes(header)
        for name, entry in entries_of(header).items():
            places[name] = (file, len(head) + entry["data_offsets"][0])

    items: list[FileItem] = []
    for weight in weights:
        name, shape = weight.name, weight.shape
        if name not in packed:
            item = Item(name, *places[name], shape, dtypes[name], parts[name])
            items.append(item)
            continue
        assert weight.vllm is not None
        layer = name.removesuffix("weight")
        items.append(
            PackedItem(
                name,
                StoredMatrix(shape, parts[name]),
                dtypes[name],
                method,
                {suffix: places[layer + suffix] for suffix in packed[name]},
                sum(tensor.nbytes for tensor in packed[name].values()),
                fused[weight.vllm],
            )
        )

    def write(folder: Path) -> None:
        if len(headers) > 1:
            (folder / INDEX_FILE).write_text(index_text(headers), encoding="utf-8")

    return ModelTarget(files, items, heads, write)


def check_format(source: ModelSource, method: str) -> None:
    """Raise a ConfigError if a format cannot hold the linear layers of a model."""
    if reason := why_no_groups(source.spec):
        raise ConfigError(
            f"--quantization {method}: {source.folder} cannot be written in it: {reason}."
        )
    group = GROUP_FORMATS[method].group
    if straddled := straddled_groups(source.spec, 1, group):
        raise ConfigError(
            f"--quantization {method}: {', '.join(straddled)} of {source.folder} are not whole groups of {group}. "
            "Choose a format with smaller groups."
        )


def _empty_tensors(
    shape: tuple[int, ...], method: str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the tensors of a quantised matrix, without elements."""
    form = GROUP_FORMATS[method]
    matrix = torch.empty(whole(shape).shape, dtype=dtype, device="meta")
    quantised = quantise_groups(matrix, form, scale_dtype=dtype)
    return packed_tensors(quantised, form, dtype)
