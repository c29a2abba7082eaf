"""vLLM's model parameters as a layout, for any tensor-parallel rank, with and without expert parallelism; and weights
that an engine holds in 8 bits: which they are, what shares a scale, and in which parts they land.

An engine asks vLLM's own loader (`rollout/vllm_layouts.py`). The planner takes these rules, since a table of bytes must
not wait for vLLM's import (15 s) nor need it on a login node; tests hold one against the other.

Rules (vLLM 0.32, `model_executor/layers/linear.py`, `vocab_parallel_embedding.py`, `fused_moe/`):
- `qkv_proj` is [this rank's q rows; its k rows; its v rows]; with fewer key-value heads than ranks, each head
  is held by as many neighbouring ranks as share it;
- `gate_up_proj` is [this rank's gate rows; its up rows];
- the vocabulary is padded to a multiple of 64 and cut into equal runs of rows;
- `fused_qkv_a_proj` is [q_a; kv_a], whole on every rank;
- `w13_weight` is [expert, this rank's gate rows then its up rows, hidden], `w2_weight` is [expert, hidden, this
  rank's columns]: all experts, cut by the tensor-parallel size;
- with expert parallelism the tensor-parallel ranks divide the experts instead, each whole: neighbouring ones
  ("linear") or every n-th ("round_robin"), one more on the first ranks where the number does not divide
  (`fused_moe/expert_map_manager.py`). Router and shared experts stay as they are;
- gpt-oss's experts are as in its files, but `[expert, out, in]`; `w2_bias` is on the first rank alone, unless ranks
  divide the experts, and zero on the others.
Kernels that repack the experts after loading (FlashInfer, CPU grouped GEMM) hold something else: not laid out. Of a
quantised engine the layout says the same, and which tensors are quantised; where their scales are, the engine does.

A scale belongs to a block of a matrix as the engine's rank holds it: fused (q, k, v; gate, up), cut, an expert's.
Blocks follow neither the source's shards nor the weights of a fused matrix, so a matrix is quantised when all of it has
landed, from a buffer in the dtype that travels. Rules: vLLM 0.32, `model_executor/layers/quantization/online/fp8.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from megaverl.errors import GridError
from megaverl.sharding.boxes import Box, cut, whole
from megaverl.sharding.layout import Fill, Layout, LayoutBuilder, Piece, stack
from megaverl.sharding.model_spec import ModelSpec, misfits, shares_kv_heads
from megaverl.sharding.weight import Split, Weight, even_part, stacked_part

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


# vLLM's DEFAULT_VOCAB_PADDING_SIZE; the tests compare it with the installed one.
VOCAB_PADDING = 64

Placement = Literal["linear", "round_robin"]
_Kind = tuple[tuple[Split, tuple[int, ...]], ...]


def vllm_layouts(
    weights: Sequence[Weight],
    spec: ModelSpec,
    tp_size: int,
    *,
    expert_parallel: bool = False,
    expert_placement: Placement = "linear",
    quantization: str | None = None,
) -> Callable[[int], Layout]:
    """`rank -> layout`, under vLLM's parameter names, for replicas of `tp_size` neighbouring ranks.

    Replicas share one object a tensor-parallel rank.

    Args:
        expert_parallel: vLLM's `enable_expert_parallel`.
        expert_placement: its `expert_placement_strategy`; as in vLLM, models without expert groups are placed
            linearly whatever it says.
        quantization: vLLM's, one of `QUANTIZATIONS`; None: weights are floating-point numbers.

    Raises:
        GridError: heads, rows or the padded vocabulary that `rollout.tp` does not divide, or fewer experts than
            ranks; each with the first tensor that it concerns.
    """
    problems = [*_problems(weights, spec, tp_size, expert_parallel)]
    if problems:
        raise GridError("\n".join(problems))
    fused: dict[str, list[Weight]] = {}
    experts: dict[str, dict[int, list[Weight]]] = {}
    stacked: dict[str, Weight] = {}
    for weight in weights:
        if weight.vllm is None:
            continue
        if weight.is_stacked:
            stacked[weight.vllm] = weight
        elif weight.expert is None:
            fused.setdefault(weight.vllm, []).append(weight)
        else:
            experts.setdefault(weight.vllm, {}).setdefault(weight.expert, []).append(weight)
    kinds = {local: _kind(members) for local, members in fused.items()}
    layouts: dict[int, Layout] = {}
    quantised = {} if quantization is None else dict.fromkeys(quantised_tensors(weights), QUANTIZATIONS[quantization])

    def layout_of(rank: int) -> Layout:
        tp_rank = rank % tp_size
        if tp_rank not in layouts:
            builder = LayoutBuilder()
            fills: dict[_Kind, Fill] = {}
            for local, members in fused.items():
                if kinds[local] not in fills:
                    fills[kinds[local]] = _fill(members, spec, tp_size, tp_rank)
                builder.add(local, members, fills[kinds[local]])
            if spec.moe and expert_parallel:
                placement = expert_placement if spec.moe.num_groups > 1 else "linear"
                _add_experts(builder, experts, experts_of(spec.moe.num_experts, tp_size, tp_rank, placement), 1, 0)
                _add_stacked(builder, stacked, experts_of(spec.moe.num_experts, tp_size, tp_rank, "linear"), 1, 0)
            elif spec.moe:
                _add_experts(builder, experts, range(spec.moe.num_experts), tp_size, tp_rank)
                _add_stacked(builder, stacked, range(spec.moe.num_experts), tp_size, tp_rank)
            layouts[tp_rank] = builder.build(quantised)
        return layouts[tp_rank]

    return layout_of


def experts_of(num_experts: int, ep_size: int, ep_rank: int, placement: Placement) -> range:
    """The experts that one expert-parallel rank holds, in the order in which it holds them."""
    if placement == "round_robin":
        return range(ep_rank, num_experts, ep_size)
    fewest, more = divmod(num_experts, ep_size)
    start = ep_rank * fewest + min(ep_rank, more)
    return range(start, start + fewest + (ep_rank < more))


def _add_experts(
    builder: LayoutBuilder, experts: dict[str, dict[int, list[Weight]]], held: range, tp_size: int, tp_rank: int
) -> None:
    """`w13_weight` and `w2_weight` of all layers."""
    fills: dict[_Kind, Fill] = {}
    for local, by_expert in experts.items():
        kind = _kind(by_expert[held[0]])
        if kind not in fills:
            fills[kind] = _fill_experts(by_expert[held[0]], len(held), tp_size, tp_rank)
        builder.add(local, [weight for expert in held for weight in by_expert[expert]], fills[kind])


def _fill_experts(weights: Sequence[Weight], num_experts: int, tp_size: int, tp_rank: int) -> Fill:
    """Experts along axis 0, in each its weights stacked along axis 1."""
    one = stack([(number, even_part(weight, tp_size, tp_rank)) for number, weight in enumerate(weights)])
    parts = tuple(
        (expert * len(weights) + number, box, Box((expert, *inner.start), (expert + 1, *inner.stop)))
        for expert in range(num_experts)
        for number, box, inner in one.parts
    )
    return Fill(parts, (num_experts, *one.shape))


def _add_stacked(builder: LayoutBuilder, stacked: dict[str, Weight], held: range, tp_size: int, tp_rank: int) -> None:
    """Of all layers, what files hold as one array of all experts."""
    for local, weight in stacked.items():
        part = stacked_part(weight, held, tp_size, tp_rank)
        # ranks add up their outputs, to which one of them adds the bias
        parts = () if weight.split is Split.STACKED_WHOLE and tp_rank else ((0, part.box, whole(part.box.shape)),)
        builder.add(local, [weight], Fill(parts, part.shape, part.view))


def _kind(weights: Sequence[Weight]) -> _Kind:
    """What decides how a parameter is filled: the same in all layers that are alike."""
    return tuple((weight.split, weight.shape) for weight in weights)


def _fill(weights: Sequence[Weight], spec: ModelSpec, tp_size: int, tp_rank: int) -> Fill:
    first = weights[0]
    if first.split is Split.VOCAB:
        run = _padded(first) // tp_size
        low = min(tp_rank * run, first.shape[0])
        return stack([(0, cut(first.shape, 0, low, min(low + run, first.shape[0])))], run)
    return stack([(number, _part(weight, spec, tp_size, tp_rank)) for number, weight in enumerate(weights)])


def _padded(weight: Weight) -> int:
    return -(-weight.shape[0] // VOCAB_PADDING) * VOCAB_PADDING


def _part(weight: Weight, spec: ModelSpec, tp_size: int, tp_rank: int) -> Box:
    if weight.split in (Split.K, Split.V) and shares_kv_heads(spec, tp_size):
        head = tp_rank // (tp_size // spec.num_kv_heads)
        run = weight.shape[0] // spec.num_kv_heads
        return cut(weight.shape, 0, head * run, (head + 1) * run)
    return even_part(weight, tp_size, tp_rank)


def _problems(weights: Sequence[Weight], spec: ModelSpec, tp_size: int, expert_parallel: bool) -> Iterator[str]:
    """What `rollout.tp` does not divide."""
    found = misfits(spec, tp=tp_size, etp=1 if expert_parallel else tp_size, engine=True)
    yield from (f"rollout.tp={tp_size} {misfit.reason}" for misfit in found)
    expert = next((weight for weight in weights if weight.expert is not None), None)
    if expert and spec.moe and expert_parallel and spec.moe.num_experts < tp_size:
        yield (
            f"{expert.name}: the layer's {spec.moe.num_experts} experts are fewer than the rollout.tp {tp_size} "
            "ranks that divide them. Choose a smaller rollout.tp, or no expert parallelism."
        )
    vocabulary = next((weight for weight in weights if weight.split is Split.VOCAB), None)
    if vocabulary and _padded(vocabulary) % tp_size:
        padded = _padded(vocabulary)
        yield (
            f"{vocabulary.name}: vLLM pads the vocabulary of {vocabulary.shape[0]} to {padded}, which rollout.tp "
            f"{tp_size} does not divide. Choose a rollout.tp that divides {padded}."
        )
