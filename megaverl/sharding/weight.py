"""Weights: global arrays under Hugging Face names and their splits. Also, compact messages about many weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from math import prod
from typing import Literal, NamedTuple

from megaverl.sharding.boxes import Box, cut, whole
from megaverl.sharding.model_spec import MambaSpec
from megaverl.sharding.strided import Strides


class Split(Enum):
    """Axis along which tensor parallelism splits a weight, and its part of a fused tensor.

    VOCAB, COLUMN, Q, K, V, GATE and UP split the output rows (axis 0), ROW the input
    columns (axis 1). Q, K, V and GATE, UP also name the part of a fused tensor.
    FUSED_QKV and FUSED_GATE_UP are fused in the files already (Phi-3): all q rows, all
    k rows, then all v rows; all gate rows, then all up rows. Each of these parts is
    split. STACKED weights hold all routed experts of a layer along axis 0. gpt-oss
    stores each one transposed (`[in, out]`) or as a bias: STACKED_OUT is split along the
    outputs, STACKED_IN along the inputs. STACKED_WHOLE, a bias on outputs that are summed
    over ranks, is not split. Granite MoE stores each one as `[out, in]`:
    STACKED_GATE_UP has all gate rows, then all up rows of an expert, each split;
    STACKED_ROW is split along the input columns. Llama 4 stores each one transposed, with
    all gate columns, then all up columns: STACKED_OUT_GATE_UP. FLATTENED is `[1, n]` in files, and
    `[n]` on every rank of Megatron and vLLM. HEADS_IN_VLLM, a norm over all heads,
    is whole in Megatron and split by heads in vLLM. GATED_Q holds two runs of rows for each
    query head, the query and the gate of its output. NET_QKV holds all query rows, all
    key rows, then all value rows of a gated delta net, each split by heads. Megatron
    orders these by key heads, as well as the rows of BY_KEY_HEAD weights, which it fuses.
    So are the other splits IN_VLLM, of
    a vision tower's linear layers: along the rows, the columns, or the rows of each of
    q, k and v. MAMBA_IN and MAMBA_CONV are arrays of a Mamba-2 layer whose rows are
    several parts, each of which is split (`models/mamba.py`).
    """

    REPLICATED = "replicated"
    VOCAB = "vocab"
    COLUMN = "column"
    ROW = "row"
    Q = "q"
    GATED_Q = "q, gate by heads"
    K = "k"
    V = "v"
    GATE = "gate"
    UP = "up"
    FUSED_QKV = "fused q, k, v"
    FUSED_GATE_UP = "fused gate, up"
    STACKED_OUT = "stacked out"
    STACKED_IN = "stacked in"
    STACKED_WHOLE = "stacked whole"
    STACKED_GATE_UP = "stacked gate, up"
    STACKED_OUT_GATE_UP = "stacked out gate, up"
    STACKED_ROW = "stacked row"
    FLATTENED = "flattened"
    NET_QKV = "q, k, v of a delta net"
    BY_KEY_HEAD = "by key head"
    HEADS_IN_VLLM = "heads in vLLM"
    ROWS_IN_VLLM = "rows in vLLM"
    COLUMNS_IN_VLLM = "columns in vLLM"
    FUSED_QKV_IN_VLLM = "fused q, k, v in vLLM"
    MAMBA_IN = "gate, x, B, C, time steps"
    MAMBA_CONV = "x, B, C"


# Splits of weights that every rank of Megatron holds whole.
WHOLE_IN_MEGATRON = (
    Split.REPLICATED,
    Split.FLATTENED,
    Split.HEADS_IN_VLLM,
    Split.ROWS_IN_VLLM,
    Split.COLUMNS_IN_VLLM,
    Split.FUSED_QKV_IN_VLLM,
)
# Axis along which tensor parallelism splits an array of all experts. A bias on outputs
# has one axis less, which is the last one as well. None: not split.
STACKED_AXIS = {
    Split.STACKED_OUT: -1,
    Split.STACKED_IN: 1,
    Split.STACKED_WHOLE: None,
    Split.STACKED_GATE_UP: 1,
    Split.STACKED_OUT_GATE_UP: 2,
    Split.STACKED_ROW: 2,
}
# Arrays of all experts whose matrices are transposed in files.
TRANSPOSED = (Split.STACKED_OUT, Split.STACKED_IN, Split.STACKED_OUT_GATE_UP)
# Arrays of all experts that hold two parts of each along the axis that is split.
GATE_AND_UP = (Split.STACKED_GATE_UP, Split.STACKED_OUT_GATE_UP)


class Weight(NamedTuple):
    """One global array.

    Attributes:
        name: name in Hugging Face's files.
        shape: global shape, without padding.
        split: split by tensor parallelism.
        stage: number of its decoder layer, or the first or last pipeline stage.
        megatron: name of the GPTModel parameter that holds it; in a decoder layer, the part after `decoder.layers.N.`.
            Weights with the same name are fused in the order of the table. In a routed expert's name, `{}` stands for
            its number on the expert-parallel rank.
        transformer_engine: the same under Transformer Engine's layer spec, if it differs.
        vllm: name of vLLM's parameter. None: vLLM does not load it.
        megatron_tied: name of the second copy on the last stage, if that is not the first stage as well.
        expert: its number among the layer's routed experts. None: no routed expert's weight, or one of all experts.
    """

    name: str
    shape: tuple[int, ...]
    split: Split
    stage: int | Literal["first", "last"]
    megatron: str
    vllm: str | None
    transformer_engine: str | None = None
    megatron_tied: str | None = None
    expert: int | None = None

    @property
    def is_stacked(self) -> bool:
        """Return whether the array holds all routed experts of a layer."""
        return self.split in STACKED_AXIS


def shapes_of(weights: Iterable[Weight]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights by name, as `Engine.layouts` takes them."""
    return {weight.name: weight.shape for weight in weights}


