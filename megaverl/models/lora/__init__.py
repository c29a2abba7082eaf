"""Low-rank adapters (LoRA, arXiv 2106.09685): which weights have one, and where its two factors lie.

A weight W [rows, columns] becomes W + alpha / rank * B A with A [rank, columns] and B [rows, rank]. Both factors are
global arrays under the names that the `peft` library gives them, so whatever moves, stores or converts weights does
the same for adapters. A rank that holds a box of W needs the box's rows of B and its columns of A, whatever the
engine: the layout of the factors follows from that of the weights.

Names and the choice of targets follow peft 0.21 (`tuners/tuners_utils.py`, `check_target_module_exists` and
`_maybe_include_all_linear_layers`; `utils/save_and_load.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from megaverl.errors import ModelError
from megaverl.sharding.boxes import Box
from megaverl.sharding.layout import Layout, Piece, join_layouts
from megaverl.sharding.weight import Split, Weight

ALL_LINEAR = "all-linear"
PEFT_PREFIX = "base_model.model."
SUFFIX = ".weight"
ADAPTER = "adapter"  # the module's name below its layer


class LowRank(NamedTuple):
    """The adapter of one weight.

    Attributes:
        weight: the weight, a matrix.
        rank: of its factors A [rank, columns] and B [rows, rank], whose names are `a` and `b`.
    """

    weight: Weight
    rank: int

    @property
    def module(self) -> str:
        """The Hugging Face module that the weight belongs to."""
        return self.weight.name.removesuffix(SUFFIX)

    @property
    def a(self) -> str:
        return f"{PEFT_PREFIX}{self.module}.lora_A.weight"

    @property
    def b(self) -> str:
        return f"{PEFT_PREFIX}{self.module}.lora_B.weight"

    @property
    def projection(self) -> str:
        """The last part of the module's name, such as `q_proj`."""
        return self.module.rpartition(".")[2]

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Factor -> its global shape."""
        rows, columns = self.weight.shape
        return {self.a: (self.rank, columns), self.b: (rows, self.rank)}


def low_ranks(weights: Iterable[Weight], targets: str | Sequence[str], rank: int, key: str) -> dict[str, LowRank]:
    """The adapters that `targets` ask for, by the name of the weight.

    Args:
        targets: peft's `target_modules`: names of modules or their ends (`q_proj`), or one string: `all-linear`
            (every linear layer but the output layer), else a regular expression for whole names. In a model with
            routed experts only attention can have adapters: peft (0.21, `utils/transformers_weight_conversion.py`)
            takes gate_proj, up_proj and down_proj there for the experts', also where a shared expert is meant.
        key: the setting that messages name.

    Raises:
        ModelError: targets that name nothing here, or what can have no adapter; with what can.
    """
    weights = list(weights)
    routed = any(weight.expert is not None or weight.is_stacked for weight in weights)
    possible = {weight.name.removesuffix(SUFFIX): weight for weight in weights if _is_linear(weight, routed)}
    matches = _matcher(targets)
    chosen = [weight for module, weight in possible.items() if matches(module)]
    names = sorted({module.rpartition(".")[2] for module in possible})
    single = [] if isinstance(targets, str) else targets
    unknown = [target for target in single if not any(map(_matcher([target]), possible))]
    if unknown or not chosen:
        wrong = ", ".join(unknown) or str(targets)
        raise ModelError(
            f"{key}.targets: {wrong}: no linear layer of this model that can have an adapter is called so. "
            f"Choose from {', '.join(names)}, or {ALL_LINEAR}. (Embeddings and the output layer have none, nor has "
            "anything but attention in a model with routed experts.)"
        )
    widest = min(min(weight.shape) for weight in chosen)
    if rank > widest:
        raise ModelError(f"{key}.rank={rank} is more than the smallest side of a target, {widest}: lower it.")
    return {weight.name: LowRank(weight, rank) for weight in chosen}


def _is_linear(weight: Weight, routed: bool) -> bool:
    """A matrix of a decoder layer; only attention's in a model with routed experts."""
    in_layer = isinstance(weight.stage, int) and len(weight.shape) == 2
    return in_layer and not (routed and ".mlp." in weight.name or ".block_sparse_moe." in weight.name)


