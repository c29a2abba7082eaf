"""Choice of the weights that get a low-rank adapter (LoRA, arXiv 2106.09685), and the layout of its two factors.

A weight W [rows, columns] becomes W + alpha / rank * B A with A [rank, columns] and B
[rows, rank]. Both factors are global arrays under the names of the `peft` library, so
code that moves, stores or converts weights handles adapters too. A rank that holds a
box of W needs the box's rows of B and its columns of A. The layout of the factors
therefore follows from that of the weights, in any engine.

Names and the choice of targets follow peft 0.21 (`tuners/tuners_utils.py`,
`check_target_module_exists` and `_maybe_include_all_linear_layers`;
`utils/save_and_load.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from megaverl.errors import ModelError
from megaverl.sharding.boxes import Box, whole
from megaverl.sharding.layout import Layout, Piece, join_layouts
from megaverl.sharding.weight import Split, Weight

ALL_LINEAR = "all-linear"
PEFT_PREFIX = "base_model.model."
SUFFIX = ".weight"
# Name of the adapter's module below its layer.
ADAPTER = "adapter"


class LowRank(NamedTuple):
    """Adapter of one weight.

    Attributes:
        weight: the adapted weight, a matrix.
        rank: rank of the factors A [rank, columns] and B [rows, rank].
        module: transformers' module that the weight belongs to, after which peft names the factors.
        fused: names of all weights in the same layer of Megatron, with an adapter or without.
    """

    weight: Weight
    rank: int
    module: str
    fused: tuple[str, ...]

    @property
    def a(self) -> str:
        """Global name of the factor A."""
        return f"{PEFT_PREFIX}{self.module}.lora_A.weight"

    @property
    def b(self) -> str:
        """Global name of the factor B."""
        return f"{PEFT_PREFIX}{self.module}.lora_B.weight"

    @property
    def projection(self) -> str:
        """Last part of the module's name, such as `q_proj`."""
        return self.module.rpartition(".")[2]

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Global shape of each factor, by its name."""
        rows, columns = self.weight.shape
        return {self.a: (self.rank, columns), self.b: (rows, self.rank)}


def low_ranks(
    weights: Iterable[Weight], targets: str | Sequence[str], rank: int, key: str
) -> dict[str, LowRank]:
    """Return the adapters that `targets` select, by the name of the weight.

    Args:
        targets: peft's `target_modules`: names of modules or their last parts (`q_proj`), or one string: `all-linear`
            (every linear layer but the output layer), or a regular expression for whole names. In a model with routed
            experts only attention and layers with a state can have adapters: peft (0.21,
            `utils/transformers_weight_conversion.py`) applies gate_proj, up_proj and down_proj to the routed experts,
            even if a shared expert is meant.
        key: setting to name in messages.

    Raises:
        ModelError: a target matches no layer that can have an adapter. The message lists those that can.
    """
    # peft treats attention and MLP alike, but not experts, so that those are left out.
    weights = list(weights)
    routed = any(weight.expert is not None or weight.is_stacked for weight in weights)
    prefixes = _module_prefixes(weights)
    possible = {
        _renamed(weight.name.removesuffix(SUFFIX), prefixes): weight
        for weight in weights
        if _is_linear(weight, routed)
    }
    matches = _matcher(targets)
    chosen = {module: weight for module, weight in possible.items() if matches(module)}
    names = sorted({module.rpartition(".")[2] for module in possible})
    single = [] if isinstance(targets, str) else targets
    # Each single target must select something, else it is a spelling mistake.
    unknown = [
        target for target in single if not any(map(_matcher([target]), possible))
    ]
    if unknown or not chosen:
        wrong = ", ".join(unknown) or str(targets)
        raise ModelError(
            f"{key}.targets: {wrong}: this model has no linear layer of that name that can have an adapter. "
            f"Choose from {', '.join(names)}, or {ALL_LINEAR}. (Embeddings and the output layer cannot have adapters; "
            "in a model with routed experts only attention and layers with a state can.)"
        )
    widest = min(min(weight.shape) for weight in chosen.values())
    if rank > widest:
        raise ModelError(
            f"{key}.rank={rank} is more than the smallest side of a target, {widest}: lower it."
        )
    by_layer: dict[tuple[object, str], list[str]] = {}
    for weight in weights:
        layer = by_layer.setdefault((weight.stage, weight.megatron), [])
        layer.append(weight.name)
    return {
        weight.name: LowRank(
            weight, rank, module, tuple(by_layer[weight.stage, weight.megatron])
        )
        for module, weight in chosen.items()
    }


def _module_prefixes(weights: Iterable[Weight]) -> dict[str, str]:
    """Return prefixes of names in files whose modules have other names in transformers (5.19)."""
    # Nemotron-H
    prefixes = {"backbone.": "model."}
    # Qwen2-VL and Qwen2.5-VL
    if any(weight.name.startswith("visual.") for weight in weights):
        prefixes["model."] = "model.language_model."
    return prefixes


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with the first prefix that it has replaced."""
    for prefix, replacement in prefixes.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