def even_part(weight: Weight, tp: int, tp_rank: int) -> Box:
    """Return the box of one of `tp` equal parts: columns of a ROW weight, all of a whole one, rows of others.

    The size must be divisible by `tp`.
    """
    if weight.split in WHOLE_IN_MEGATRON:
        return whole(weight.shape)
    axis = 1 if weight.split is Split.ROW else 0
    run = weight.shape[axis] // tp
    return cut(weight.shape, axis, tp_rank * run, (tp_rank + 1) * run)


class RowRange(NamedTuple):
    """Adjacent rows of a weight: one part of a fused tensor.

    Attributes:
        weight: number of the weight among those that are fused.
        start: first row.
        rows: number of rows.
        is_shared: keys or values, whose heads several ranks may share.
    """

    weight: int
    start: int
    rows: int
    is_shared: bool = False


def delta_net_parts(weights: Sequence[Weight], key_rows: int) -> list[RowRange]:
    """Return the parts of weights of a gated delta net: rows of queries, keys and values, or all rows.

    Args:
        key_rows: rows of all key heads together, which are as many as those of queries.
    """
    parts = []
    for number, weight in enumerate(weights):
        first = 0
        if weight.split is Split.NET_QKV:
            parts += [
                RowRange(number, 0, key_rows),
                RowRange(number, key_rows, key_rows),
            ]
            first = 2 * key_rows
        parts.append(RowRange(number, first, weight.shape[0] - first))
    return parts


def fused_parts(weights: Sequence[Weight], q_rows: int, kv_rows: int) -> list[RowRange]:
    """Return the parts that weights fill, in order, whether they are fused in the files or are separate arrays there.

    Args:
        q_rows: rows of all query heads together.
        kv_rows: rows of all key heads together.
    """
    parts = []
    for number, weight in enumerate(weights):
        if weight.split is Split.FUSED_QKV:
            keys = RowRange(number, q_rows, kv_rows, True)
            values = RowRange(number, q_rows + kv_rows, kv_rows, True)
            parts += [RowRange(number, 0, q_rows), keys, values]
        elif weight.split is Split.FUSED_GATE_UP:
            half = weight.shape[0] // 2
            parts += [RowRange(number, 0, half), RowRange(number, half, half)]
        else:
            parts.append(
                RowRange(number, 0, weight.shape[0], weight.split in (Split.K, Split.V))
            )
    return parts


# Parts of the rows of a Mamba-2 layer's arrays, in order, under Megatron-core's names.
MAMBA_PARTS = {
    Split.MAMBA_IN: ("z", "x", "B", "C", "dt"),
    Split.MAMBA_CONV: ("x", "B", "C"),
}


class MambaRows(NamedTuple):
    """Adjacent rows of a Mamba-2 layer's array: one of its parts.

    Attributes:
        name: name of the part in `MAMBA_PARTS`.
        start: first row.
        rows: number of rows.
    """

    name: str
    start: int
    rows: int