def _matcher(targets: str | Sequence[str]) -> Callable[[str], bool]:
    if targets == ALL_LINEAR:
        return lambda module: True
    if isinstance(targets, str):
        pattern = re.compile(targets)
        return lambda module: pattern.fullmatch(module) is not None
    return lambda module: any(module == target or module.endswith("." + target) for target in targets)


def factor_weights(adapters: Mapping[str, LowRank]) -> list[Weight]:
    """The factors as global arrays, in the order of the weights."""
    return [
        Weight(name, shape, Split.REPLICATED, adapter.weight.stage, "", None)
        for adapter in adapters.values()
        for name, shape in adapter.shapes.items()
    ]


def held_span(pieces: Sequence[Piece]) -> Box:
    """The one box that these pieces of a tensor fill together.

    Raises:
        ModelError: they do not lie side by side.
    """
    span = _around(pieces)
    if span.numel != sum(piece.box.numel for piece in pieces):
        raise ModelError(f"{pieces[0].tensor}: a rank holds parts of it that are not neighbours: no adapter fits.")
    return span


def _around(pieces: Sequence[Piece]) -> Box:
    """The smallest box that has all of these pieces' in it."""
    start = tuple(map(min, zip(*(piece.box.start for piece in pieces), strict=True)))
    return Box(start, tuple(map(max, zip(*(piece.box.stop for piece in pieces), strict=True))))


def adapter_names(low_rank: LowRank, local: str) -> tuple[str, str]:
    """Local names of A and B beside the Megatron parameter `local`, as `adapters.py` registers them."""
    layer = local.removesuffix(SUFFIX)
    return (
        f"{layer}.{ADAPTER}.lora_A.{low_rank.projection}",
        f"{layer}.{ADAPTER}.lora_B.{low_rank.projection}",
    )


Layouts = Callable[[int], Layout]
Naming = Callable[[LowRank, str], tuple[str, str]]


def factor_layout(layout: Layout, adapters: Mapping[str, LowRank], local_names: Naming) -> Layout:
    """Where the factors lie that a rank needs which holds `layout` of the weights.

    Parts that an engine holds need not be neighbours, and may be held twice: where vLLM computes from a weight that it
    also copies.

    Args:
        local_names: (adapter, the weight's local tensor) -> names of the local tensors of A and B.
    """
    pieces: list[Piece] = []
    local_shapes: dict[str, tuple[int, ...]] = {}
    global_shapes: dict[str, tuple[int, ...]] = {}
    for name, held in layout.by_tensor.items():
        adapter = adapters.get(name)
        if adapter is None:
            continue
        span = _around(held)
        boxes = (
            Box((0, span.start[1]), (adapter.rank, span.stop[1])),
            Box((span.start[0], 0), (span.stop[0], adapter.rank)),
        )
        for factor, local, box in zip((adapter.a, adapter.b), local_names(adapter, held[0].local), boxes, strict=True):
            pieces.append(Piece(factor, box, local, Box((0, 0), box.shape)))
            local_shapes[local] = box.shape
            global_shapes[factor] = adapter.shapes[factor]
    return Layout(tuple(pieces), local_shapes, global_shapes)


def follow(layouts: Callable[[int], Layout], change: Callable[[Layout], Layout]) -> Callable[[int], Layout]:
    """`rank -> change(layouts(rank))`, one object for ranks that share one, as plans like it."""
    made: dict[int, tuple[Layout, Layout]] = {}

    def layout_of(rank: int) -> Layout:
        layout = layouts(rank)
        if id(layout) not in made:
            made[id(layout)] = layout, change(layout)  # kept: an id is only good while its object lives
        return made[id(layout)][1]

    return layout_of


def names_of_factors(adapter: LowRank, local: str) -> tuple[str, str]:
    """At a destination the factors have their global names: no parameter of an engine is called so."""
    return adapter.a, adapter.b


def with_factors(layouts: Layouts, adapters: Mapping[str, LowRank], local_names: Naming = names_of_factors) -> Layouts:
    """Layouts of weights, each with the factors that its rank needs."""
    return follow(layouts, lambda layout: join_layouts(layout, factor_layout(layout, adapters, local_names)))


def written_to(layout: Layout, adapters: Mapping[str, LowRank]) -> frozenset[str]:
    """The local tensors of a destination that adapters are merged into: none may be an alias of the source's."""
    return frozenset(layout.stored_in(piece.local) for piece in layout.pieces if piece.tensor in adapters)
