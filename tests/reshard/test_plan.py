"""Plans, carried out on arrays of element ids, against simply filling the destination."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.errors import ReshardError
from megaverl.layout.boxes import Box, split, whole
from megaverl.layout.layout import EMPTY, Layout, LayoutBuilder, Piece
from megaverl.layout.megatron import megatron_layouts
from megaverl.layout.vllm import vllm_layouts
from megaverl.models.architectures import weights_of
from megaverl.parallel.grid import GridShape
from megaverl.reshard.check import check_plan, check_plans
from megaverl.reshard.plan import Plan, intersect_layouts, make_plan
from tests.layout.specs import element_ids, fill, make_spec, specs
from tests.reshard.simulate import carry_out, layouts_of, must_fetch


def all_plans(source: Any, dest: Any, world: int, node_of: Any = None) -> list[Plan]:
    return [make_plan(source, dest, world, rank, node_of) for rank in range(world)]


@st.composite
def model_cases(draw: st.DrawFn) -> tuple[Any, ...]:
    tp, vllm_tp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    spec = draw(specs([tp, vllm_tp]))
    pp = draw(st.sampled_from([n for n in (1, 2, 4) if spec.num_layers % n == 0]))
    dp = draw(st.sampled_from([1, 2]))
    while tp * pp * dp % vllm_tp:
        dp *= 2
    vpp = 2 if pp > 1 and spec.num_layers % (2 * pp) == 0 and draw(st.booleans()) else None
    padded = -(-spec.vocab_size // tp) * tp + tp * draw(st.integers(0, 2))
    return spec, GridShape(tp=tp, pp=pp, dp=dp, vpp=vpp), padded, vllm_tp, draw(st.sampled_from([1, 2, 16]))


@settings(max_examples=60, deadline=None)
@given(model_cases())
def test_megatron_to_vllm(case: tuple[Any, ...]) -> None:
    """Every parameter of vLLM ends up right, whatever the two parallelisms, with the least elements sent."""
    spec, shape, padded, vllm_tp, per_node = case
    weights, world = weights_of(spec), shape.world_size
    source = megatron_layouts(weights, spec, shape, padded_vocab_size=padded)
    dest = vllm_layouts(weights, spec, vllm_tp)
    plans = all_plans(source, dest, world, lambda rank: rank // per_node)
    check_plans(plans)
    ids = element_ids(weights)
    expected = [fill(dest(rank), ids) for rank in range(world)]
    arrays = [{name: np.zeros_like(array) for name, array in rank.items()} for rank in expected]
    carry_out(plans, [fill(source(rank), ids) for rank in range(world)], arrays)
    for rank in range(world):
        for name, array in expected[rank].items():
            assert (arrays[rank][name] == array).all(), (rank, name)
        assert plans[rank].num_received == must_fetch(source(rank), dest(rank))


@st.composite
def random_layouts(draw: st.DrawFn, world: int, *, everywhere: bool) -> list[Layout]:
    """Each rank holds random boxes of a few tensors; with `everywhere` together they hold everything."""
    shapes = {"a": (6, 4), "b": (5,), "c": (2, 3, 4)}
    builders = [LayoutBuilder() for _ in range(world)]
    for tensor, shape in shapes.items():
        for i, box in enumerate(split(whole(shape), draw(st.integers(1, 12)))):
            holders = draw(st.sets(st.integers(0, world - 1), min_size=int(everywhere)))
            for holder in holders:
                builders[holder].add_stacked(f"{tensor}{i}", [(tensor, shape, box)], box.shape[0] + 1)
    return [builder.build() for builder in builders]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 4))
def test_any_layout_to_any_other(data: st.DataObject, world: int) -> None:
    source = data.draw(random_layouts(world, everywhere=True))
    dest = data.draw(random_layouts(world, everywhere=False))
    # tensors that nobody wants are refused, so let rank 0 want everything
    builder = LayoutBuilder()
    for tensor, shape in {"a": (6, 4), "b": (5,), "c": (2, 3, 4)}.items():
        builder.add_whole(tensor, shape)
    dest[0] = builder.build()
    plans = all_plans(layouts_of(source), layouts_of(dest), world)
    check_plans(plans)
    shapes = dest[0].global_shapes
    ids = {name: np.arange(1, 25)[: np.prod(shape)].reshape(shape) for name, shape in shapes.items()}
    expected = [fill(layout, ids) for layout in dest]
    arrays = [{name: np.zeros_like(array) for name, array in rank.items()} for rank in expected]
    carry_out(plans, [fill(layout, ids) for layout in source], arrays)
    for rank in range(world):
        assert all((arrays[rank][name] == expected[rank][name]).all() for name in expected[rank])
        assert plans[rank].num_received == must_fetch(source[rank], dest[rank])


def test_overlapping_holders_and_fused_expert_tensors() -> None:
    """A source that cuts by columns with overlap, a destination that keeps the matrix inside a 3-D tensor."""
    shape = (4, 6)
    sources = [
        Layout((Piece("w", box, "s", whole(box.shape)),), {"s": box.shape}, {"w": shape})
        for box in (Box((0, 0), (4, 4)), Box((0, 2), (4, 6)))
    ]
    inside = Box((1, 0, 0), (2, 4, 6))
    dest = Layout((Piece("w", whole(shape), "experts", inside),), {"experts": (3, 4, 6)}, {"w": shape})
    plans = all_plans(layouts_of(sources), layouts_of([dest, EMPTY]), 2)
    check_plans(plans)
    ids = {"w": np.arange(1, 25).reshape(shape)}
    arrays: list[Any] = [{"experts": np.zeros((3, 4, 6), dtype=np.int64)}, {}]
    carry_out(plans, [fill(layout, ids) for layout in sources], arrays)
    assert (arrays[0]["experts"][1] == ids["w"]).all()
    assert plans[0].num_received == 8, "only the two columns that rank 0 lacks"


def test_adjacent_boxes_travel_as_one() -> None:
    """Row by row at the source, whole at the destination: one transfer."""
    builder = LayoutBuilder()
    rows = [("w", (4, 3), Box((i, 0), (i + 1, 3))) for i in range(4)]
    builder.add_stacked("s", rows)
    whole_builder = LayoutBuilder()
    whole_builder.add_whole("w", (4, 3))
    transfers = intersect_layouts(builder.build(), whole_builder.build())
    assert [transfer.box for transfer in transfers] == [whole((4, 3))]


def test_boxes_that_are_adjacent_along_different_axes_stay_apart() -> None:
    """One below the other in the global tensor, side by side in the local one: not one box."""
    shape = (4, 2)
    halves = [Box((0, 0), (2, 2)), Box((2, 0), (4, 2))]
    beside = [Box((0, 0), (2, 2)), Box((0, 2), (2, 4))]
    pieces = tuple(Piece("w", *both) for both in zip(halves, ["s"] * 2, beside, strict=True))
    source = Layout(pieces, {"s": (2, 4)}, {"w": shape})
    builder = LayoutBuilder()
    builder.add_whole("w", shape)
    plan = make_plan(lambda _: source, lambda _: builder.build(), 1, 0)
    check_plan(plan)
    ids = {"w": np.arange(1, 9).reshape(shape)}
    arrays = [{"w": np.zeros(shape, dtype=np.int64)}]
    carry_out([plan], [fill(source, ids)], arrays)
    assert (arrays[0]["w"] == ids["w"]).all()


def test_the_same_layout_on_both_sides_moves_nothing_between_ranks() -> None:
    spec = make_spec()
    source = megatron_layouts(weights_of(spec), spec, GridShape(tp=2, pp=2), padded_vocab_size=64)
    for plan in all_plans(source, source, 4):
        assert not plan.sends
        assert not plan.receives


def test_replicas_share_the_sending_and_nodes_keep_to_themselves() -> None:
    """4 data-parallel replicas of TP1 x PP2, each on a node of its own: nothing crosses nodes; and with all
    on one node the senders of a stage send as much as each other, up to one tensor."""
    spec = make_spec(num_layers=8)
    weights = weights_of(spec)
    source = megatron_layouts(weights, spec, GridShape(tp=1, pp=2, dp=4), padded_vocab_size=64)
    dest = vllm_layouts(weights, spec, 1)
    for plan in all_plans(source, dest, 8, lambda rank: rank % 4):
        assert all(peer % 4 == plan.rank % 4 for peer in plan.sends)
    plans = all_plans(source, dest, 8)
    largest = max(np.prod(weight.shape) for weight in weights)
    for stage in (plans[:4], plans[4:]):
        sent = [plan.num_sent for plan in stage]
        assert max(sent) - min(sent) <= largest


def test_two_different_models_are_refused_with_every_tensor_named() -> None:
    spec = make_spec("Qwen3ForCausalLM")
    source = megatron_layouts(weights_of(spec), spec, GridShape(), padded_vocab_size=64)
    other = make_spec("LlamaForCausalLM", num_layers=4, ffn_hidden_size=24, tie_embeddings=True)
    dest = vllm_layouts(weights_of(other), other, 1)
    with pytest.raises(ReshardError) as error:
        make_plan(source, dest, 1, 0)
    assert "mlp.gate_proj.weight: shape (16, 8) at the source, (24, 8) at the destination" in str(error.value)
    assert "q_norm.weight: the destination has no place for it" in str(error.value)


def test_elements_that_nobody_holds_are_named() -> None:
    half = Box((0, 0), (2, 3))
    source = Layout((Piece("w", half, "s", whole((2, 3))),), {"s": (2, 3)}, {"w": (4, 3)})
    builder = LayoutBuilder()
    builder.add_whole("w", (4, 3), "d")
    with pytest.raises(ReshardError, match=r"w: rank 0 needs \[2:4, 0:3\] for d, but no rank holds it"):
        make_plan(lambda _: source, lambda _: builder.build(), 1, 0)


@pytest.fixture
def plans() -> list[Plan]:
    spec = make_spec()
    weights = weights_of(spec)
    source = megatron_layouts(weights, spec, GridShape(tp=2, pp=2), padded_vocab_size=64)
    return all_plans(source, vllm_layouts(weights, spec, 2), 4)


def test_the_checker_sees_what_is_missing_double_or_needless(plans: list[Plan]) -> None:
    good = plans[1]
    check_plan(good)
    with pytest.raises(ReshardError, match="rank 1 never gets"):
        check_plan(replace(good, copies=good.copies[1:]))
    with pytest.raises(ReshardError, match="is written twice"):
        check_plan(replace(good, copies=(*good.copies, good.copies[0])))
    held = good.copies[0]
    fetched = held._replace(source=0)
    with pytest.raises(ReshardError, match="but holds it itself"):
        check_plan(replace(good, copies=good.copies[1:], receives={**good.receives, 0: (fetched,)}))
    with pytest.raises(ReshardError, match="rank 1 does not hold"):
        lost = good.sends[3][0]._replace(box=Box((0,), (1,)), tensor="model.layers.3.input_layernorm.weight")
        check_plan(replace(good, sends={**good.sends, 3: (lost,)}))
    low, high = held.dest_box
    outside = held._replace(dest_box=Box(tuple(n + 999 for n in low), tuple(n + 999 for n in high)))
    with pytest.raises(ReshardError, match="lies outside"):
        check_plan(replace(good, copies=(outside, *good.copies[1:])))


def test_the_checker_sees_sends_that_nobody_receives(plans: list[Plan]) -> None:
    check_plans(plans)
    peer = next(iter(plans[0].sends))
    shorter = replace(plans[0], sends={**plans[0].sends, peer: plans[0].sends[peer][1:]})
    with pytest.raises(ReshardError, match=f"rank {peer}"):
        check_plans([shorter, *plans[1:]])