def mamba_rows(split: Split, mamba: MambaSpec) -> list[MambaRows]:
    """Return the parts of an array with the split MAMBA_IN or MAMBA_CONV."""
    inner, groups = mamba.inner_size, mamba.group_rows
    sizes = {"z": inner, "x": inner, "B": groups, "C": groups, "dt": mamba.num_heads}
    parts = []
    start = 0
    for name in MAMBA_PARTS[split]:
        parts.append(MambaRows(name, start, sizes[name]))
        start += sizes[name]
    return parts


class StackedPart(NamedTuple):
    """Part of one expert out of an array that holds all of them, and the expert's own array.

    Attributes:
        boxes: boxes of the global array. They follow each other along one axis of the expert's array, or of its view.
        shape: shape of the expert's array, `[out, in]` or `[out]`.
        view: view of the expert's array in the order of the global one. None: the order is the same.
        axis: the axis along which boxes follow each other.
    """

    boxes: tuple[Box, ...]
    shape: tuple[int, ...]
    view: Strides | None
    axis: int

    def placed(self) -> Iterator[tuple[Box, Box]]:
        """Yield each box of the global array, and the box of the expert's array, or of its view, that holds it."""
        first = 0
        for box in self.boxes:
            start = [0] * len(box.shape[1:])
            stop = [*box.shape[1:]]
            start[self.axis] = first
            stop[self.axis] = first = first + stop[self.axis]
            yield box, Box(tuple(start), tuple(stop))


def stacked_part(weight: Weight, expert: int, tp: int, tp_rank: int) -> StackedPart:
    """Return one of `tp` parts of an expert. The split size must be divisible by `tp`."""
    axis = STACKED_AXIS[weight.split]
    # Gate rows (or columns) and up rows are split separately.
    num_boxes = 2 if weight.split in GATE_AND_UP else 1
    boxes = []
    for number in range(num_boxes):
        start = [expert] + [0] * (len(weight.shape) - 1)
        stop = [expert + 1, *weight.shape[1:]]
        if axis is not None:
            run = weight.shape[axis] // (num_boxes * tp)
            start[axis] = (number * tp + tp_rank) * run
            stop[axis] = start[axis] + run
        boxes.append(Box(tuple(start), tuple(stop)))
    joined = axis - 1 if num_boxes > 1 and axis is not None else 0
    sizes = [*boxes[0].shape[1:]]
    sizes[joined] *= num_boxes
    shape = tuple(sizes)
    # Biases have one axis, and lie as in the files.
    if weight.split not in TRANSPOSED or len(shape) == 1:
        return StackedPart(tuple(boxes), shape, None, joined)
    view = Strides((1, 0), (0, 0), (1, 1))
    return StackedPart(tuple(boxes), view.shape_of(shape), view, joined)


NUMBER = re.compile(r"\d+")
# Stands for a number in a pattern of names. No name contains it.
GAP = "\0"


def listed(lines: Iterable[str]) -> list[str]:
    """Return the lines with those merged that differ only in numbers from full ranges.

    `layers.0.up: x`, `layers.1.up: x`, `layers.3.up: x` become `layers.0-1,3.up: x`. No
    information is lost.
    """
    alike: dict[str, list[tuple[int, ...]]] = {}
    for line in lines:
        alike.setdefault(NUMBER.sub(GAP, line), []).append(
            tuple(map(int, NUMBER.findall(line)))
        )
    out = []
    for text, numbers in alike.items():
        distinct = sorted(set(numbers))
        columns = [sorted(set(column)) for column in zip(*distinct, strict=True)]
        # Lines can be merged without loss if their numbers are all combinations of the
        # columns' values.
        if prod(map(len, columns)) == len(distinct):
            out.append(_fill(text, [_ranges(column) for column in columns]))
        else:
            out += [_fill(text, [str(number) for number in row]) for row in distinct]
    return out


def as_block(problems: Iterable[str], most: int) -> str:
    """Return the lines of `listed`, indented, at most `most` of them, followed by the number of others."""
    lines = listed(problems)
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "".join(f"\n  {line}" for line in [*lines[:most], *more])


def _fill(text: str, numbers: list[str]) -> str:
    """Replace the gaps of a line by numbers."""
    values = iter(numbers)
    return re.sub(GAP, lambda _: next(values), text)


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text, such as "0-1,3"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
