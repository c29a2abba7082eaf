"""A weight: a global array under its Hugging Face name, how engines split it, and many of them in one message."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from math import prod
from typing import Literal, NamedTuple

from megaverl.sharding.boxes import Box, cut, whole
from megaverl.sharding.strided import Strides


class Split(Enum):
    """How tensor parallelism divides a weight.

    VOCAB, COLUMN, Q, K, V, GATE and UP divide the output rows (axis 0), ROW the input columns (axis 1).
    Q, K, V and GATE, UP also say which part of a fused tensor a weight is.
    STACKED ones hold all routed experts of a layer along axis 0, each transposed, `[in, out]`, or as a bias:
    STACKED_OUT is divided along the outputs, STACKED_IN along the inputs, STACKED_WHOLE (a bias on outputs that ranks
    add up) not at all.
    """

    REPLICATED = "replicated"
    VOCAB = "vocab"
    COLUMN = "column"
    ROW = "row"
    Q = "q"
    K = "k"
    V = "v"
    GATE = "gate"
    UP = "up"
    STACKED_OUT = "stacked out"
    STACKED_IN = "stacked in"
    STACKED_WHOLE = "stacked whole"


class Weight(NamedTuple):
    """One global array.

    Attributes:
        name: its name in Hugging Face's files.
        shape: its global shape, without any padding.
        split: how tensor parallelism divides it.
        stage: the number of the decoder layer that it belongs to, or the first or last pipeline stage.
        megatron: name of the GPTModel parameter that holds it; for a decoder layer, the part after
            `decoder.layers.N.`. Weights of the same name are fused in the order of the table. A routed
            expert's has `{}` where its number on the expert-parallel rank goes.
        transformer_engine: the same under Transformer Engine's layer spec, where it differs.
        vllm: name of vLLM's parameter, or None when vLLM has no use for it.
        megatron_tied: name of the second copy that the last stage holds when it is not the first one too.
        expert: its number among the layer's routed experts; None: no routed expert's, or that of all of them.
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
        """Whether it holds all routed experts of a layer."""
        return self.split in (Split.STACKED_OUT, Split.STACKED_IN, Split.STACKED_WHOLE)


def shapes_of(weights: Iterable[Weight]) -> dict[str, tuple[int, ...]]:
    """By name, as `Engine.layouts` takes them."""
    return {weight.name: weight.shape for weight in weights}


def even_part(weight: Weight, tp: int, tp_rank: int) -> Box:
    """One of `tp` equal parts, which must exist: columns of a ROW weight, all of a REPLICATED one, rows of others."""
    if weight.split is Split.REPLICATED:
        return whole(weight.shape)
    axis = 1 if weight.split is Split.ROW else 0
    run = weight.shape[axis] // tp
    return cut(weight.shape, axis, tp_rank * run, (tp_rank + 1) * run)


class StackedPart(NamedTuple):
    """Some experts of a weight that holds all, `[experts, in, out]` or `[experts, out]`, and the local array of them.

    Attributes:
        box: of the weight.
        shape: of the local array, `[experts, out, in]` or `[experts, out]`.
        view: how that is seen in the order of the weight.
    """

    box: Box
    shape: tuple[int, ...]
    view: Strides | None


def stacked_part(weight: Weight, experts: range, tp: int, tp_rank: int) -> StackedPart:
    """One of `tp` parts of neighbouring experts, which must exist."""
    axis = {Split.STACKED_OUT: len(weight.shape) - 1, Split.STACKED_IN: 1}.get(weight.split)
    start, stop = [experts.start] + [0] * (len(weight.shape) - 1), [experts.stop, *weight.shape[1:]]
    if axis is not None:
        run = weight.shape[axis] // tp
        start[axis], stop[axis] = tp_rank * run, (tp_rank + 1) * run
    box = Box(tuple(start), tuple(stop))
    if len(box.shape) == 2:
        return StackedPart(box, box.shape, None)
    view = Strides((0, 2, 1), (0, 0, 0), (1, 1, 1))
    return StackedPart(box, view.shape_of(box.shape), view)


NUMBER = re.compile(r"\d+")
GAP = "\0"  # stands for a number; no name holds it


def listed(lines: Iterable[str]) -> list[str]:
    """The lines, in order; lines that say the same of every number in some ranges become one.

    `layers.0.up: x`, `layers.1.up: x`, `layers.3.up: x` give `layers.0-1,3.up: x`. Nothing is left out.
    """
    alike: dict[str, list[tuple[int, ...]]] = {}
    for line in lines:
        alike.setdefault(NUMBER.sub(GAP, line), []).append(tuple(map(int, NUMBER.findall(line))))
    out = []
    for text, numbers in alike.items():
        distinct = sorted(set(numbers))
        columns = [sorted(set(column)) for column in zip(*distinct, strict=True)]
        if prod(map(len, columns)) == len(distinct):
            out.append(_fill(text, [_ranges(column) for column in columns]))
        else:
            out += [_fill(text, [str(number) for number in row]) for row in distinct]
    return out


def as_block(problems: Iterable[str], most: int) -> str:
    """The lines of `listed`, each on an indented line of its own, and how many there are beyond `most`."""
    lines = listed(problems)
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "".join(f"\n  {line}" for line in [*lines[:most], *more])


def _fill(text: str, numbers: list[str]) -> str:
    values = iter(numbers)
    return re.sub(GAP, lambda _: next(values), text)


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
