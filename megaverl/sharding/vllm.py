"""vLLM's model parameters as a layout, for any tensor-parallel rank, with and without expert parallelism.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from megaverl.errors import GridError
from megaverl.sharding.boxes import Box, cut, whole
from megaverl.sharding.fit import misfits, shares_kv_heads
from megaverl.sharding.layout import Fill, Layout, LayoutBuilder, stack
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.quantised import QUANTIZATIONS, quantised_tensors
from megaverl.sharding.weight import Split, Weight, even_part, stacked_part

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
