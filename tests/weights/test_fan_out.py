"""Fan-out: every element once, into each node once, and nobody forwards what it has not received."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.errors import ReshardError
from megaverl.models.architectures import weights_of
from megaverl.sharding import fan_out, plan
from megaverl.sharding.layout import EMPTY, Layout, even_layout, whole_layout
from megaverl.sharding.plan import Hop, Plan, Plans, make_plans
from megaverl.sharding.proof import check_plan, check_plans
from megaverl.sharding.vllm import vllm_layouts
from tests.sharding.specs import element_ids, make_spec
from tests.weights.cases import SHAPES, Case, model_cases, random_layouts
from tests.weights.simulate import Arrays, layouts_of
from tests.weights.test_plan import check_filled, check_volume


@pytest.fixture(autouse=True)
def always_fans_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fan out small cases too, and cut them into units."""
    monkeypatch.setattr(plan, "PAYS", 0.0)
    monkeypatch.setattr(fan_out, "LEAST_UNIT", 1)


def fanned_out(case: Case) -> Plans:
    sides = layouts_of(case.source), layouts_of(case.dest)
    return make_plans(*sides, case.world, lambda rank: case.nodes[rank], fan_out=True)


def execute(case: Case, ids: Arrays) -> None:
    """The plans are right, and bring nothing into a node twice."""
    made = fanned_out(case)
    plans = list(made)
    check_filled(case, plans, ids)
    for rank, planned in enumerate(plans):
        check_volume(planned, made.volume(rank))
    check_entries(case, plans)


def check_entries(case: Case, plans: list[Plan]) -> None:
    """No element that a node has, or has got, comes into it over the network."""
    shapes = {
        name: shape
        for layout in case.dest
        for name, shape in layout.global_shapes.items()
    }
    for node in set(case.nodes):
        ranks = [rank for rank in range(case.world) if case.nodes[rank] == node]
        entered = {name: np.zeros(shape, int) for name, shape in shapes.items()}
        for rank in ranks:
            for piece in case.source[rank].pieces:
                if piece.tensor in entered:
                    entered[piece.tensor][piece.box.slices] = 1
        for rank in ranks:
            for hop in plans[rank].hops:
                for peer, transfers in hop.receives.items():
                    if case.nodes[peer] != node:
                        for transfer in transfers:
                            entered[transfer.tensor][transfer.box.slices] += 1
        assert all((times <= 1).all() for times in entered.values())


@settings(max_examples=200, deadline=None)
@given(model_cases())
def test_any_model_from_any_placement_to_any_other(case: Case) -> None:
    execute(case, element_ids(case.weights))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(2, 6))
def test_boxes_that_overlap_in_any_way(data: st.DataObject, world: int) -> None:
    source = data.draw(random_layouts(world, everywhere=True))
    dest = data.draw(random_layouts(world, everywhere=False))
    dest[0] = whole_layout(SHAPES.items())  # tensors that nobody wants are refused
    # Ranks that want the same share one layout, as replicas do.
    dest = [dest[data.draw(st.integers(0, rank))] for rank in range(world)]
    nodes = data.draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))
    execute(
        Case([], source, dest, nodes),
        {
            name: np.arange(1, 25)[: np.prod(shape)].reshape(shape)
            for name, shape in SHAPES.items()
        },
    )


def replicas(
    trainers: int, engines: int, tp: int, per_node: int
) -> tuple[Plans, Callable[[int], int], int]:
    """Plans of trainers that hold equal shards, and engines on other ranks."""
    spec = make_spec(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_heads=8,
        num_kv_heads=4,
        vocab_size=512,
    )
    weights = weights_of(spec)
    shards = [even_layout(weights, trainers, rank) for rank in range(trainers)]
    engine = vllm_layouts(weights, spec, tp)
    of_engine = [engine(rank) for rank in range(tp)]
    world = trainers + engines * tp

    def source(rank: int) -> Layout:
        return shards[rank] if rank < trainers else EMPTY

    def dest(rank: int) -> Layout:
        return of_engine[(rank - trainers) % tp] if rank >= trainers else EMPTY

    def node_of(rank: int) -> int:
        return rank // per_node

    return make_plans(source, dest, world, node_of, fan_out=True), node_of, world


