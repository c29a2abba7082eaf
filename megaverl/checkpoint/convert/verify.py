"""Proof that nothing changed on the way: every weight of source and target, byte by byte."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from megaverl.checkpoint.convert.items import ArrayPart, Item, in_threads, parts_of, share_of, slabs
from megaverl.checkpoint.convert.progress import bar
from megaverl.checkpoint.convert.source import ModelSource
from megaverl.errors import CheckpointError, ModelError
from megaverl.sharding.boxes import whole
from megaverl.sharding.layout import whole_layout
from megaverl.sharding.plan import MAX_NAMED, intersect_layouts
from megaverl.weights.stored import StoredArrayReader


def compare_bytes(
    source: ModelSource, reader: StoredArrayReader, written: ModelSource, again: StoredArrayReader, *, shown: bool
) -> None:
    """Compare this rank's share of the weights, in the dtype that was written, bit by bit.

    Raises:
        CheckpointError: names the weights that differ, and by how many elements.
    """
    shapes = {weight.name: weight.shape for weight in source.weights}
    before, after = (
        parts_of(intersect_layouts(each.layout, whole_layout(shapes.items()))) for each in (source, written)
    )
    dtypes = written.dtypes
    items = [Item(name, "", 0, shape, dtypes[name], before[name]) for name, shape in shapes.items()]
    differing: dict[str, int] = {}
    mine = share_of(items, dist.get_rank(), dist.get_world_size())
    with bar("compared", sum(item.nbytes for item in mine), shown=shown) as count:

        def compare(item: Item) -> None:
            pairs = zip(
                slabs(reader, item.shape, item.dtype, item.parts),
                slabs(again, item.shape, item.dtype, after[item.name]),
                strict=True,
            )
            for one, other in pairs:
                if not torch.equal(_bits(one), _bits(other)):
                    number = int((_bits(one) != _bits(other)).any(dim=-1).sum())
                    differing[item.name] = differing.get(item.name, 0) + number
                count(one.numel() * one.itemsize)

        in_threads(compare, mine, threading.Event())
    if differing:
        named = [
            f"{name}: {number} of {whole(shapes[name]).numel} elements" for name, number in sorted(differing.items())
        ]
        more = f"; and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        raise CheckpointError(
            f"{source.folder}: what was written differs from it: {'; '.join(named[:MAX_NAMED])}{more}. Nothing "
            "is kept; try again, and look at the disk if it happens again."
        )


def compare_twins(source: ModelSource, reader: StoredArrayReader) -> None:
    """A tensor that is stored besides the weight that it is tied to must equal it, or something would be lost.

    Raises:
        ModelError: they differ.
    """
    for name, of in source.twins.items():
        if name not in source.arrays:  # a Megatron checkpoint only remembers that there was one
            continue
        array = source.arrays[name]
        box = whole(array.shape)
        same = array.shape == source.arrays[of].shape and all(
            torch.equal(_bits(one), _bits(other))
            for one, other in zip(
                *(slabs(reader, array.shape, array.dtype, [ArrayPart(each, box, box)]) for each in (name, of)),
                strict=True,
            )
        )
        if not same:
            raise ModelError(
                f"{source.folder}: {name} differs from {of}, but config.json says that they are tied "
                "(tie_word_embeddings). Set that to false, or remove the tensor."
            )


def _bits(slab: torch.Tensor) -> torch.Tensor:
    """[elements, bytes]: so that NaN equals NaN, and 0 differs from -0."""
    return slab.reshape(-1).view(torch.uint8).view(-1, slab.itemsize)
