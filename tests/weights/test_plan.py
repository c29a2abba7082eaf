"""Plans, carried out on arrays of element ids, against gathering everything and slicing it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.distributed.grid import GridShape
from megaverl.errors import ReshardError
from megaverl.models.architectures import weights_of
from megaverl.sharding.boxes import Box, whole
from megaverl.sharding.layout import (
    EMPTY,
    Layout,
    LayoutBuilder,
    Piece,
    even_layout,
    stack,
    whole_layout,
)
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.plan import (
    Plan,
    Transfer,
    Volume,
    intersect_layouts,
    make_plan,
    make_plans,
)
from megaverl.sharding.proof import check_plan, check_plans
from megaverl.sharding.vllm import vllm_layouts
from tests.sharding.specs import (
    element_ids,
    fill,
    make_experts,
    make_spec,
    make_weights,
    seen,
)
from tests.weights.cases import SHAPES, Case, model_cases, random_layouts
from tests.weights.simulate import (
    Arrays,
    carry_out,
    gather,
    layouts_of,
    must_fetch,
    unfair,
)


def one_node(_: int) -> int:
    return 0


def execute(case: Case, ids: Arrays) -> None:
    """The plans are right, and each rank's volume is counted as its plan has it."""
    plans = case.plans()
    check_filled(case, plans, ids)
    for rank, plan in enumerate(plans):
        check_volume(plan, case.made_on_access().volume(rank))


def check_filled(case: Case, plans: Sequence[Plan], ids: Arrays) -> None:
    """The plans are proven, fill every rank as gathering and slicing would, and move no element too many."""
    check_plans(plans)
    source = [seen(layout, fill(layout, ids)) for layout in case.source]
    full = gather(case.source, source)
    expected = [fill(layout, full) for layout in case.dest]
    arrays = [
        {name: np.zeros_like(array) for name, array in rank.items()}
        for rank in expected
    ]
    carry_out(
        plans,
        source,
        [seen(layout, rank) for layout, rank in zip(case.dest, arrays, strict=True)],
    )
    for rank, plan in enumerate(plans):
        for name, array in expected[rank].items():
            assert (arrays[rank][name] == array).all(), (rank, name)
        assert plan.num_received == must_fetch(case.source[rank], case.dest[rank])


def check_volume(plan: Plan, volume: Volume) -> None:
    """The elements counted without transfers are those of the transfers."""

    def count(transfers: Sequence[Transfer]) -> int:
        return sum(transfer.box.numel for transfer in transfers)

    assert volume.copied == count(plan.copies)
    received: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    for hop in plan.hops:
        received.update(
            {peer: count(transfers) for peer, transfers in hop.receives.items()}
        )
        sent.update({peer: count(transfers) for peer, transfers in hop.sends.items()})
    assert (volume.received, volume.sent) == (received, sent)


@settings(max_examples=250, deadline=None)
@given(model_cases())
def test_any_model_from_any_placement_to_any_other(case: Case) -> None:
    execute(case, element_ids(case.weights))
    assert unfair(case.plans(), lambda rank: case.nodes[rank]) == []