def over_network(
    plans: Plans, node_of: Callable[[int], int], world: int
) -> tuple[list[int], list[int]]:
    """Return the elements that each rank (sends, receives) between nodes."""
    volumes = [plans.volume(rank) for rank in range(world)]

    def far(rank: int, by_peer: dict[int, int]) -> int:
        return sum(
            numel for peer, numel in by_peer.items() if node_of(peer) != node_of(rank)
        )

    return (
        [far(rank, volume.sent) for rank, volume in enumerate(volumes)],
        [far(rank, volume.received) for rank, volume in enumerate(volumes)],
    )


@pytest.mark.parametrize(
    ("engines", "tp"), [(4, 4), (8, 4), (16, 4), (8, 2), (16, 2), (16, 1), (32, 1)]
)
def test_the_busiest_sender_carries_what_a_receiver_receives(
    engines: int, tp: int
) -> None:
    plans, node_of, world = replicas(4, engines, tp, per_node=4)
    check_plans(plans)
    sent, received = over_network(plans, node_of, world)
    assert max(sent) <= 1.1 * max(received)
    # A node gets the model once, however many engines it has.
    numel = sum(
        int(np.prod(weight.shape))
        for weight in weights_of(
            make_spec(
                num_layers=4,
                hidden_size=64,
                ffn_hidden_size=96,
                num_heads=8,
                num_kv_heads=4,
                vocab_size=512,
            )
        )
    )
    for first in range(4, world, 4):
        assert sum(received[first : first + 4]) == numel


def test_one_replica_is_planned_as_without_fan_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "PAYS", 1.1)
    plans, _, _ = replicas(4, 1, 4, per_node=4)
    assert plans.fan_out is None
    assert all(not planned.relays for planned in plans)
    assert replicas(4, 4, 4, per_node=4)[0].fan_out is not None


def first_forwarding(plans: Plans) -> tuple[Plan, int]:
    """Return the first rank that forwards between nodes, and the number of the hop."""
    return next(
        (planned, n)
        for planned in plans
        for n, hop in enumerate(planned.relays)
        if hop.after is not None and hop.sends
    )


def with_hop(planned: Plan, number: int, hop: Hop) -> Plan:
    return replace(
        planned, relays=(*planned.relays[:number], hop, *planned.relays[number + 1 :])
    )


def test_a_rank_that_forwards_what_it_has_not_received_is_refused() -> None:
    relaying, number = first_forwarding(replicas(4, 4, 4, per_node=4)[0])
    after = relaying.relays[number].after
    assert after is not None
    # What is forwarded comes later, in a hop behind that of the forwarding.
    received = relaying.relays[after].receives
    late = with_hop(relaying, after, relaying.relays[after]._replace(receives={}))
    late = replace(late, relays=(*late.relays, Hop({}, received)))
    with pytest.raises(
        ReshardError,
        match=rf"rank {relaying.rank} forwards .* before it has received that",
    ):
        check_plan(late)
    circle = with_hop(relaying, number, relaying.relays[number]._replace(after=number))
    with pytest.raises(
        ReshardError, match=f"forwards in hop {number} what comes in hop {number}"
    ):
        check_plan(circle)


def test_a_hop_that_only_one_side_knows_is_refused() -> None:
    plans = replicas(4, 4, 4, per_node=4)[0]
    relaying, number = first_forwarding(plans)
    every = list(plans)
    every[relaying.rank] = with_hop(
        relaying, number, relaying.relays[number]._replace(sends={})
    )
    with pytest.raises(ReshardError, match=rf"rank {relaying.rank} sends 0 boxes"):
        check_plans(every)
