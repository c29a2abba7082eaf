"""Megatron's distributed checkpoint as a layout: global arrays under `sharded_state_dict` keys, whatever the grid.

Rules (megatron-core 0.16, `transformer/transformer_block.py`, `transformer/mlp.py`, `transformer/moe/experts.py`):
- a key's array is the parameter of a model without any parallelism, the vocabulary padded;
- layers of one kind are stacked along a first axis, `decoder.layers.REST` [layers, ...]; where they differ (dense
  and routed ones), each has a key of its own, `decoder.layers.N.REST`;
- routed experts are stacked along an axis behind that one: `mlp.experts.experts.REST` [layers, experts, ...];
- the local layer spec stores the norms of plain attention and MLP under Transformer Engine's fused names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from megaverl.distributed.grid import GridShape
from megaverl.sharding.boxes import Box
from megaverl.sharding.layout import Layout, Piece
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import Weight

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
# `sharded_state_dict_keys_map` of the local layer spec (models/gpt/gpt_layer_specs.py)
LOCAL_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


class CheckpointKey(NamedTuple):
    """A parameter's key, and its index along the axes that the key's array has in front."""

    key: str
    front: tuple[int, ...]


def stores_each_layer(spec: ModelSpec) -> bool:
    """Whether runs of this model store every layer under a key of its own."""
    return spec.moe is not None


def checkpoint_layout(
    weights: Sequence[Weight],
    spec: ModelSpec,
    *,
    padded_vocab_size: int,
    prefix: str = "",
    present: Collection[str] | None = None,
    transformer_engine: bool = True,
) -> Layout:
    """Where every weight lies in a distributed checkpoint; local names are keys, local shapes the keys' arrays.

    Args:
        padded_vocab_size: rows of the embedding's array.
        prefix: in front of every key, such as a role's `actor.`.
        present: the keys of an existing checkpoint, to find out under which of the possible names it stores a
            parameter. None: the names that a run writes.
        transformer_engine: without `present`: names of Transformer Engine's layer spec, else of the local one.
    """
    single = megatron_layouts(weights, spec, GridShape(), padded_vocab_size=padded_vocab_size)(0)
    with_engine = {weight.megatron: weight.transformer_engine or weight.megatron for weight in weights}
    counts = spec.num_layers, spec.moe.num_experts if spec.moe else 0

    def place_of(local: str) -> CheckpointKey:
        candidates = [
            place._replace(key=prefix + place.key)
            for place in _candidates(local, spec, with_engine, transformer_engine=transformer_engine)
        ]
        if present is None:
            return candidates[0]
        return next((place for place in candidates if place.key in present), candidates[0])

    places = {local: place_of(local) for local in single.local_shapes}
    shapes = {place.key: (*_front(place, counts), *single.local_shapes[local]) for local, place in places.items()}
    seen = {local: places[local].key for local in single.local_shapes}
    views = {}
    for local, (name, view) in single.views.items():
        behind = view.behind(len(places[name].front))
        seen[local] = f"{places[name].key}.{behind}"
        views[seen[local]] = (places[name].key, behind)
    pieces = tuple(
        Piece(tensor, box, seen[local], _behind(places[single.stored_in(local)].front, local_box))
        for tensor, box, local, local_box in single.pieces
    )
    return Layout(pieces, shapes, single.global_shapes, views=views)


def _candidates(
    local: str, spec: ModelSpec, with_engine: dict[str, str], *, transformer_engine: bool
) -> Iterator[CheckpointKey]:
    """The places under which a parameter of the local layer spec may be stored, the likeliest first."""
    found = LAYER.fullmatch(local)
    if found is None:
        yield CheckpointKey(local, ())
        return
    layer, name = int(found[1]), found[2]
    index: tuple[int, ...] = ()
    expert = LOCAL_EXPERT.fullmatch(name)
    if expert:
        names = [f"mlp.experts.experts.{expert[2]}"]
        index = (int(expert[1]),)
    else:
        local_name = name if spec.mla else LOCAL_NAMES.get(name, name)
        names = [with_engine.get(name, name), local_name, name]
        if not transformer_engine:
            names = names[1:]
    stacked = [CheckpointKey(f"decoder.layers.{each}", (layer, *index)) for each in names]
    separate = [CheckpointKey(f"decoder.layers.{layer}.{each}", index) for each in names]
    yield from separate + stacked if stores_each_layer(spec) else stacked + separate


def _front(place: CheckpointKey, counts: tuple[int, int]) -> tuple[int, ...]:
    """The sizes of the axes in front: layers, experts."""
    num_layers, num_experts = counts
    is_expert = ".experts.experts." in place.key
    sizes = {(1, False): (num_layers,), (1, True): (num_experts,), (2, True): (num_layers, num_experts)}
    return sizes.get((len(place.front), is_expert), ())


def _behind(index: tuple[int, ...], box: Box) -> Box:
    return Box((*index, *box.start), (*(i + 1 for i in index), *box.stop))
