"""Layouts of Megatron-core's GPTModel on any grid, and of its distributed checkpoints.

Data-parallel replicas are alike. A distributed checkpoint holds global arrays under
`sharded_state_dict` keys, which do not depend on the grid.

Rules of a rank (megatron-core 0.16, `models/gpt/gpt_model.py`,
`transformer/attention.py`, `transformer/mlp.py`,
`transformer/multi_latent_attention.py`, `transformer/moe/experts.py`):
- `linear_qkv` is the array [q heads of group 0, k 0, v 0, q heads of group 1, ...] split into equal runs of rows, even
  if there are fewer groups than ranks. With output gates it is [q heads of group 0, their gates, k 0, v 0, ...].
- `linear_fc1` is [this rank's gate rows; this rank's up rows].
- The vocabulary is padded at its end and split into equal runs of rows.
- Layers are numbered from zero on every stage, and in every chunk of a virtual pipeline.
- The last stage holds a second copy of tied embeddings if it is not the first stage as well.
- Expert-parallel ranks hold adjacent experts, numbered from zero on each rank, split by the expert-tensor size. Router
  and shared experts are split like the rest of the layer.
- gpt-oss's `linear_fc1` alternates gate and up rows, as its files alternate columns. A hook after it moves gates to the
  front (`models/build.py`), and experts are not split.
- A gated delta net's `in_proj_qkvz` is [q, k, v and z rows of key head 0, q, k, v and z rows of key head 1, ...], split
  into equal runs of rows. So are `in_proj_ba` and `conv1d` (`models/gated_delta_net.py`).
- `in_proj` and `conv1d` of a Mamba-2 layer are [this rank's gate rows; its rows of x, B, C and time steps], and
  [x; B; C]. Ranks that share a group divide its rows of B and C (`models/mamba.py`).
- The down-projections of latent attention are whole on every rank, in Transformer Engine's layer spec and in megaverl's
  local one (`models/attention.py`). megatron-core's own local spec would split them.

Rules of a checkpoint (megatron-core 0.16, `transformer/transformer_block.py`,
`transformer/mlp.py`, `transformer/moe/experts.py`):
- A key's array is the parameter of a model without parallelism, with the vocabulary padded.
- Layers of one kind are stacked along a first axis, `decoder.layers.REST` [layers, ...]. If layers differ (dense and
  routed), each has its own key, `decoder.layers.N.REST`.
- Routed experts are stacked along the next axis: `mlp.experts.experts.REST` [layers, experts, ...].
- The local layer spec stores the norms of plain attention and MLP under Transformer Engine's fused names, but not the
  norm in front of a gated delta net.
- `in_proj` and `conv1d` of a Mamba-2 layer have a key for each part (`.z`, `.x`, `.B`, `.C`, `.dt`), as in
  megatron-core's own layer (`ssm/mamba_mixer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from megaverl.distributed.grid import GridShape
from megaverl.errors import GridError
from megaverl.sharding.boxes import Box, cut
from megaverl.sharding.layout import (
    Fill,
    Layout,
    LayoutBuilder,
    Piece,
    flatten,
    join_layouts,
    stack,
)
from megaverl.sharding.model_spec import ModelSpec, misfits
from megaverl.sharding.weight import (
    MAMBA_PARTS,
    MambaRows,
    RowRange,
    Split,
    Weight,
    delta_net_parts,
    even_part,
    fused_parts,
    mamba_rows,
    stacked_part,
)


def megatron_layouts(
    weights: Sequence[Weight],
    spec: ModelSpec,
    shape: GridShape,
    *,
    padded_vocab_size: int,
    transformer_engine: bool = False,
    layer_split: Sequence[int] | None = None,
) -> Callable[[int], Layout]:
    """Return the function from rank to layout for a whole grid. Ranks that hold the same share one object.

    Local names have the prefix `chunk{v}.` if a rank holds several chunks.

    Args:
        weights: the model's global arrays, from `megaverl.models.architectures.weights_of`.
        spec: numbers of heads, groups, layers and experts.
        shape: the grid. Data-parallel and context-parallel replicas hold the same.
        padded_vocab_size: rows of the padded vocabulary over all tensor-parallel ranks.
        transformer_engine: use the names of Transformer Engine's layer spec (experts: TEGroupedMLP) instead of the
            local one's (SequentialMLP).
        layer_split: decoder layers of every stage in model order (with virtual stages: chunk by chunk, and in each
            chunk stage by stage). None: an even split.

    Raises:
        GridError: the grid does not divide layers, heads, rows, experts or the padded vocabulary; lists all problems.
    """
    model = _Model(
        weights, spec, shape, padded_vocab_size, transformer_engine, layer_split
    )
    by_rank: dict[int, Layout] = {}
    by_place: dict[tuple[int, ...], Layout] = {}
    dense: dict[tuple[int, int], Layout] = {}

    def layout_of(rank: int) -> Layout:
        if rank not in by_rank:
            at = shape.coords(rank)
            # Data-parallel and context-parallel coordinates are left out, because these
            # replicas hold the same.
            place = (at.pp, at.tp, at.ep, at.etp) if spec.moe else (at.pp, at.tp)
            if place not in by_place:
                # All expert-parallel ranks of a stage share the dense part.
                if (at.pp, at.tp) not in dense:
                    dense[at.pp, at.tp] = model.dense(at.pp, at.tp)
                layout = dense[at.pp, at.tp]
                if spec.moe:
                    layout = join_layouts(layout, model.experts(at.pp, at.ep, at.etp))
                by_place[place] = layout
            by_rank[rank] = by_place[place]
        return by_rank[rank]

    return layout_of


class _Fused(NamedTuple):
    """Weights that one parameter holds.

    Attributes:
        name: name of the parameter; in a decoder layer, the part within the layer.
        weights: the weights, in the order in which they are fused.
        expert: number of the routed expert. None: no routed expert's.
    """

    name: str
    weights: tuple[Weight, ...]
    expert: int | None = None


class _Model:
    """Weights indexed by stage and expert, with the contents of each kind of parameter computed once."""

    def __init__(
        self,
        weights: Sequence[Weight],
        spec: ModelSpec,
        shape: GridShape,
        padded_vocab_size: int,
        transformer_engine: bool,
        layer_split: Sequence[int] | None,
    ) -> None:
        self._spec = spec
        self._shape = shape
        self._padded = padded_vocab_size
        self._starts = _stage_starts(spec, shape, layer_split)
        self._num_stages = len(self._starts) - 1
        problems = [*self._problems(weights)]
        if problems:
            raise GridError("\n".join(problems))
        fused: dict[
            int | Literal["first", "last", "tied"], dict[str, list[Weight]]
        ] = {}
        experts: dict[int, dict[int, dict[str, list[Weight]]]] = {}
        for weight in weights:
            name = weight.megatron
            if transformer_engine and weight.transformer_engine is not None:
                name = weight.transformer_engine
            # An array of all experts belongs to each of them.
            numbers = (
                range(spec.moe.num_experts)
                if weight.is_stacked and spec.moe
                else (weight.expert,)
            )
            for expert in numbers:
                if expert is None:
                    fused.setdefault(weight.stage, {}).setdefault(name, []).append(
                        weight
                    )
                elif isinstance(weight.stage, int):
                    layer = experts.setdefault(weight.stage, {})
                    layer.setdefault(expert, {}).setdefault(name, []).append(weight)
            # The last stage's copy of tied embeddings is a second parameter of the same
            # weight.
            if weight.megatron_tied is not None:
                fused.setdefault("tied", {}).setdefault(
                    weight.megatron_tied, []
                ).append(weight)
        self._fused = {stage: _as_fused(names) for stage, names in fused.items()}
        self._experts = {
            layer: {
                expert: _as_fused(names, expert) for expert, names in by_expert.items()
            }
            for layer, by_expert in experts.items()
        }
        self._fills: dict[tuple[object, ...], Fill] = {}
        self._expert_names: dict[int, list[tuple[str, int, int, int]]] = {}

    def dense(self, pp_rank: int, tp_rank: int) -> Layout:
        """Return the layout of everything except routed experts."""
        parameters: list[tuple[str, _Fused]] = []
        for stage, prefix in self._chunks(pp_rank):
            last = stage == self._num_stages - 1
            # Embeddings are on the first stage, the final norm and the head on the last
            # one.
            if stage == 0:
                parameters += [
                    (prefix + fused.name, fused)
                    for fused in self._fused.get("first", ())
                ]
            for layer, name in self._layers(stage, prefix):
                parameters += [
                    (name + fused.name, fused) for fused in self._fused.get(layer, ())
                ]
            if last:
                parameters += [
                    (prefix + fused.name, fused)
                    for fused in self._fused.get("last", ())
                ]
            # On a single stage the head reads the embedding itself, and there is no
            # second copy.
            if last and stage != 0:
                parameters += [
                    (prefix + fused.name, fused)
                    for fused in self._fused.get("tied", ())
                ]
        return self._layout(parameters, self._shape.tp, tp_rank)

    def experts(self, pp_rank: int, ep_rank: int, etp_rank: int) -> Layout:
        """Return the layout of the routed experts."""
        assert self._spec.moe is not None
        num_local = self._spec.moe.num_experts // self._shape.ep
        if pp_rank not in self._expert_names:
            # Names and their order are equal on all expert-parallel ranks of a stage.
            self._expert_names[pp_rank] = [
                (prefix + fused.name.format(local_expert), layer, local_expert, number)
                for stage, chunk in self._chunks(pp_rank)
                for layer, prefix in self._layers(stage, chunk)
                if layer in self._experts
                for local_expert in range(num_local)
                for number, fused in enumerate(self._experts[layer][local_expert])
            ]
        # Parameter names count experts from zero on every rank.
        first = ep_rank * num_local
        parameters = [
            (name, self._experts[layer][first + local_expert][number])
            for name, layer, local_expert, number in self._expert_names[pp_rank]
        ]
        return self._layout(parameters, self._shape.expert_tp, etp_rank)

    def _chunks(self, pp_rank: int) -> Iterator[tuple[int, str]]:
        """Yield each virtual stage of a rank, and the prefix of its parameters' names."""
        for chunk in range(self._shape.vpp or 1):
            # Virtual stage v of pipeline rank p is stage v * pp + p in the order of the
            # model.
            yield (
                chunk * self._shape.pp + pp_rank,
                f"chunk{chunk}." if (self._shape.vpp or 1) > 1 else "",
            )

    def _layers(self, stage: int, prefix: str) -> Iterator[tuple[int, str]]:
        """Yield each decoder layer of a stage, and the prefix of its parameters' names."""
        start = self._starts[stage]
        for layer in range(start, self._starts[stage + 1]):
            yield layer, f"{prefix}decoder.layers.{layer - start}."

    def _layout(
        self, parameters: Sequence[tuple[str, _Fused]], tp: int, tp_rank: int
    ) -> Layout:
        """Return the layout of named parameters on one tensor-parallel rank."""
        builder = LayoutBuilder()
        for local, (name, weights, expert) in parameters:
            stacked = expert if weights[0].is_stacked else None
            # Layers of one kind have equal names, shapes and splits, so the contents
            # are computed once per kind.
            key = (name, weights[0].shape, tp_rank, stacked)
            if key not in self._fills:
                self._fills[key] = self._fill(weights, tp, tp_rank, stacked)
            builder.add(local, weights, self._fills[key])
        return builder.build()

    def _fill(
        self, weights: Sequence[Weight], tp: int, tp_rank: int, stacked: int | None
    ) -> Fill:
        """Return a parameter's contents on one tensor-parallel rank, or expert `stacked` of an array of all experts."""
        first = weights[0]
        if stacked is not None:
            part = stacked_part(first, stacked, tp, tp_rank)
            parts = tuple((0, box, local) for box, local in part.placed())
            return Fill(parts, part.shape, part.view)
        if first.split is Split.VOCAB:
            # Padding is at the end. The last ranks may hold fewer rows of the
            # vocabulary, or none.
            rows = self._padded // tp
            low = min(tp_rank * rows, first.shape[0])
            return stack(
                [(0, cut(first.shape, 0, low, min(low + rows, first.shape[0])))], rows
            )
        if first.split is Split.FLATTENED:
            return flatten(first.shape)
        if first.split in (Split.Q, Split.GATED_Q, Split.FUSED_QKV):
            runs = _attention_runs(weights, self._spec)
            return stack([*_even_run(weights, runs, tp, tp_rank)])
        if first.split in (Split.NET_QKV, Split.BY_KEY_HEAD):
            runs = _delta_net_runs(weights, self._spec)
            return stack([*_even_run(weights, runs, tp, tp_rank)])
        if first.split is Split.FUSED_GATE_UP:
            return stack([*_halves(first, tp, tp_rank)])
        if first.split in MAMBA_PARTS:
            return stack([*_mamba_rows(first, self._spec, tp, tp_rank)])
        return stack(
            [
                (number, even_part(weight, tp, tp_rank))
                for number, weight in enumerate(weights)
            ]
        )

    def _problems(self, weights: Sequence[Weight]) -> Iterator[str]:
        """Yield what the grid does not divide."""
        spec = self._spec
        shape = self._shape
        tp = self._shape.tp
        yield from map(str, misfits(spec, tp=tp, etp=shape.expert_tp, ep=shape.ep))
        vocabulary = next(
            (weight for weight in weights if weight.split is Split.VOCAB), None
        )
        if vocabulary and (self._padded % tp or self._padded < vocabulary.shape[0]):
            yield (
                f"{vocabulary.name}: the padded vocabulary {self._padded} must be a multiple of tp {tp} "
                f"and at least {vocabulary.shape[0]}."
            )


