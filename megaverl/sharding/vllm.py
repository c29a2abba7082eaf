"""Layout of vLLM's model parameters for any tensor-parallel rank, with and without expert parallelism.

Also weights that an engine holds in 4 or 8 bits: which these are, and in which parts
they arrive. `sharding/quantization.py` has their formats.

An engine asks vLLM's own loader (`rollout/vllm_layouts.py`). The planner uses the rules
below: a memory estimate must not wait 15 s for vLLM's import, nor need vLLM on a login
node. Tests compare the two.

Rules (vLLM 0.32, `model_executor/layers/linear.py`, `vocab_parallel_embedding.py`,
`fused_moe/`):
- `qkv_proj` is [this rank's q rows; its k rows; its v rows]. With fewer key-value heads than ranks, each head is held
  by as many adjacent ranks as share it.
- `gate_up_proj` is [this rank's gate rows; its up rows].
- With output gates, the q rows of `qkv_proj` are [q of head 0, its gate, q of head 1, ...], as in files.
- A gated delta net's `conv1d` is [this rank's q rows; its k rows; its v rows], and in Qwen3.5 `in_proj_qkvz` likewise
  with z rows behind. The rows of other projections, and all of Qwen3-Next's, are split evenly.
- The vocabulary is padded to a multiple of 64 and split into equal runs of rows.
- `fused_qkv_a_proj` is [q_a; kv_a], whole on every rank.
- `w13_weight` is [expert, this rank's gate rows then its up rows, hidden], `w2_weight` is [expert, hidden, this rank's
  columns]. Both hold all experts, split by the tensor-parallel size.
- With expert parallelism the tensor-parallel ranks divide the experts, each expert whole: adjacent ones ("linear") or
  every n-th ("round_robin"), one more on the first ranks if the number is not divisible
  (`fused_moe/expert_map_manager.py`). Router and shared experts are not affected.
- gpt-oss's experts are as in its files, but `[expert, out, in]`. Without expert parallelism `w2_bias` is on the first
  rank only, and zero on the others.
- `in_proj` of a Mamba-2 layer is [this rank's gate rows; its x, B, C and time steps' rows], `conv1d` [x; B; C]
  (`layers/mamba/mamba_mixer2.py`). All ranks hold B and C of a single group. `A` is computed from `A_log`.
- Llama 4's experts are transposed in files, with gate columns before up columns. In each query and key head vLLM puts
  the first rows of all pairs that rotary embeddings rotate before the second ones (`models/llama4.py`).
- Granite MoE's experts lie as other models' do: its files store all of them in one array, in the same order.

- A vision tower's linear layers are split like the decoder's, without sharing of heads: q, k and v rows, or all rows of
  a fused array, of column-parallel layers, columns of row-parallel ones. Sizes that the ranks do not divide stay whole.

Kernels that repack experts after loading (FlashInfer, CPU grouped GEMM) hold something
else, which has no layout here. A quantized engine has the same layout, which also says
which tensors are quantized. The engine knows where their scales are.

A scale belongs to a block of a matrix as the engine's rank holds it: fused (q, k, v;
gate, up), split, an expert's. Blocks follow neither the source's shards nor the weights
inside a fused matrix. So a matrix is quantized only after all of it has arrived, from a
buffer in the dtype of the transfer. Rules: vLLM 0.32,
`model_executor/layers/quantization/online/fp8.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from megaverl.errors import GridError
from megaverl.sharding.boxes import Box, cut, whole
from megaverl.sharding.layout import (
    Fill,
    Layout,
    LayoutBuilder,
    Piece,
    flatten,
    stack,
)
from megaverl.sharding.model_spec import ModelSpec, misfits, shares_kv_heads
from megaverl.sharding.quantization import FORMATS
from megaverl.sharding.weight import (
    MAMBA_PARTS,
    Split,
    Weight,
    delta_net_parts,
    even_part,
    fused_parts,
    mamba_rows,
    stacked_part,
)

if TYPE_CHECKING:
    import torch


# Megatron's names of routers, and of the gate of a shared expert, which vLLM keeps in
# full precision.
NEVER_QUANTISED = ("mlp.router.", "mlp.shared_experts.gate_weight")


class QuantisedWeight(NamedTuple):
    """FP8 tensor of this rank's part of an engine, and its scales: weight ≈ numbers * scale.

    Attributes:
        numbers: float8_e4m3fn, [rows, columns] or [experts, rows, columns], the shape in the layout.
        scales: float32, [blocks along the rows, along the columns] after an optional axis of experts. Without blocks
            one number per matrix, [1] or [experts].
        block: rows and columns of a block. None: the matrix is one block.
        powers_of_two: scales are rounded up to powers of two (UE8M0, which DeepGEMM's kernels may need).
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    block: int | None
    powers_of_two: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight in the layout."""
        return tuple(self.numbers.shape)

    @property
    def format(self) -> str:
        """Name of the format in `FORMATS`."""
        return "fp8_per_tensor" if self.block is None else "fp8_per_block"


class PackedWeight(NamedTuple):
    """Matrix of this rank's part of an engine in a format with groups, which a kernel may hold in an order of its own.

    Attributes:
        shape: [rows, columns], the shape in the layout.
        format: name of the format in `GROUP_FORMATS`.
        scale_dtype: dtype of int4 scales, which is that of activations.
        load: writes the tensors of the format, by their names in a compressed-tensors folder, to the engine in place.
        largest: reduces this rank's largest |element| over the engine's ranks. Collective. None: no other rank holds a
            part of the matrix.
    """

    shape: tuple[int, ...]
    format: str
    scale_dtype: torch.dtype
    load: Callable[[Mapping[str, torch.Tensor]], None]
    largest: Callable[[torch.Tensor], torch.Tensor] | None = None


# Weights of a quantised engine, in either kind of storage.
EngineWeight = QuantisedWeight | PackedWeight


def quantised_tensors(weights: Sequence[Weight]) -> dict[str, None]:
    """Return vLLM's parameters that are quantized, in the order of the weights.

    These are matrices of linear layers and experts, but not embeddings, the
    language-model head, routers and gates. vLLM transposes gpt-oss's experts as it loads
    them, and cannot quantize them.
    """
    return {
        weight.vllm: None
        for weight in weights
        if weight.vllm is not None
        and (
            weight.split in (Split.STACKED_GATE_UP, Split.STACKED_ROW)
            or (len(weight.shape) == 2 and not weight.is_stacked)
        )
        and weight.split is not Split.VOCAB
        and not weight.megatron.startswith(NEVER_QUANTISED)
    }


def slot_of(piece: Piece) -> int:
    """Return the index of a piece's matrix in its local tensor: the number of its expert, or 0 without experts."""
    return piece.local_box.start[0] if len(piece.local_box.start) > 2 else 0


def matrices(layout: Layout) -> dict[frozenset[str], int]:
    """Return each set of global tensors that fills quantized matrices, and the matrices' number of elements.

    They are in the order of the pieces. A set fills one matrix, or those of all experts
    if files store these in one array.
    """
    tensors_of: dict[tuple[str, int], set[str]] = {}
    for piece in layout.pieces:
        if piece.local in layout.quantised:
            tensors_of.setdefault((piece.local, slot_of(piece)), set()).add(
                piece.tensor
            )
    numels: dict[frozenset[str], int] = {}
    for (local, _), names in tensors_of.items():
        tensors = frozenset(names)
        numel = prod(layout.local_shapes[local][-2:])
        numels[tensors] = numels.get(tensors, 0) + numel
    return numels


def landing_parts(
    layouts: Iterable[Layout], max_numel: int
) -> tuple[frozenset[str], ...]:
    """Split the weights of quantized matrices into parts that fit a buffer and arrive one after the other.

    In a part no rank holds more than `max_numel` elements, or one matrix if that is
    larger. Every rank's matrices fill its parts in turn, and a matrix held by several
    ranks goes to the latest of their parts. So parts are as full as possible on as many
    ranks as possible, also with experts that are on one rank each.

    Args:
        layouts: distinct layouts of all ranks, in an order that is the same everywhere.
    """
    holders_of: dict[frozenset[str], dict[int, int]] = {}
    for number, layout in enumerate(layouts):
        for tensors, numel in matrices(layout).items():
            holders_of.setdefault(tensors, {})[number] = numel
    parts: list[set[str]] = []
    # Layout number -> (its last part, elements in it so far).
    reached: dict[int, tuple[int, int]] = {}
    for tensors, holders in holders_of.items():
        # All ranks receive a part at the same time. So a matrix goes into the latest
        # part that any of its holders has reached.
        place = max(reached.get(number, (0, 0))[0] for number in holders)
        used = dict.fromkeys(holders, 0)
        for number in holders:
            last_part, num_elements = reached.get(number, (-1, 0))
            if last_part == place:
                used[number] = num_elements
        if any(
            used[number] and used[number] + numel > max_numel
            for number, numel in holders.items()
        ):
            place = place + 1
            used = dict.fromkeys(holders, 0)
        reached |= {
            number: (place, used[number] + numel) for number, numel in holders.items()
        }
        parts += [set() for _ in range(place + 1 - len(parts))]
        parts[place] |= tensors
    return tuple(map(frozenset, parts))


def held_bytes(layout: Layout, itemsize: int) -> int:
    """Return the bytes of an engine's tensors, with the scales of quantized ones."""
    total = 0
    for name, shape in layout.local_shapes.items():
        if name not in layout.quantised:
            total += prod(shape) * itemsize
            continue
        rows, columns = shape[-2:]
        matrix = FORMATS[layout.quantised[name]].num_bytes(rows, columns, itemsize)
        total += prod(shape[:-2]) * matrix
    return total


# vLLM's DEFAULT_VOCAB_PADDING_SIZE; the tests compare it with the installed one.
VOCAB_PADDING = 64

# Architectures whose query and key rows vLLM's loader reorders, so that its rotary
# embeddings rotate halves of heads.
PAIRS_APART = ("Llama4ForCausalLM",)

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
    """Return the function from rank to layout under vLLM's parameter names, for replicas of `tp_size` adjacent ranks.

    Equal tensor-parallel ranks of different replicas share one object.

    Args:
        expert_parallel: vLLM's `enable_expert_parallel`.
        expert_placement: vLLM's `expert_placement_strategy`. As in vLLM, models without expert groups are always placed
            linearly.
        quantization: vLLM's quantization, one of `FORMATS`. None: floating-point weights.

    Raises:
        GridError: `rollout.tp` does not divide heads, rows or the padded vocabulary, or exceeds the number of experts.
            Each problem names the first tensor concerned.
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
            experts.setdefault(weight.vllm, {}).setdefault(weight.expert, []).append(
                weight
            )
    kinds = {local: _kind(members) for local, members in fused.items()}
    layouts: dict[int, Layout] = {}
    quantised = (
        {}
        if quantization is None
        else dict.fromkeys(quantised_tensors(weights), quantization)
    )

    def layout_of(rank: int) -> Layout:
        tp_rank = rank % tp_size
        # Replicas hold the same, and share one object per tensor-parallel rank.
        if tp_rank not in layouts:
            builder = LayoutBuilder()
            # Layers of one kind are filled alike, so each kind is computed once.
            fills: dict[_Kind, Fill] = {}
            for local, members in fused.items():
                if kinds[local] not in fills:
                    fills[kinds[local]] = _fill(members, spec, tp_size, tp_rank)
                builder.add(local, members, fills[kinds[local]])
            if spec.moe and expert_parallel:
                # vLLM applies round-robin placement only to models with expert groups.
                placement = expert_placement if spec.moe.num_groups > 1 else "linear"
                _add_experts(
                    builder,
                    experts,
                    experts_of(spec.moe.num_experts, tp_size, tp_rank, placement),
                    1,
                    0,
                )
                _add_stacked(
                    builder,
                    stacked,
                    experts_of(spec.moe.num_experts, tp_size, tp_rank, "linear"),
                    1,
                    0,
                )
            elif spec.moe:
                _add_experts(
                    builder, experts, range(spec.moe.num_experts), tp_size, tp_rank
                )
                _add_stacked(
                    builder, stacked, range(spec.moe.num_experts), tp_size, tp_rank
                )
            layouts[tp_rank] = builder.build(quantised)
        return layouts[tp_rank]

    return layout_of


def experts_of(
    num_experts: int, ep_size: int, ep_rank: int, placement: Placement
) -> range:
    """Return the experts of one expert-parallel rank, in the order in which it holds them."""
    if placement == "round_robin":
        return range(ep_rank, num_experts, ep_size)
    fewest, more = divmod(num_experts, ep_size)
    start = ep_rank * fewest + min(ep_rank, more)
    return range(start, start + fewest + (ep_rank < more))


def _add_experts(
    builder: LayoutBuilder,
    experts: dict[str, dict[int, list[Weight]]],
    held: range,
    tp_size: int,
    tp_rank: int,
) -> None:
    """Add `w13_weight` and `w2_weight` of all layers."""
    fills: dict[_Kind, Fill] = {}
    for local, by_expert in experts.items():
        kind = _kind(by_expert[held[0]])
        if kind not in fills:
            fills[kind] = _fill_experts(by_expert[held[0]], len(held), tp_size, tp_rank)
        builder.add(
            local,
            [weight for expert in held for weight in by_expert[expert]],
            fills[kind],
        )


def _fill_experts(
    weights: Sequence[Weight], num_experts: int, tp_size: int, tp_rank: int
) -> Fill:
    """Return the contents of a tensor of experts along axis 0, with the weights of each stacked along axis 1."""
    stacked = stack(
        [
            (number, even_part(weight, tp_size, tp_rank))
            for number, weight in enumerate(weights)
        ]
    )
    parts = tuple(
        (
            # Weights are numbered expert by expert.
            expert * len(weights) + number,
            box,
            Box((expert, *inner.start), (expert + 1, *inner.stop)),
        )
        for expert in range(num_experts)
        for number, box, inner in stacked.parts
    )
    return Fill(parts, (num_experts, *stacked.shape))


def _add_stacked(
    builder: LayoutBuilder,
    stacked: dict[str, Weight],
    held: range,
    tp_size: int,
    tp_rank: int,
) -> None:
    """Add the weights of all layers that files store as one array of all experts."""
    for local, weight in stacked.items():
        experts = [stacked_part(weight, expert, tp_size, tp_rank) for expert in held]
        shape, view = experts[0].shape, experts[0].view
        # The ranks' outputs are summed, so only one rank may add the bias.
        has_none = weight.split is Split.STACKED_WHOLE and tp_rank > 0
        parts = tuple(
            (0, box, Box((index, *inner.start), (index + 1, *inner.stop)))
            for index, part in enumerate(experts)
            for box, inner in part.placed()
            if not has_none
        )
        # The engine's array has the experts in front.
        view = None if view is None else view.behind(1)
        builder.add(local, [weight], Fill(parts, (len(held), *shape), view))


def _kind(weights: Sequence[Weight]) -> _Kind:
    """Return what decides how a parameter is filled. It is equal in all layers of a kind."""
    return tuple((weight.split, weight.shape) for weight in weights)


def _fill(
    weights: Sequence[Weight], spec: ModelSpec, tp_size: int, tp_rank: int
) -> Fill:
    """Return the contents of a parameter that is not a routed expert's."""
    first = weights[0]
    if first.split is Split.VOCAB:
        run = _padded(first) // tp_size
        low = min(tp_rank * run, first.shape[0])
        return stack(
            [(0, cut(first.shape, 0, low, min(low + run, first.shape[0])))], run
        )
    if first.split is Split.FLATTENED:
        return flatten(first.shape)
    if first.split in (Split.FUSED_QKV, Split.FUSED_GATE_UP):
        return stack([*_fused_rows(first, spec, tp_size, tp_rank)])
    if first.split is Split.NET_QKV:
        return stack([*_delta_net_rows(weights, spec, tp_size, tp_rank)])
    if first.split is Split.Q and spec.architecture in PAIRS_APART:
        return stack([*_halved_heads(weights, spec, tp_size, tp_rank)])
    if first.split is Split.FUSED_QKV_IN_VLLM:
        return stack([*_thirds(first, tp_size, tp_rank)])
    if first.split in MAMBA_PARTS:
        return stack([*_mamba_rows(first, spec, tp_size, tp_rank)])
    return stack(
        [
            (number, _part(weight, spec, tp_size, tp_rank))
            for number, weight in enumerate(weights)
        ]
    )


def _fused_rows(
    weight: Weight, spec: ModelSpec, tp_size: int, tp_rank: int
) -> Iterator[tuple[int, Box]]:
    """Yield the rows of one rank out of each part of a weight that is fused in the files."""
    for part in fused_parts(
        [weight], spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    ):
        run, place = part.rows // tp_size, tp_rank
        # A key-value head that several ranks share is not divided. Adjacent ranks hold
        # the same one.
        if part.is_shared and shares_kv_heads(spec, tp_size):
            run, place = spec.head_dim, tp_rank // (tp_size // spec.num_kv_heads)
        first = part.start + place * run
        yield 0, cut(weight.shape, 0, first, first + run)


def _delta_net_rows(
    weights: Sequence[Weight], spec: ModelSpec, tp_size: int, tp_rank: int
) -> Iterator[tuple[int, Box]]:
    """Yield the rows of one rank out of each part of weights of a gated delta net."""
    assert spec.delta_net is not None
    for part in delta_net_parts(weights, spec.delta_net.key_width):
        run = part.rows // tp_size
        first = part.start + tp_rank * run
        shape = weights[part.weight].shape
        yield part.weight, cut(shape, 0, first, first + run)


def _halved_heads(
    weights: Sequence[Weight], spec: ModelSpec, tp_size: int, tp_rank: int
) -> Iterator[tuple[int, Box]]:
    """Yield the rows of q, k and v of one rank, where q and k heads have the first rows of all pairs in front."""
    for number, weight in enumerate(weights):
        part = _part(weight, spec, tp_size, tp_rank)
        if weight.split is Split.V:
            yield number, part
            continue
        first, last = part.start[0], part.stop[0]
        for head in range(first, last, spec.head_dim):
            for row in (0, 1):
                for start in range(head + row, head + spec.head_dim, 2):
                    yield number, cut(weight.shape, 0, start, start + 1)


def _thirds(weight: Weight, tp_size: int, tp_rank: int) -> Iterator[tuple[int, Box]]:
    """Yield the rows of one rank out of each of q, k and v, which are equally large in a vision tower."""
    part = weight.shape[0] // 3
    run, place = (part, 0) if part % tp_size else (part // tp_size, tp_rank)
    for first in range(place * run, weight.shape[0], part):
        yield 0, cut(weight.shape, 0, first, first + run)


def _mamba_rows(
    weight: Weight, spec: ModelSpec, tp_size: int, tp_rank: int
) -> Iterator[tuple[int, Box]]:
    """Yield the rows of one rank out of each part of a Mamba-2 layer's array. All ranks hold a single group."""
    assert spec.mamba is not None
    for part in mamba_rows(weight.split, spec.mamba):
        is_copied = part.name in ("B", "C") and spec.mamba.num_groups == 1
        run, place = (part.rows, 0) if is_copied else (part.rows // tp_size, tp_rank)
        first = part.start + place * run
        yield 0, cut(weight.shape, 0, first, first + run)


def _padded(weight: Weight) -> int:
    """Return the rows of the padded vocabulary."""
    return -(-weight.shape[0] // VOCAB_PADDING) * VOCAB_PADDING


def _part(weight: Weight, spec: ModelSpec, tp_size: int, tp_rank: int) -> Box:
    """Return the box of a weight on one rank."""
    if weight.split in (Split.K, Split.V) and shares_kv_heads(spec, tp_size):
        head = tp_rank // (tp_size // spec.num_kv_heads)
        run = weight.shape[0] // spec.num_kv_heads
        return cut(weight.shape, 0, head * run, (head + 1) * run)
    if weight.split is Split.HEADS_IN_VLLM:
        # Ranks that share a key head have the same part of the norm over keys.
        num_parts = min(weight.shape[0] // spec.head_dim, tp_size)
        run = weight.shape[0] // num_parts
        part = tp_rank * num_parts // tp_size
        return cut(weight.shape, 0, part * run, (part + 1) * run)
    if weight.split in (Split.ROWS_IN_VLLM, Split.COLUMNS_IN_VLLM):
        axis = int(weight.split is Split.COLUMNS_IN_VLLM)
        if weight.shape[axis] % tp_size:
            return whole(weight.shape)
        run = weight.shape[axis] // tp_size
        return cut(weight.shape, axis, tp_rank * run, (tp_rank + 1) * run)
    return even_part(weight, tp_size, tp_rank)


def _problems(
    weights: Sequence[Weight], spec: ModelSpec, tp_size: int, expert_parallel: bool
) -> Iterator[str]:
    """Yield what `rollout.tp` does not divide."""
    misfitting = misfits(
        spec, tp=tp_size, etp=1 if expert_parallel else tp_size, engine=True
    )
    yield from (f"rollout.tp={tp_size} {misfit.reason}" for misfit in misfitting)
    expert = next(
        (
            weight
            for weight in weights
            if weight.expert is not None or weight.is_stacked
        ),
        None,
    )
    if expert and spec.moe and expert_parallel and spec.moe.num_experts < tp_size:
        yield (
            f"{expert.name}: the layer's {spec.moe.num_experts} experts are fewer than the rollout.tp {tp_size} "
            "ranks that divide them. Choose a smaller rollout.tp, or no expert parallelism."
        )
    vocabulary = next(
        (weight for weight in weights if weight.split is Split.VOCAB), None
    )
    if vocabulary and _padded(vocabulary) % tp_size:
        padded = _padded(vocabulary)
        yield (
            f"{vocabulary.name}: vLLM pads the vocabulary of {vocabulary.shape[0]} to {padded}, which rollout.tp "
            f"{tp_size} does not divide. Choose a rollout.tp that divides {padded}."
        )
