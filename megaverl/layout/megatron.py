"""Megatron-core's GPTModel as a layout: tensor, pipeline and virtual-pipeline parallel, data replicas alike.

Rules (megatron-core 0.16, `models/gpt/gpt_model.py`, `transformer/attention.py`, `transformer/mlp.py`):
- `linear_qkv` is the array [q heads of group 0, k 0, v 0, q heads of group 1, ...] cut into equal runs of
  rows, also when there are fewer groups than ranks;
- `linear_fc1` is [this rank's gate rows; this rank's up rows];
- the vocabulary is padded at its end and cut into equal runs of rows;
- layers are numbered from zero on every stage (and in every chunk of a virtual pipeline);
- the last stage holds a second copy of tied embeddings when it is not the first stage too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from megaverl.errors import GridError
from megaverl.layout.boxes import Box, cut, whole
from megaverl.layout.layout import Layout, LayoutBuilder
from megaverl.layout.weights import Split, Weight
from megaverl.models.spec import ModelSpec
from megaverl.parallel.grid import GridShape

Part = tuple[str, tuple[int, ...], Box]


def megatron_layout(
    weights: Sequence[Weight],
    spec: ModelSpec,
    shape: GridShape,
    rank: int,
    *,
    padded_vocab_size: int,
    transformer_engine: bool = False,
    layer_split: Sequence[int] | None = None,
) -> Layout:
    """What `rank` of the grid holds, under GPTModel's parameter names.

    Args:
        weights: the model's global arrays, from `megaverl.models.architectures.weights_of`.
        spec: gives the number of heads, groups and layers.
        shape: the grid; data and context replicas hold the same.
        rank: the rank in the grid.
        padded_vocab_size: rows of the padded vocabulary over all tensor-parallel ranks.
        transformer_engine: use the names of Transformer Engine's layer spec.
        layer_split: decoder layers of every stage in model order (with virtual stages: chunk by chunk,
            and in each chunk stage by stage). Even when None.

    Local names carry the prefix `chunk{v}.` when a rank holds several chunks, and none otherwise.

    Raises:
        GridError: layers, heads, rows or the padded vocabulary that the grid does not divide.
    """
    coords = shape.coords(rank)
    num_chunks = shape.vpp or 1
    num_stages = shape.pp * num_chunks
    starts = _stage_starts(spec, shape, layer_split)
    builder = LayoutBuilder()
    for chunk in range(num_chunks):
        stage = chunk * shape.pp + coords.pp
        held = [
            (name, weight)
            for weight in weights
            for name in _local_names(weight, stage, num_stages, starts, transformer_engine)
        ]
        prefix = f"chunk{chunk}." if num_chunks > 1 else ""
        for name, fused in _by_name(held).items():
            rows = padded_vocab_size // shape.tp if fused[0].split is Split.VOCAB else None
            parts = _tp_parts(fused, spec, shape.tp, coords.tp, padded_vocab_size)
            builder.add_stacked(prefix + name, parts, rows)
    return builder.build()


def megatron_layouts(
    weights: Sequence[Weight],
    spec: ModelSpec,
    shape: GridShape,
    *,
    padded_vocab_size: int,
    transformer_engine: bool = False,
    layer_split: Sequence[int] | None = None,
) -> Callable[[int], Layout]:
    """`rank -> layout` for a whole grid; ranks that hold the same share one object, as plans like it."""
    layouts: dict[tuple[int, int], Layout] = {}

    def layout_of(rank: int) -> Layout:
        coords = shape.coords(rank)
        key = (coords.tp, coords.pp)
        if key not in layouts:
            layouts[key] = megatron_layout(
                weights,
                spec,
                shape,
                rank,
                padded_vocab_size=padded_vocab_size,
                transformer_engine=transformer_engine,
                layer_split=layer_split,
            )
        return layouts[key]

    return layout_of


def _stage_starts(spec: ModelSpec, shape: GridShape, layer_split: Sequence[int] | None) -> list[int]:
    """First layer of every (virtual) stage in model order, and the number of layers as the last entry."""
    num_stages = shape.pp * (shape.vpp or 1)
    if layer_split is None:
        if spec.num_layers % num_stages:
            raise GridError(
                f"{spec.num_layers} layers cannot be divided evenly over {num_stages} pipeline stages "
                f"(pp {shape.pp} x vpp {shape.vpp or 1}). Choose a pp that divides them, or an uneven split."
            )
        layer_split = [spec.num_layers // num_stages] * num_stages
    if len(layer_split) != num_stages or sum(layer_split) != spec.num_layers:
        raise GridError(
            f"layer split {list(layer_split)}: expected {num_stages} numbers (pp x vpp) "
            f"that sum to {spec.num_layers} layers."
        )
    return [0, *accumulate(layer_split)]


def _local_names(
    weight: Weight, stage: int, num_stages: int, starts: Sequence[int], transformer_engine: bool
) -> list[str]:
    """The parameter of this stage that holds the weight, or none."""
    name = weight.megatron
    if transformer_engine and weight.transformer_engine is not None:
        name = weight.transformer_engine
    if weight.stage == "first":
        if stage == 0:
            return [name]
        tied = weight.megatron_tied if stage == num_stages - 1 else None
        return [tied] if tied else []
    if weight.stage == "last":
        return [name] if stage == num_stages - 1 else []
    if starts[stage] <= weight.stage < starts[stage + 1]:
        return [f"decoder.layers.{weight.stage - starts[stage]}.{name}"]
    return []


def _by_name(held: Sequence[tuple[str, Weight]]) -> dict[str, list[Weight]]:
    fused: dict[str, list[Weight]] = {}
    for name, weight in held:
        fused.setdefault(name, []).append(weight)
    return fused


def _tp_parts(fused: Sequence[Weight], spec: ModelSpec, tp: int, tp_rank: int, padded_vocab_size: int) -> list[Part]:
    """The boxes that one tensor-parallel rank stacks into a parameter."""
    first = fused[0]
    if first.split is Split.VOCAB:
        if padded_vocab_size % tp or padded_vocab_size < first.shape[0]:
            raise GridError(
                f"{first.name}: the padded vocabulary {padded_vocab_size} must be a multiple of tp {tp} "
                f"and at least {first.shape[0]}."
            )
        run = padded_vocab_size // tp
        low = min(tp_rank * run, first.shape[0])
        high = min(low + run, first.shape[0])
        return [(first.name, first.shape, cut(first.shape, 0, low, high))]
    if first.split is Split.Q:
        return _interleaved(fused, spec, tp, tp_rank)
    return [(weight.name, weight.shape, even_part(weight, tp, tp_rank)) for weight in fused]


def even_part(weight: Weight, tp: int, tp_rank: int, key: str = "tp") -> Box:
    """One of `tp` equal parts: columns of a ROW weight, all of a REPLICATED one, rows of any other."""
    if weight.split is Split.REPLICATED:
        return whole(weight.shape)
    axis = 1 if weight.split is Split.ROW else 0
    if weight.shape[axis] % tp:
        raise GridError(
            f"{weight.name}: its {weight.shape[axis]} {'columns' if axis else 'rows'} cannot be divided "
            f"over {key} {tp} ranks. Choose a {key} that divides them."
        )
    run = weight.shape[axis] // tp
    return cut(weight.shape, axis, tp_rank * run, (tp_rank + 1) * run)


def _interleaved(fused: Sequence[Weight], spec: ModelSpec, tp: int, tp_rank: int) -> list[Part]:
    """Rows of one rank out of [q of group 0, k 0, v 0, q of group 1, ...]."""
    fewer = spec.num_kv_heads < tp
    num_rows = sum(weight.shape[0] for weight in fused)
    if spec.num_heads % tp or (tp % spec.num_kv_heads if fewer else spec.num_kv_heads % tp) or num_rows % tp:
        raise GridError(
            f"{fused[0].name}: {spec.num_heads} heads and {spec.num_kv_heads} key-value heads cannot be "
            f"divided over tp {tp} ranks. Choose a tp that divides both."
        )
    run = num_rows // tp
    low, high = tp_rank * run, (tp_rank + 1) * run
    parts: list[Part] = []
    row = 0
    for group in range(spec.num_kv_heads):
        for weight in fused:
            height = weight.shape[0] // spec.num_kv_heads
            start, stop = max(low, row) - row, min(high, row + height) - row
            if start < stop:
                box = cut(weight.shape, 0, group * height + start, group * height + stop)
                parts.append((weight.name, weight.shape, box))
            row += height
    return parts