# Parts of names of weights in layers with routed experts, whose MLPs peft (0.21)
# interprets differently.
OF_EXPERTS = (
    ".mlp.",
    ".block_sparse_moe.",
    ".feed_forward.",
    ".mixer.gate.",
    ".mixer.experts.",
    ".mixer.shared_experts.",
    ".mixer.up_proj.",
    ".mixer.down_proj.",
)
# peft (0.21, `_check_lora_target_modules_mamba`) loads no adapter of these.
OF_MAMBA = (".mixer.out_proj.weight", ".mamba.out_proj.weight")


def _is_linear(weight: Weight, routed: bool) -> bool:
    """Return whether a weight can have an adapter: a decoder layer's matrix, and with routed experts attention's."""
    in_layer = isinstance(weight.stage, int) and len(weight.shape) == 2
    return (
        in_layer
        and not weight.name.endswith(OF_MAMBA)
        and not (routed and any(part in weight.name for part in OF_EXPERTS))
    )


def _matcher(targets: str | Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate for module names that `targets` select."""
    if targets == ALL_LINEAR:
        return lambda module: True
    if isinstance(targets, str):
        pattern = re.compile(targets)
        return lambda module: pattern.fullmatch(module) is not None
    return lambda module: any(
        module == target or module.endswith("." + target) for target in targets
    )


def factor_weights(adapters: Mapping[str, LowRank]) -> list[Weight]:
    """Return the factors as global arrays, in the order of the weights."""
    return [
        Weight(name, shape, Split.REPLICATED, adapter.weight.stage, "", None)
        for adapter in adapters.values()
        for name, shape in adapter.shapes.items()
    ]


class StackedRows(NamedTuple):
    """Rows of a weight that a rank holds. Its part of B has them in the order of the file, without gaps.

    Attributes:
        ranges: ranges of rows in ascending order, of which no two touch.
    """

    ranges: tuple[range, ...]

    @property
    def number(self) -> int:
        """Number of rows."""
        return sum(map(len, self.ranges))

    def position(self, row: int) -> int:
        """Return the row's number among those that the rank holds."""
        before = 0
        for held in self.ranges:
            if row in held:
                return before + row - held.start
            before += len(held)
        raise IndexError(row)


def held_rows(pieces: Iterable[Piece]) -> StackedRows:
    """Return the rows that the pieces of a weight cover, which may be apart and may overlap."""
    joined: list[range] = []
    for start, stop in sorted((p.box.start[0], p.box.stop[0]) for p in pieces):
        if joined and start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(stop, joined[-1].stop))
        else:
            joined.append(range(start, stop))
    return StackedRows(tuple(joined))


def held_columns(weight: Weight, pieces: Sequence[Piece]) -> range:
    """Return the smallest range around the columns of a weight's pieces: all columns if there are none."""
    if not pieces:
        return range(weight.shape[1])
    return range(
        min(piece.box.start[1] for piece in pieces),
        max(piece.box.stop[1] for piece in pieces),
    )


def adapter_names(low_rank: LowRank, local: str) -> tuple[str, str]:
    """Return the local names of A and B beside the Megatron parameter `local`, as registered in `adapters.py`."""
    layer = local.removesuffix(SUFFIX)
    return (
        f"{layer}.{ADAPTER}.lora_A.{low_rank.projection}",
        f"{layer}.{ADAPTER}.lora_B.{low_rank.projection}",
    )


Layouts = Callable[[int], Layout]


def parameter_beside(adapter: LowRank, layout: Layout) -> str | None:
    """Return the local parameter of Megatron that an adapter belongs to; None if this rank has no part of its layer.

    With fewer key-value heads than tensor-parallel ranks, a rank may have rows of other
    projections in it only.
    """
    for name in adapter.fused:
        if name in layout.by_tensor:
            return layout.by_tensor[name][0].local
    return None


