"""Random models, placements and node maps for the tests of plans and their checker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from hypothesis import strategies as st

from megaverl.distributed.grid import GridShape
from megaverl.models.architectures import weights_of
from megaverl.sharding.boxes import split, whole
from megaverl.sharding.layout import (
    EMPTY,
    Layout,
    LayoutBuilder,
    even_layout,
    stack,
    whole_layout,
)
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.plan import Plan, Plans, make_plans
from megaverl.sharding.vllm import vllm_layouts
from megaverl.sharding.weight import Weight
from tests.sharding.specs import make_weights, specs
from tests.weights.simulate import layouts_of

Layouts = Callable[[int], Layout]
TP_SIZES = (1, 2, 4)
SHAPES = {"a": (6, 4), "b": (5,), "c": (2, 3, 4)}


@dataclass
class Case:
    weights: list[Weight]
    source: list[Layout]
    dest: list[Layout]
    nodes: list[int]

    @property
    def world(self) -> int:
        return len(self.nodes)

    def plans(self) -> list[Plan]:
        return list(self.made_on_access())

    def made_on_access(self) -> Plans:
        sides = layouts_of(self.source), layouts_of(self.dest)
        return make_plans(*sides, self.world, lambda rank: self.nodes[rank])


@st.composite
def megatron(
    draw: st.DrawFn, weights: list[Weight], spec: ModelSpec, world: int
) -> Layouts:
    """TP, PP (even, uneven, virtual), EP and expert-TP, DP; the vocabulary padded more or less."""
    tp = draw(st.sampled_from([n for n in TP_SIZES if world % n == 0]))
    pp = draw(
        st.sampled_from(
            [n for n in TP_SIZES if world // tp % n == 0 and n <= spec.num_layers]
        )
    )
    vpp = draw(st.sampled_from([None, 2])) if 1 < pp <= spec.num_layers // 2 else None
    cuts = draw(
        st.sets(
            st.integers(1, max(1, spec.num_layers - 1)),
            min_size=0,
            max_size=pp * (vpp or 1) - 1,
        )
    )
    edges = sorted(cuts | {0, spec.num_layers})
    layers = [high - low for low, high in zip(edges, edges[1:], strict=False)]
    layers += [0] * (pp * (vpp or 1) - len(layers))
    stage = world // pp
    ep, etp = 1, tp
    if spec.moe is not None:
        of_experts = (1,) if spec.linear_bias else TP_SIZES
        sizes = [(e, t) for e in (1, 2, 3) for t in of_experts if stage % (e * t) == 0]
        ep, etp = draw(
            st.sampled_from([(e, t) for e, t in sizes if spec.moe.num_experts % e == 0])
        )
    grid = GridShape(tp=tp, pp=pp, dp=stage // tp, vpp=vpp, ep=ep, etp=etp)
    padded = -(-spec.vocab_size // tp) * tp + tp * draw(st.integers(0, 2))
    transformer_engine = draw(st.booleans())
    return megatron_layouts(
        weights,
        spec,
        grid,
        padded_vocab_size=padded,
        transformer_engine=transformer_engine,
        layer_split=layers,
    )


@st.composite
def vllm(
    draw: st.DrawFn, weights: list[Weight], spec: ModelSpec, world: int
) -> Layouts:
    tp = draw(st.sampled_from([n for n in TP_SIZES if world % n == 0]))
    expert_parallel = (
        spec.moe is not None and spec.moe.num_experts >= tp and draw(st.booleans())
    )
    return vllm_layouts(weights, spec, tp, expert_parallel=expert_parallel)


def one_side(
    draw: st.DrawFn, weights: list[Weight], spec: ModelSpec, world: int
) -> list[Layout]:
    """Any kind of layout on some ranks in a row, nothing on the others."""
    size = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if n <= world]))
    first = draw(st.integers(0, world - size))
    kind = draw(st.sampled_from(["megatron", "megatron", "vllm", "even", "whole"]))
    if kind == "megatron":
        layouts = draw(megatron(weights, spec, size))
    elif kind == "vllm":
        layouts = draw(vllm(weights, spec, size))
    elif kind == "even":
        layouts = cache(partial(even_layout, weights, size))
    else:
        everything = whole_layout((weight.name, weight.shape) for weight in weights)
        layouts = layouts_of([everything] * size)
    return [
        layouts(rank - first) if 0 <= rank - first < size else EMPTY
        for rank in range(world)
    ]


@st.composite
def model_cases(draw: st.DrawFn) -> Case:
    """A model that moves from one placement to another, in a world of up to 8 ranks on any nodes."""
    spec = draw(specs(TP_SIZES))
    weights = weights_of(spec)
    world = draw(st.sampled_from([4, 8, 2, 1]))
    source, dest = (one_side(draw, weights, spec, world) for _ in range(2))
    nodes = draw(
        st.one_of(
            st.sampled_from([1, 2, 4, 8]).map(
                lambda size: [rank // size for rank in range(world)]
            ),
            st.lists(st.integers(0, 3), min_size=world, max_size=world),
        )
    )
    return Case(weights, source, dest, nodes)


@st.composite
def random_layouts(draw: st.DrawFn, world: int, *, everywhere: bool) -> list[Layout]:
    """Each rank holds random boxes of a few tensors; with `everywhere` together they hold everything.

    The boxes of one rank are disjoint; those of several ranks may overlap in any way.
    """
    builders = [LayoutBuilder() for _ in range(world)]
    for tensor, shape in SHAPES.items():
        complete = draw(st.integers(0, world - 1)) if everywhere else None
        for rank, builder in enumerate(builders):
            boxes = split(whole(shape), draw(st.integers(1, 24)))
            held = (
                boxes
                if rank == complete
                else [box for box in boxes if draw(st.booleans())]
            )
            for i, box in enumerate(held):
                builder.add(
                    f"{tensor}{i}",
                    make_weights({tensor: shape}),
                    stack([(0, box)], box.shape[0] + 1),
                )
    return [builder.build() for builder in builders]
