"""A weight: a global array under its Hugging Face name, and the rule by which engines split it."""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple


class Split(Enum):
    """How tensor parallelism divides a weight.

    VOCAB, COLUMN, Q, K, V, GATE and UP divide the output rows (axis 0), ROW the input columns (axis 1).
    Q, K, V and GATE, UP also say which part of a fused tensor a weight is.
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
        expert: its number among the layer's routed experts; None: no routed expert's.
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