def trained_factors(layout: Layout, adapters: Mapping[str, LowRank]) -> Layout:
    """Return the layout of the factors on a rank that trains them beside `layout` of Megatron's weights.

    A rank with a part of a layer has A of all the layer's projections, because
    tensor-parallel ranks compute A x together.

    Raises:
        ModelError: the parts of a weight on the rank have different columns.
    """
    held = []
    for name, adapter in adapters.items():
        local = parameter_beside(adapter, layout)
        if local is None:
            continue
        pieces = layout.by_tensor.get(name, [])
        rows, columns = held_rows(pieces), held_columns(adapter.weight, pieces)
        if rows.number * len(columns) != sum(piece.box.numel for piece in pieces):
            raise ModelError(
                f"{name}: a rank holds parts of it that are not whole rows: no adapter fits."
            )
        held.append(_HeldFactors(adapter, pieces, *adapter_names(adapter, local)))
    return _factor_layout(held)


def landed_factors(layout: Layout, adapters: Mapping[str, LowRank]) -> Layout:
    """Return the layout of the factors on a rank of an engine that merges them into `layout` of its weights.

    Their local names are the global ones, which no engine's parameter has.
    """
    return _factor_layout(
        _HeldFactors(adapter, pieces, adapter.a, adapter.b)
        for name, pieces in layout.by_tensor.items()
        if (adapter := adapters.get(name)) is not None
    )


class _HeldFactors(NamedTuple):
    """Factors of one adapter on a rank.

    Attributes:
        pieces: pieces of the weight on the rank; none if it has A alone.
        local_a, local_b: names of the local tensors.
    """

    adapter: LowRank
    pieces: Sequence[Piece]
    local_a: str
    local_b: str


def _factor_layout(held: Iterable[_HeldFactors]) -> Layout:
    """Return the layout of the columns of A and the rows of B that belong to the pieces of weights.

    Pieces may be apart, as in a projection that files hold fused with others. A piece
    may also be held twice, if vLLM computes from a weight that it copies as well.
    """
    pieces: list[Piece] = []
    local_shapes: dict[str, tuple[int, ...]] = {}
    global_shapes: dict[str, tuple[int, ...]] = {}
    for adapter, weight_pieces, local_a, local_b in held:
        rank = adapter.rank
        rows = held_rows(weight_pieces)
        columns = held_columns(adapter.weight, weight_pieces)
        local_shapes[local_a] = (rank, len(columns))
        global_shapes[adapter.a] = adapter.shapes[adapter.a]
        box_of_a = Box((0, columns.start), (rank, columns.stop))
        pieces.append(Piece(adapter.a, box_of_a, local_a, whole(local_shapes[local_a])))
        # An empty tensor is not listed.
        if rows.number:
            local_shapes[local_b] = (rows.number, rank)
            global_shapes[adapter.b] = adapter.shapes[adapter.b]
        for part in rows.ranges:
            first = rows.position(part.start)
            box_of_b = Box((part.start, 0), (part.stop, rank))
            local_box = Box((first, 0), (first + len(part), rank))
            pieces.append(Piece(adapter.b, box_of_b, local_b, local_box))
    return Layout(tuple(pieces), local_shapes, global_shapes)


def follow(
    layouts: Callable[[int], Layout], change: Callable[[Layout], Layout]
) -> Callable[[int], Layout]:
    """Return the function `rank -> change(layouts(rank))`.

    Ranks that share a layout object share the changed one too, which keeps plans small.
    """
    changed_layouts: dict[int, tuple[Layout, Layout]] = {}

    def layout_of(rank: int) -> Layout:
        layout = layouts(rank)
        if id(layout) not in changed_layouts:
            # Keep the layout as well: its id stays unique only while the object exists.
            changed_layouts[id(layout)] = layout, change(layout)
        return changed_layouts[id(layout)][1]

    return layout_of


def with_trained_factors(layouts: Layouts, adapters: Mapping[str, LowRank]) -> Layouts:
    """Return the layouts of a trainer's weights, each extended by the factors that its rank trains."""
    return follow(
        layouts, lambda layout: join_layouts(layout, trained_factors(layout, adapters))
    )


def with_landed_factors(layouts: Layouts, adapters: Mapping[str, LowRank]) -> Layouts:
    """Return the layouts of an engine's weights, each extended by the factors that its rank merges."""
    return follow(
        layouts, lambda layout: join_layouts(layout, landed_factors(layout, adapters))
    )


def written_to(layout: Layout, adapters: Mapping[str, LowRank]) -> frozenset[str]:
    """Return the local tensors of a destination into which adapters are merged.

    None of them may alias the source's memory.
    """
    return frozenset(
        layout.stored_in(piece.local)
        for piece in layout.pieces
        if piece.tensor in adapters
    )
