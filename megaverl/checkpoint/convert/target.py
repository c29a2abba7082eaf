"""Target of a conversion: every file with its size, and every array in it with its place and its parts."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megaverl.checkpoint.convert import (
    ArrayPart,
    FileItem,
    Item,
    Parts,
    parts_of,
    stored_box,
)
from megaverl.checkpoint.convert.source import ModelSource
from megaverl.distributed.grid import GridShape
from megaverl.errors import ModelError, ReshardError
from megaverl.sharding.boxes import Box, cut, first_overlap, split, whole
from megaverl.sharding.layout import Layout, whole_layout
from megaverl.sharding.megatron import LAYER, checkpoint_layout, megatron_layouts
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.plan import intersect_layouts
from megaverl.sharding.weight import Split
from megaverl.weights.expert_arrays import expert_arrays
from megaverl.weights.safetensors_writer import (
    data_bytes,
    entries_of,
    framed,
    index_text,
    shard_headers,
)
from megaverl.weights.stored import DTYPES, INDEX_FILE
from megaverl.weights.torch_dist import (
    CHUNK_BYTES,
    NO_EXTRA_STATE,
    STORAGES,
    Frame,
    write_index,
)
from megaverl.weights.torch_dist_index import Chunk, IndexedArray


@dataclass(frozen=True)
class ModelTarget:
    """A model as files.

    Attributes:
        files: name -> bytes of the files that items and heads fill.
        items: the arrays.
        heads: (file, offset, bytes) of everything that is neither array nor frame.
        write_index: writes the index of the files into the folder.
    """

    files: Mapping[str, int]
    items: Sequence[FileItem]
    heads: Sequence[tuple[str, int, bytes]]
    write_index: Callable[[Path], None] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(item.nbytes for item in self.items)


def hugging_face_target(
    source: ModelSource,
    dtype: torch.dtype | None,
    shard_bytes: int | None,
    default: int,
) -> ModelTarget:
    """Plan a folder of safetensors files, split like the model's own files if they are known and `shard_bytes` is None.

    Args:
        dtype: dtype of all weights; None: each as it is stored.
        shard_bytes: size of the largest file; None: as the model's own files, or `default`.

    Raises:
        ReshardError: the source lacks a weight, or a part of one.
    """
    stored = source.dtypes
    shapes = {weight.name: weight.shape for weight in source.weights}
    dtypes = {name: dtype or stored[name] for name in shapes}
    plain = whole_layout(shapes.items())
    parts = parts_of(source.layout, plain)
    headers = _recorded(source, shapes, dtypes) if shard_bytes is None else None
    # Arrays of all experts, which the model's own files may have.
    stacked = {
        name: [weight.name for weight in array.weights]
        for name, array in expert_arrays(source.weights).items()
    }
    if headers is None:
        tensors = [(name, shapes[name], dtypes[name]) for name in shapes]
        headers = shard_headers(tensors, shard_bytes or default)
        index = index_text(headers) if len(headers) > 1 else None
    else:
        index = source.file_headers.get(INDEX_FILE)
    items: list[FileItem] = []
    heads, files = [], {}
    for file, header in headers.items():
        # A file is its header, followed by the data of its tensors.
        head = framed(header)
        heads.append((file, 0, head))
        files[file] = len(head) + data_bytes(header)
        for name, entry in entries_of(header).items():
            at = len(head) + entry["data_offsets"][0]
            if name in source.buffers:
                # The model's own files have this buffer, but no parameter of the model:
                # its bytes were kept for them.
                heads.append((file, at, source.buffers[name]))
                continue
            # A tied weight that the model's own files store twice is written twice,
            # from the same array.
            of = source.twins.get(name, name)
            for member in stacked.get(of, (of,)):
                item = Item(
                    name, file, at, shapes[member], dtypes[member], parts[member]
                )
                items.append(item)
                at += item.nbytes

    def write(folder: Path) -> None:
        if index is not None:
            (folder / INDEX_FILE).write_text(index, encoding="utf-8")

    return ModelTarget(files, items, heads, write)


def _recorded(
    source: ModelSource,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, str] | None:
    """Return the headers of the files that the model came from, if they still describe it."""
    headers = {
        name: text for name, text in source.file_headers.items() if name != INDEX_FILE
    }
    # With --dtype, for example, the old headers no longer fit.
    recorded = {
        name: (tuple(entry["shape"]), DTYPES[entry["dtype"]])
        for text in headers.values()
        for name, entry in entries_of(text).items()
        if name not in source.buffers
    }
    expected = {name: (shapes[name], dtypes[name]) for name in shapes}
    expected |= {name: expected[of] for name, of in source.twins.items()}
    for name, array in expert_arrays(source.weights).items():
        if name in recorded:
            kinds = {expected.pop(weight.name)[1] for weight in array.weights}
            # Matrices of several dtypes fit no array.
            if len(kinds) == 1:
                expected[name] = array.shape, kinds.pop()
    return headers if headers and recorded == expected else None


@dataclass(frozen=True)
class MegatronOptions:
    """Options of a distributed checkpoint.

    Attributes:
        shape: grid whose ranks' files are written; any other grid can read them.
        padded_vocab_size: rows of the embedding.
        prefix: prefix of every key, such as a role's `actor.`.
        transformer_engine: use the names of Transformer Engine's layer spec, instead of the local one's.
    """

    shape: GridShape
    padded_vocab_size: int
    prefix: str = ""
    transformer_engine: bool = True


def megatron_target(
    source: ModelSource,
    dtype: torch.dtype | None,
    shard_bytes: int,
    options: MegatronOptions,
) -> ModelTarget:
    """Plan a `torch_dist` checkpoint with the chunks that every rank of the grid would hold.

    Raises:
        GridError: the grid does not divide the model.
        ReshardError: the source lacks a weight, or a part of one, or no rank of the grid stores some elements.
        ModelError: the format's files cannot hold a dtype.
    """
    spec, weights = source.spec, source.weights
    layout = checkpoint_layout(
        weights,
        spec,
        padded_vocab_size=options.padded_vocab_size,
        prefix=options.prefix,
        transformer_engine=options.transformer_engine,
    )
    parts = parts_of(source.layout, layout)
    # Searchable by box, because every chunk below asks for its own parts.
    filling = {name: Parts(array_parts) for name, array_parts in parts.items()}
    dtypes = {
        name: dtype or _widest(source, parts[name]) for name in layout.local_shapes
    }
    unknown = sorted(
        {str(array_parts) for array_parts in dtypes.values()}
        - {str(array_parts) for array_parts in STORAGES}
    )
    if unknown:
        raise ModelError(
            f"weights of dtype {', '.join(unknown)} cannot be trained. Give one with --dtype bfloat16."
        )
    chunks = _chunks(source, layout, options)
    _check_tiling(chunks, layout)
    items: list[Item] = []
    files: dict[str, int] = {}
    chunks_by_name: dict[str, list[Chunk]] = {name: [] for name in layout.local_shapes}
    for rank, boxes in chunks.items():
        # Number of the rank's file, and the offset of its next frame.
        number, end = 0, 0
        for key, box in boxes:
            # Large boxes are cut, so that several threads can work on one weight.
            for piece in split(box, CHUNK_BYTES // dtypes[key].itemsize):
                frame = Frame(piece.shape, dtypes[key])
                # `end` is 0 for a frame that alone is larger than a file may be: it
                # gets a file of its own.
                if end and end + frame.length > shard_bytes:
                    number, end = number + 1, 0
                file = f"__{rank}_{number}.distcp"
                items.append(
                    Item(
                        key,
                        file,
                        end,
                        piece.shape,
                        dtypes[key],
                        filling[key].within(piece),
                        frame,
                    )
                )
                chunks_by_name[key].append(Chunk(piece, Path(file), end, frame.length))
                end += frame.length
                files[file] = end
    arrays = {
        key: IndexedArray(
            shape, str(dtypes[key]).removeprefix("torch."), chunks_by_name[key]
        )
        for key, shape in layout.local_shapes.items()
    }
    objects, heads = _extra_states(layout, spec, files)
    return ModelTarget(
        files, items, heads, lambda folder: write_index(folder, arrays, objects)
    )


def _widest(source: ModelSource, parts: Sequence[ArrayPart]) -> torch.dtype:
    dtypes = [source.arrays[part.source].dtype for part in parts]
    # A stacked array may have its layers in several dtypes.
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest


def _chunks(
    source: ModelSource, layout: Layout, options: MegatronOptions
) -> dict[int, list[tuple[str, Box]]]:
    """Return rank -> boxes of the checkpoint's arrays. The first of several ranks with the same box stores it."""
    shape = options.shape
    layouts = megatron_layouts(
        source.weights, source.spec, shape, padded_vocab_size=options.padded_vocab_size
    )
    vocabulary = {
        weight.name for weight in source.weights if weight.split is Split.VOCAB
    }
    key_of = {
        piece.tensor: piece.local
        for piece in layout.pieces
        if piece.tensor in vocabulary
    }
    run = options.padded_vocab_size // shape.tp
    seen: set[tuple[str, Box]] = set()
    known: set[int] = set()
    chunks: dict[int, list[tuple[str, Box]]] = {}
    for rank in range(shape.world_size):
        held = layouts(rank)
        # Replicas share one layout object. Only the first of them stores it.
        if id(held) in known:
            continue
        known.add(id(held))
        boxes: list[tuple[str, Box]] = []
        # The vocabulary is padded, so its chunks are computed from the rank: layouts
        # have no padding.
        low = shape.coords(rank).tp * run
        for tensor, key in key_of.items():  # with their padding
            if tensor in held.global_shapes:
                boxes.append((key, cut(layout.local_shapes[key], 0, low, low + run)))
        for transfer in intersect_layouts(layout, held):
            if transfer.tensor not in vocabulary:
                boxes.append(
                    stored_box(layout, transfer.source_local, transfer.source_box)
                )
        # Without duplicates, but in the order of the layout.
        chunks[rank] = [box for box in dict.fromkeys(boxes) if box not in seen]
        seen.update(boxes)
    return {rank: boxes for rank, boxes in chunks.items() if boxes}


