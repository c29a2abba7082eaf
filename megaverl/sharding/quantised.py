"""Weights that an engine holds in 8 bits: which they are, what shares a scale, and in which parts they land.

A scale belongs to a block of a matrix as the engine's rank holds it: fused (q, k, v; gate, up), cut, an expert's.
Blocks follow neither the source's shards nor the weights of a fused matrix, so a matrix is quantised when all of it has
landed, from a buffer in the dtype that travels. Rules: vLLM 0.32, `model_executor/layers/quantization/online/fp8.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from megaverl.sharding.layout import Layout, Piece
from megaverl.sharding.weight import Split, Weight

if TYPE_CHECKING:
    import torch

# vLLM's names -> rows and columns of a block that has a scale, or None for one scale a matrix. It reads `fp8` as
# `fp8_per_tensor` where the model's folder is not quantised (`model_executor/model_loader/weight_utils.py`).
QUANTIZATIONS: dict[str, int | None] = {"fp8_per_block": 128, "fp8_per_tensor": None, "fp8": None}
SCALE_BYTES = 4  # float32
ROUTER = "mlp.router."


class QuantisedWeight(NamedTuple):
    """A quantised tensor of this rank's part of an engine, and its scales: weight ≈ numbers * scale.

    Attributes:
        numbers: float8_e4m3fn, of the layout's shape: [rows, columns], or [experts, rows, columns].
        scales: float32: [blocks along the rows, along the columns], behind [experts] where there are such; without
            blocks one number a matrix, [1] or [experts].
        block: rows and columns of a block; None: the matrix is one.
        powers_of_two: scales are rounded up to such (UE8M0, which DeepGEMM's kernels may want).
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    block: int | None
    powers_of_two: bool = False


def quantised_tensors(weights: Sequence[Weight]) -> dict[str, None]:
    """vLLM's parameters that are quantised: the matrices of linear layers and experts, but not embeddings, the
    language-model head and routers; in the order of the weights."""
    return {
        weight.vllm: None
        for weight in weights
        if weight.vllm is not None
        and len(weight.shape) == 2
        and not weight.is_stacked
        and weight.split is not Split.VOCAB
        and not weight.megatron.startswith(ROUTER)
    }


def scale_shape(rows: int, columns: int, block: int | None) -> tuple[int, ...]:
    """Of the scales of one matrix."""
    return (1,) if block is None else (-(-rows // block), -(-columns // block))


def slot_of(piece: Piece) -> int:
    """The place of a piece's matrix among those of its local tensor: an expert's; 0 where there is one."""
    return piece.local_box.start[0] if len(piece.local_box.start) > 2 else 0


def matrices(layout: Layout) -> dict[frozenset[str], int]:
    """Global tensors that fill one quantised matrix of this layout -> its elements; in the order of the pieces."""
    found: dict[tuple[str, int], set[str]] = {}
    for piece in layout.pieces:
        if piece.local in layout.quantised:
            found.setdefault((piece.local, slot_of(piece)), set()).add(piece.tensor)
    return {frozenset(tensors): prod(layout.local_shapes[local][-2:]) for (local, _), tensors in found.items()}


def landing_parts(layouts: Iterable[Layout], max_numel: int) -> tuple[frozenset[str], ...]:
    """The weights that land in quantised matrices, in parts of which no rank holds more than `max_numel` elements,
    or one matrix if that is larger; in the order in which they land.

    Every rank's matrices fill its parts one after the other; what several ranks hold is in the latest of theirs. So
    each part is as much as can be for as many as can be, with experts on one rank each too.

    Args:
        layouts: the distinct ones of all ranks, in an order that is the same everywhere.
    """
    held: dict[frozenset[str], dict[int, int]] = {}
    for number, layout in enumerate(layouts):
        for tensors, numel in matrices(layout).items():
            held.setdefault(tensors, {})[number] = numel
    parts: list[set[str]] = []
    reached: dict[int, tuple[int, int]] = {}  # by layout: its last part, and its elements in it
    for tensors, holders in held.items():
        place = max(reached.get(number, (0, 0))[0] for number in holders)
        used = {number: reached[number][1] if reached.get(number, (-1, 0))[0] == place else 0 for number in holders}
        if any(used[number] and used[number] + numel > max_numel for number, numel in holders.items()):
            place, used = place + 1, dict.fromkeys(holders, 0)
        reached |= {number: (place, used[number] + numel) for number, numel in holders.items()}
        parts += [set() for _ in range(place + 1 - len(parts))]
        parts[place] |= tensors
    return tuple(map(frozenset, parts))


def held_bytes(layout: Layout, itemsize: int) -> int:
    """Bytes of an engine's tensors: one an element where they are quantised, and their scales."""
    total = 0
    for name, shape in layout.local_shapes.items():
        if name not in layout.quantised:
            total += prod(shape) * itemsize
            continue
        scales = prod(scale_shape(shape[-2], shape[-1], layout.quantised[name]))
        total += prod(shape) + prod(shape[:-2]) * scales * SCALE_BYTES
    return total
