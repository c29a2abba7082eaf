"""How megatron-core divides layers and vocabulary, and sends micro-batches through the stages, without importing it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megaverl.errors import GridError

MORE = "more micro-batches"


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


def pipeline(
    stages: Sequence[tuple[float, float]], number: int, hop: float, *, forward_only: bool = False, chunks: int = 1
) -> tuple[float, list[tuple[str, int, float, float]]]:
    """Play one forward, one backward (Narayanan et al. 2021, arXiv 2104.04473).

    After so many micro-batches that the schedule repeats, the rest is added in proportion, as one lane (`MORE`) of each
    stage; virtual stages divide what the pipeline waits by their number.

    Args:
        stages: (forward, backward) seconds of each over one micro-batch.
        number: of micro-batches. hop: seconds of one between two stages.
        chunks: virtual stages of each.

    Returns:
        (seconds, (pass, stage, begin, end)).
    """
    size = len(stages)
    played = min(number, 3 * size)
    span, lanes = _one_forward_one_backward(stages, played, hop, forward_only)
    if number > played:
        before, _ = _one_forward_one_backward(stages, 2 * size, hop, forward_only)
        busiest = max(forward + (0.0 if forward_only else backward) for forward, backward in stages)
        # the last turns may have waited less than all that follow
        span += (number - played) * max(busiest, (span - before) / (played - 2 * size))
        ends = {stage: end for _, stage, _, end in sorted(lanes, key=lambda lane: lane[3])}
        lanes += [(MORE, stage, end, span) for stage, end in ends.items()]
    if chunks > 1 and size > 1:
        least = max(number * (forward + (0.0 if forward_only else backward)) for forward, backward in stages)
        shorter = least + max(0.0, span - least) / chunks + 2 * hop * number * (chunks - 1) / chunks
        lanes = [(what, stage, begin * shorter / span, end * shorter / span) for what, stage, begin, end in lanes]
        span = shorter
    return span, lanes


def _one_forward_one_backward(
    stages: Sequence[tuple[float, float]], number: int, hop: float, forward_only: bool
) -> tuple[float, list[tuple[str, int, float, float]]]:
    size = len(stages)
    orders: list[list[tuple[bool, int]]] = []
    for stage in range(size):
        warm = number if forward_only else min(number, size - stage - 1)
        order = [(True, n) for n in range(warm)]
        for n in range(number - warm):
            order += [(True, warm + n), (False, n)]
        order += [] if forward_only else [(False, n) for n in range(number - warm, number)]
        orders.append(order)
    done: dict[tuple[bool, int, int], float] = {}
    free, place = [0.0] * size, [0] * size
    lanes, moved = [], True
    while moved:
        moved = False
        for stage in range(size):
            while place[stage] < len(orders[stage]):
                forward, n = orders[stage][place[stage]]
                other = stage - 1 if forward else stage + 1
                ready = 0.0
                if 0 <= other < size:
                    if (forward, n, other) not in done:
                        break
                    ready = done[forward, n, other] + hop
                begin = max(free[stage], ready)
                free[stage] = done[forward, n, stage] = begin + stages[stage][0 if forward else 1]
                lanes.append(("forward" if forward else "backward", stage, begin, free[stage]))
                place[stage] += 1
                moved = True
    return max(free), lanes