def _check_tiling(
    chunks: Mapping[int, Sequence[tuple[str, Box]]], layout: Layout
) -> None:
    """Check that every element of every array is in exactly one chunk."""
    boxes: dict[str, list[Box]] = {name: [] for name in layout.local_shapes}
    for rank_chunks in chunks.values():
        for key, box in rank_chunks:
            boxes[key].append(box)
    wrong = [
        key
        for key, shape in layout.local_shapes.items()
        # The right number of elements without an overlap means that nothing is missing
        # either.
        if sum(box.numel for box in boxes[key]) != whole(shape).numel
        or first_overlap(boxes[key])
    ]
    if wrong:
        raise ReshardError(
            f"the grid's ranks do not store each element once: {', '.join(wrong[:8])}."
        )


# Linear layers of `models/gated_delta_net.py`. The names of others begin with "linear_".
LINEAR_IN_DELTA_NETS = ("in_proj_qkvz", "in_proj_ba", "out_proj")


def _extra_states(
    layout: Layout, spec: ModelSpec, files: dict[str, int]
) -> tuple[dict[str, Chunk], list[tuple[str, int, bytes]]]:
    """Return the (empty) extra states of linear layers, which megatron-core's strict loading requires."""
    stream = io.BytesIO()
    torch.save(NO_EXTRA_STATE, stream)
    file = next(iter(files))
    # All extra states are equal, so the index lets all of them point to the same bytes.
    place = Chunk(whole(()), Path(file), files[file], len(stream.getvalue()))
    objects = {}
    for key, shape in layout.local_shapes.items():
        stem, dot, last = key.rpartition(".")
        module = stem.rpartition(".")[2]
        is_linear = module.startswith("linear_") or module in LINEAR_IN_DELTA_NETS
        if not is_linear or last != "weight":
            continue
        front = shape[:-2]  # layers, experts
        if LAYER.search(key) is None and not front:
            continue
        counts = front or (1,)
        for index in (
            torch.cartesian_prod(*(torch.arange(n) for n in counts))
            .view(-1, len(counts))
            .tolist()
        ):
            name = ".".join(map(str, index)) + "_" + ".".join(map(str, counts))
            objects[f"{stem}._extra_state/shard_{name}"] = place
    files[file] += place.length
    return objects, [(file, place.offset, stream.getvalue())]


def make_files(folder: Path, target: ModelTarget) -> None:
    """Create the target's files with their full sizes, and write everything that is not an array."""
    for name, size in target.files.items():
        with (folder / name).open("wb") as file:
            # A sparse file: writers may fill it in any order, and gaps take no space.
            os.truncate(file.fileno(), size)
    for name, offset, data in target.heads:
        with (folder / name).open("r+b") as file:
            file.seek(offset)
            file.write(data)
