"""How megatron-core divides layers and vocabulary, without importing it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megaverl.errors import GridError


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding after padding (`megaverl.models.options.padded_vocab_size`, which needs torch)."""
    multiple = math.lcm(64, tp)
    return -(-vocab_size // multiple) * multiple


def layer_split(num_layers: int, pp: int, vpp: int | None, fields: Mapping[str, Any], role: str) -> list[int]:
    """Decoder layers of every stage in model order; with virtual stages chunk by chunk, stage by stage.

    The rule of megatron-core 0.16 (`transformer_block.get_num_layers_to_build`).

    Args:
        fields: the role's `megatron`, whose fields may ask for an uneven split.

    Raises:
        GridError: layers that do not divide, or a split that is given as a layout string.
    """
    if fields.get("pipeline_model_parallel_layout") is not None:
        raise GridError(
            f"{role}.megatron.pipeline_model_parallel_layout is not read by `megaverl plan`. Use "
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage."
        )
    first = fields.get("num_layers_in_first_pipeline_stage")
    last = fields.get("num_layers_in_last_pipeline_stage")
    with_embedding = bool(fields.get("account_for_embedding_in_pipeline_split"))
    with_loss = bool(fields.get("account_for_loss_in_pipeline_split"))
    chunks = vpp if vpp is not None and pp > 1 else 1
    if first is not None or last is not None:
        rest, stages = num_layers - (first or 0) - (last or 0), pp - (first is not None) - (last is not None)
        _divide(rest, stages, role, "layers of the stages between")
        per_rank = [rest // stages if stages else 0] * pp
        per_rank = [per_rank[0] if first is None else first, *per_rank[1:]]
        per_rank = [*per_rank[:-1], per_rank[-1] if last is None else last]
        for count in per_rank:
            _divide(count, chunks, role, "layers of a stage")
        return [count // chunks for _ in range(chunks) for count in per_rank]
    total = num_layers + with_embedding + with_loss
    _divide(total, pp * chunks, role, "layers")
    split = [total // (pp * chunks)] * (pp * chunks)
    split[0] -= with_embedding
    split[-1] -= with_loss
    return split


def _divide(number: int, parts: int, role: str, what: str) -> None:
    if (number % parts if parts else number) or number < 0:
        fits = ", ".join(str(size) for size in range(1, max(number, 0) + 1) if number % size == 0)
        raise GridError(f"{role}.pp: {number} {what} cannot be divided over {parts}. Sizes that fit: {fits or 'none'}.")