def _as_fused(
    names: dict[str, list[Weight]], expert: int | None = None
) -> list[_Fused]:
    """Return the parameters for weights grouped by name."""
    return [_Fused(name, tuple(weights), expert) for name, weights in names.items()]


def _stage_starts(
    spec: ModelSpec, shape: GridShape, layer_split: Sequence[int] | None
) -> list[int]:
    """Return the first layer of every (virtual) stage in model order, followed by the number of layers."""
    num_stages = shape.pp * (shape.vpp or 1)
    if layer_split is None:
        if spec.num_layers % num_stages:
            raise GridError(
                f"{spec.num_layers} layers cannot be divided evenly over {num_stages} pipeline stages "
                f"(pp {shape.pp} x vpp {shape.vpp or 1}). Choose a pp that divides them, or an uneven split."
            )
        layer_split = [spec.num_layers // num_stages] * num_stages
    if len(layer_split) != num_stages or sum(layer_split) != spec.num_layers:
        raise GridError(
            f"layer split {list(layer_split)}: expected {num_stages} numbers (pp x vpp) "
            f"that sum to {spec.num_layers} layers."
        )
    return [0, *accumulate(layer_split)]


def _attention_runs(fused: Sequence[Weight], spec: ModelSpec) -> list[RowRange]:
    """Return the rows of [q of group 0, k 0, v 0, q of group 1, ...], with output gates behind each group's q."""
    parts = fused_parts(
        fused, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    )
    runs = []
    for group in range(spec.num_kv_heads):
        for part in parts:
            height = part.rows // spec.num_kv_heads
            first = part.start + group * height
            if fused[part.weight].split is not Split.GATED_Q:
                runs.append(RowRange(part.weight, first, height))
                continue
            # Files hold the query and the gate of one head after the other.
            runs += [
                RowRange(part.weight, row, spec.head_dim)
                for start in (first, first + spec.head_dim)
                for row in range(start, first + height, 2 * spec.head_dim)
            ]
    return runs


def _delta_net_runs(fused: Sequence[Weight], spec: ModelSpec) -> list[RowRange]:
    """Return the rows of [all parts of key head 0, all parts of key head 1, ...]."""
    assert spec.delta_net is not None
    heads = spec.delta_net.num_key_heads
    return [
        RowRange(
            part.weight,
            part.start + head * (part.rows // heads),
            part.rows // heads,
        )
        for head in range(heads)
        for part in delta_net_parts(fused, spec.delta_net.key_width)
    ]


def _even_run(
    fused: Sequence[Weight], runs: Sequence[RowRange], tp: int, tp_rank: int
) -> Iterator[tuple[int, Box]]:
    """Yield the rows of one of `tp` equal parts of an array that is made of `runs`.

    A part may start and end inside a run, such as a head.
    """
    size = sum(run.rows for run in runs) // tp
    low = tp_rank * size
    high = (tp_rank + 1) * size
    row = 0
    for run in runs:
        start = max(low, row) - row
        stop = min(high, row + run.rows) - row
        if start < stop:
            yield (
                run.weight,
                cut(fused[run.weight].shape, 0, run.start + start, run.start + stop),
            )
        row += run.rows


def _halves(weight: Weight, tp: int, tp_rank: int) -> Iterator[tuple[int, Box]]:
    """Yield the gate rows of one rank, and its up rows, out of [all gate rows; all up rows]."""
    for part in fused_parts([weight], 0, 0):
        run = part.rows // tp
        first = part.start + tp_rank * run
        yield 0, cut(weight.shape, 0, first, first + run)


def _mamba_rows(
    weight: Weight, spec: ModelSpec, tp: int, tp_rank: int
) -> Iterator[tuple[int, Box]]:
    """Yield the rows of one rank out of each part of a Mamba-2 layer's array."""
    assert spec.mamba is not None
    for part in mamba_rows(weight.split, spec.mamba):
        run = part.rows // tp
        first = part.start + tp_rank * run
        yield 0, cut(weight.shape, 0, first, first + run)


LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
# `sharded_state_dict_keys_map` of the local layer spec (models/gpt/gpt_layer_specs.py)
LOCAL_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "input_layernorm.bias": "self_attention.linear_qkv.layer_norm_bias",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "pre_mlp_layernorm.bias": "mlp.linear_fc1.layer_norm_bias",
}


class CheckpointKey(NamedTuple):
    """Key of a parameter in a checkpoint, and its index along the leading axes of the key's array."""

    key: str
    front: tuple[int, ...]


def stores_each_layer(spec: ModelSpec) -> bool:
    """Return whether runs of this model store every layer under a key of its own."""
    differ = bool(spec.layer_kinds) or spec.delta_net is not None
    return spec.moe is not None or differ


def checkpoint_layout(
    weights: Sequence[Weight],
    spec: ModelSpec,
    *,
    padded_vocab_size: int,
    prefix: str = "",
    present: Collection[str] | None = None,
    transformer_engine: bool = True,
) -> Layout:
    """Return the layout of all weights in a distributed checkpoint.

    Local names are keys, local shapes the keys' arrays.

    Args:
        padded_vocab_size: rows of the embedding's array.
        prefix: prefix of every key, such as a role's `actor.`.
        present: keys of an existing checkpoint, which decide between possible names of a parameter. None: the names
            that a run writes.
        transformer_engine: without `present`: names of Transformer Engine's layer spec, else of the local one.
    """
    # A model without parallelism has all parameters. A checkpoint stores each of them
    # under one key.
    single = megatron_layouts(
        weights, spec, GridShape(), padded_vocab_size=padded_vocab_size
    )(0)
    # Layers may differ in the name of one weight.
    with_engine: dict[tuple[int | str, str], str] = {
        (weight.stage, weight.megatron): weight.transformer_engine or weight.megatron
        for weight in weights
    }
    counts = spec.num_layers, spec.moe.num_experts if spec.moe else 0

    def place_of(local: str) -> CheckpointKey:
        candidates = [
            place._replace(key=prefix + place.key)
            for place in _candidates(
                local, spec, with_engine, transformer_engine=transformer_engine
            )
        ]
        if present is None:
            return candidates[0]
        # The keys of an existing checkpoint decide. If no candidate is there, the
        # reader names the likeliest one as missing.
        return next(
            (place for place in candidates if place.key in present), candidates[0]
        )

    places = {local: place_of(local) for local in single.local_shapes}
    parts = _parts_with_keys(weights, single, spec)
    shapes: dict[str, tuple[int, ...]] = {}
    for local, place in places.items():
        shape = single.local_shapes[local]
        front = _front(place, counts)
        for part in parts.get(local, ()):
            shapes[f"{place.key}.{part.name}"] = (*front, part.rows, *shape[1:])
        if local not in parts:
            shapes[place.key] = (*front, *shape)
    seen = {local: places[local].key for local in single.local_shapes}
    views = {}
    for local, (name, view) in single.views.items():
        # Layers and experts are leading axes of the key's array, in front of the
        # parameter's own axes.
        key_of_rest = view.behind(len(places[name].front))
        seen[local] = f"{places[name].key}.{key_of_rest}"
        views[seen[local]] = (places[name].key, key_of_rest)
    pieces = []
    for tensor, box, local, inner in single.pieces:
        stored_key = seen[local]
        if local in parts:
            part = next(p for p in parts[local] if p.start == inner.start[0])
            stored_key = f"{places[local].key}.{part.name}"
            inner = cut(inner.shape, 0, 0, part.rows)
        front = places[single.stored_in(local)].front
        stored = Box(
            (*front, *inner.start), (*(index + 1 for index in front), *inner.stop)
        )
        pieces.append(Piece(tensor, box, stored_key, stored))
    return Layout(tuple(pieces), shapes, single.global_shapes, views=views)


def _parts_with_keys(
    weights: Sequence[Weight], layout: Layout, spec: ModelSpec
) -> dict[str, list[MambaRows]]:
    """Return the parts of each local tensor whose parts have keys of their own in a checkpoint."""
    splits = {
        weight.name: weight.split for weight in weights if weight.split in MAMBA_PARTS
    }
    return {
        piece.local: mamba_rows(splits[piece.tensor], spec.mamba)
        for piece in layout.pieces
        if piece.tensor in splits and spec.mamba is not None
    }


def _candidates(
    local: str,
    spec: ModelSpec,
    with_engine: dict[tuple[int | str, str], str],
    *,
    transformer_engine: bool,
) -> Iterator[CheckpointKey]:
    """Yield the keys under which a parameter of the local layer spec may be stored, the likeliest first."""
    layer_name = LAYER.fullmatch(local)
    if layer_name is None:
        yield CheckpointKey(local, ())
        return
    layer = int(layer_name[1])
    name = layer_name[2]
    index: tuple[int, ...] = ()
    expert = LOCAL_EXPERT.fullmatch(name)
    if expert:
        names = [f"mlp.experts.experts.{expert[2]}"]
        index = (int(expert[1]),)
    else:
        local_name = _local_name(name, layer, spec)
        names = [with_engine.get((layer, name), name), local_name, name]
        if not transformer_engine:
            names = names[1:]
    stacked = [
        CheckpointKey(f"decoder.layers.{candidate}", (layer, *index))
        for candidate in names
    ]
    separate = [
        CheckpointKey(f"decoder.layers.{layer}.{candidate}", index)
        for candidate in names
    ]
    yield from separate + stacked if stores_each_layer(spec) else stacked + separate


def _local_name(name: str, layer: int, spec: ModelSpec) -> str:
    """Return the name under which megatron-core's local layer spec stores a parameter of a layer."""
    is_net = spec.delta_net is not None and spec.delta_net.layers[layer]
    if spec.mla or (is_net and name.startswith("input_layernorm.")):
        return name
    return LOCAL_NAMES.get(name, name)


def _front(place: CheckpointKey, counts: tuple[int, int]) -> tuple[int, ...]:
    """Return the sizes of the leading axes of a key's array: layers and experts."""
    num_layers, num_experts = counts
    is_expert = ".experts.experts." in place.key
    # (number of leading axes, whether it is an expert) -> their sizes. Keys of a single
    # layer have no leading axis.
    sizes = {
        (1, False): (num_layers,),
        (1, True): (num_experts,),
        (2, True): (num_layers, num_experts),
    }
    return sizes.get((len(place.front), is_expert), ())