@settings(max_examples=250, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_boxes_that_overlap_in_any_way(data: st.DataObject, world: int) -> None:
    """Also what several ranks hold in part is fetched once, and from the rank's own node where it is there."""
    source = data.draw(random_layouts(world, everywhere=True))
    dest = data.draw(random_layouts(world, everywhere=False))
    dest[0] = whole_layout(SHAPES.items())  # tensors that nobody wants are refused
    nodes = data.draw(st.lists(st.integers(0, 2), min_size=world, max_size=world))
    case = Case([], source, dest, nodes)
    execute(
        case,
        {
            name: np.arange(1, 25)[: np.prod(shape)].reshape(shape)
            for name, shape in SHAPES.items()
        },
    )
    for plan in case.plans():
        near = [
            layout
            for layout, node in zip(source, nodes, strict=True)
            if node == nodes[plan.rank]
        ]
        for peer, transfers in plan.receives.items():
            if nodes[peer] != nodes[plan.rank]:
                far = [
                    Piece(t.tensor, t.box, t.dest_local, t.dest_box) for t in transfers
                ]
                outside = Layout(tuple(far), {}, dict(SHAPES))
                held = Layout(
                    tuple(piece for layout in near for piece in layout.pieces), {}, {}
                )
                assert must_fetch(held, outside) == sum(t.box.numel for t in transfers)


def test_one_rank_makes_the_plan_that_all_make() -> None:
    spec = make_spec()
    weights = weights_of(spec)
    source = megatron_layouts(
        weights, spec, GridShape(tp=2, pp=2, dp=2), padded_vocab_size=64
    )
    dest = vllm_layouts(weights, spec, 4)
    for rank, plan in enumerate(make_plans(source, dest, 8)):
        alone = make_plan(source, dest, 8, rank)
        assert (alone.copies, alone.sends, alone.receives) == (
            plan.copies,
            plan.sends,
            plan.receives,
        )


def test_overlapping_holders_and_fused_expert_tensors() -> None:
    """A source that cuts by columns with overlap, a destination that keeps the matrix inside a 3-D tensor."""
    shape = (4, 6)
    sources = [
        Layout(
            (Piece("w", box, "s", whole(box.shape)),), {"s": box.shape}, {"w": shape}
        )
        for box in (Box((0, 0), (4, 4)), Box((0, 2), (4, 6)))
    ]
    inside = Box((1, 0, 0), (2, 4, 6))
    dest = Layout(
        (Piece("w", whole(shape), "experts", inside),),
        {"experts": (3, 4, 6)},
        {"w": shape},
    )
    plans = make_plans(layouts_of(sources), layouts_of([dest, EMPTY]), 2)
    check_plans(plans)
    ids = {"w": np.arange(1, 25).reshape(shape)}
    arrays: list[Any] = [{"experts": np.zeros((3, 4, 6), dtype=np.int64)}, {}]
    carry_out(plans, [fill(layout, ids) for layout in sources], arrays)
    assert (arrays[0]["experts"][1] == ids["w"]).all()
    assert plans[0].num_received == 8, "only the two columns that rank 0 lacks"


def test_a_tensor_without_axes_moves_too() -> None:
    layout = Layout(
        (Piece("scale", whole(()), "scale", whole(())),), {"scale": ()}, {"scale": ()}
    )
    plans = make_plans(layouts_of([layout, EMPTY]), layouts_of([EMPTY, layout]), 2)
    check_plans(plans)
    assert plans[1].num_received == 1


def test_adjacent_boxes_travel_as_one() -> None:
    """Row by row at the source, whole at the destination; then tile by tile: one transfer."""
    rows, tiles = LayoutBuilder(), LayoutBuilder()
    rows.add(
        "s",
        make_weights({"w": (4, 4)}),
        stack([(0, Box((i, 0), (i + 1, 4))) for i in range(4)]),
    )
    target = whole_layout([("w", (4, 4))])
    assert [transfer.box for transfer in intersect_layouts(rows.build(), target)] == [
        whole((4, 4))
    ]
    boxes = [Box((i, j), (i + 2, j + 2)) for i in (0, 2) for j in (0, 2)]
    tiles = Layout(
        tuple(Piece("w", box, "s", box) for box in boxes), {"s": (4, 4)}, {"w": (4, 4)}
    )
    assert [transfer.box for transfer in intersect_layouts(tiles, target)] == [
        whole((4, 4))
    ]


def test_boxes_that_are_adjacent_along_different_axes_stay_apart() -> None:
    """One below the other in the global tensor, side by side in the local one: not one box."""
    shape = (4, 2)
    halves = [Box((0, 0), (2, 2)), Box((2, 0), (4, 2))]
    beside = [Box((0, 0), (2, 2)), Box((0, 2), (2, 4))]
    pieces = tuple(
        Piece("w", *both) for both in zip(halves, ["s"] * 2, beside, strict=True)
    )
    source, dest = (
        Layout(pieces, {"s": (2, 4)}, {"w": shape}),
        whole_layout([("w", shape)]),
    )
    assert [transfer.box for transfer in intersect_layouts(source, dest)] == halves
    execute(Case([], [source], [dest], [0]), {"w": np.arange(1, 9).reshape(shape)})


def test_boxes_of_different_local_tensors_stay_apart() -> None:
    """Two halves in two local tensors, in which they even follow one another: two transfers."""
    halves = [Box((0, 0), (2, 3)), Box((2, 0), (4, 3))]
    pieces = tuple(
        Piece("w", half, name, half) for half, name in zip(halves, "ab", strict=True)
    )
    apart = Layout(pieces, {"a": (2, 3), "b": (4, 3)}, {"w": (4, 3)})
    for source, dest in (
        (apart, whole_layout([("w", (4, 3))])),
        (whole_layout([("w", (4, 3))]), apart),
    ):
        assert [transfer.box for transfer in intersect_layouts(source, dest)] == halves
        execute(Case([], [source], [dest], [0]), {"w": np.arange(1, 13).reshape(4, 3)})


def test_the_same_layout_on_both_sides_moves_nothing_between_ranks() -> None:
    spec = make_spec()
    source = megatron_layouts(
        weights_of(spec), spec, GridShape(tp=2, pp=2), padded_vocab_size=64
    )
    for plan in make_plans(source, source, 4):
        assert not plan.sends
        assert not plan.receives


def test_replicas_share_the_sending_and_nodes_keep_to_themselves() -> None:
    """4 data-parallel replicas of TP1 x PP2, each on a node of its own: nothing crosses nodes; and with all
    on one node each holder serves as few others as can be.
    """
    spec = make_spec(num_layers=8)
    weights = weights_of(spec)
    source = megatron_layouts(
        weights, spec, GridShape(tp=1, pp=2, dp=4), padded_vocab_size=64
    )
    dest = vllm_layouts(weights, spec, 1)
    for plan in make_plans(source, dest, 8, lambda rank: rank % 4):
        assert all(peer % 4 == plan.rank % 4 for peer in plan.sends)
    plans = make_plans(source, dest, 8)
    assert [len(plan.sends) for plan in plans] == [1] * 8
    assert (
        len({plan.num_sent for plan in plans[:4]})
        == len({plan.num_sent for plan in plans[4:]})
        == 1
    )


def test_fewer_that_need_than_hold_are_spread_over_nodes() -> None:
    """16 replicas on 4 nodes and one rank apart that needs all: every holder sends, none twice as much."""
    spec = make_spec(num_layers=8)
    weights = weights_of(spec)
    held, wanted = (
        whole_layout((w.name, w.shape) for w in weights),
        vllm_layouts(weights, spec, 1)(0),
    )
    sides = layouts_of([held] * 16 + [EMPTY]), layouts_of([EMPTY] * 16 + [wanted])
    plans = list(make_plans(*sides, 17, lambda rank: rank // 4))
    assert unfair(plans, lambda rank: rank // 4) == []
    assert all(plan.num_sent for plan in plans[:16])


MOE = make_spec(
    "Qwen3MoeForCausalLM",
    num_layers=6,
    hidden_size=64,
    num_heads=16,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=1000,
    moe=make_experts("Qwen3MoeForCausalLM", num_experts=32, ffn_hidden_size=16),
)
DENSE = make_spec(
    num_layers=16,
    hidden_size=128,
    ffn_hidden_size=448,
    num_heads=64,
    num_kv_heads=8,
    head_dim=2,
    vocab_size=2000,
)


@pytest.mark.parametrize(
    ("spec", "grid"),
    [
        (DENSE, GridShape(tp=8, pp=8, dp=4)),
        (MOE, GridShape(tp=4, pp=2, dp=32, ep=16)),
        (MOE, GridShape(tp=4, pp=2, dp=32, ep=16, etp=1)),
    ],
)
def test_256_ranks(spec: Any, grid: GridShape) -> None:
    """Small models on large grids: proven, least, no sender much busier than the others."""
    weights = weights_of(spec)
    padded = -(-spec.vocab_size // 64) * 64
    source = megatron_layouts(weights, spec, grid, padded_vocab_size=padded)
    dest = vllm_layouts(weights, spec, 8, expert_parallel=spec.moe is not None)
    plans = list(make_plans(source, dest, 256, lambda rank: rank // 8))
    check_plans(plans)
    for plan in plans[::17]:
        assert plan.num_received == must_fetch(source(plan.rank), dest(plan.rank))
    sent = [plan.num_sent for plan in plans]
    assert max(sent) <= 1.5 * sum(sent) / len(sent)


def test_many_even_chunks() -> None:
    """FSDP2 over 300 ranks to TP4: every rank's box is another, and nobody looks at all of them."""
    spec = make_spec(num_layers=2, hidden_size=64, ffn_hidden_size=320, vocab_size=700)
    weights = weights_of(spec)
    source, dest = (
        cache(partial(even_layout, weights, 300)),
        vllm_layouts(weights, spec, 4),
    )
    plans = make_plans(source, dest, 300)
    for rank in (0, 7, 299):
        check_plan(plans[rank])
        assert plans[rank].num_received == must_fetch(source(rank), dest(rank))


def test_two_different_models_are_refused_with_every_tensor_named() -> None:
    spec = make_spec("Qwen3ForCausalLM")
    source = megatron_layouts(weights_of(spec), spec, GridShape(), padded_vocab_size=64)
    other = make_spec(
        "LlamaForCausalLM", num_layers=5, ffn_hidden_size=24, tie_embeddings=True
    )
    dest = vllm_layouts(weights_of(other), other, 1)
    with pytest.raises(ReshardError) as error:
        make_plan(source, dest, 1, 0)
    message = str(error.value)
    assert (
        "model.layers.0-3.mlp.gate_proj.weight: shape (16, 8) at the source, (24, 8) at the destination"
        in message
    )
    assert "model.layers.0-3.mlp.up_proj.weight: shape" in message
    assert (
        "model.layers.0-3.mlp.down_proj.weight: shape (8, 16) at the source, (8, 24)"
        in message
    )
    assert (
        "model.layers.0-3.self_attn.q_norm.weight: the destination has no place for it"
        in message
    )
    assert (
        "model.layers.0-3.self_attn.k_norm.weight: the destination has no place for it"
        in message
    )
    assert "lm_head.weight: the destination has no place for it" in message
    assert (
        "model.layers.4.self_attn.q_proj.weight: the source has no such tensor"
        in message
    )
    assert message.count("model.layers.4.") == 9


def test_elements_that_nobody_holds_are_named() -> None:
    half = Box((0, 0), (2, 3))
    pieces = tuple(Piece(name, half, name, whole((2, 3))) for name in "vw")
    source = Layout(pieces, dict.fromkeys("vw", (2, 3)), dict.fromkeys("vw", (4, 3)))
    dest = whole_layout([("v", (4, 3)), ("w", (4, 3))])
    with pytest.raises(ReshardError) as error:
        make_plan(lambda _: source, lambda _: dest, 1, 0)
    for name in "vw":
        assert (
            f"{name}: rank 0 needs [2:4, 0:3] for {name}, but no rank holds it"
            in str(error.value)
        )


def test_ranks_that_disagree_on_a_shape_are_refused() -> None:
    source = [whole_layout([("w", (4, 3))]), whole_layout([("w", (4, 2))])]
    with pytest.raises(
        ReshardError,
        match=r"w: ranks of one side say \(4, 3\) and \(4, 2\) of its shape",
    ):
        make_plans(layouts_of(source), layouts_of(source), 2)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_at_rest_while_plans_are_made_and_then_as_it_was(
    enabled: bool,
) -> None:
    model, seen = whole_layout([("w", (4, 3))]), []

    def layouts(rank: int) -> Layout:
        seen.append(gc.isenabled())
        if rank == 2:
            raise KeyError("no such rank")
        return model

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        plans = make_plans(layouts, layouts, 2)
        after = [gc.isenabled()]
        for index in (0, slice(None)):
            plans[index]
            after.append(gc.isenabled())
        with pytest.raises(KeyError):
            make_plans(layouts, layouts, 3)
        after.append(gc.isenabled())
        with pytest.raises(IndexError):
            plans[2]
        after.append(gc.isenabled())
    finally:
        (gc.enable if before else gc.disable)()
    assert seen and not any(seen)
    assert after == [enabled] * 5


def test_plans_are_a_sequence() -> None:
    model = whole_layout([("w", (4, 3))])
    plans = make_plans(lambda rank: model if rank else EMPTY, lambda _: model, 3)
    assert (
        len(plans) == 3
        and [plan.rank for plan in plans[1:]] == [1, 2]
        and plans[-1].rank == 2
    )
    assert [(plan.num_received, plan.num_sent) for plan in plans] == [
        (12, 0),
        (0, 12),
        (0, 0),
    ]
    assert [plan.world for plan in plans] == [3, 3, 3]


def test_in_one_place_a_part_may_be_left_and_none_may_lack() -> None:
    source, dest = (
        whole_layout([("v", (2, 3)), ("w", (4, 3))]),
        whole_layout([("w", (4, 3))]),
    )
    [transfer] = intersect_layouts(source, dest)
    assert (transfer.tensor, transfer.box, transfer.source, transfer.dest) == (
        "w",
        whole((4, 3)),
        0,
        0,
    )
    with pytest.raises(ReshardError, match="v: the source has no such tensor"):
        intersect_layouts(dest, source)
