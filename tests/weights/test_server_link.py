"""Weights between jobs: from an actor's Megatron layout to the vLLM layouts of two servers, in real processes."""

from __future__ import annotations

import pytest

from megaverl.distributed.grid import GridShape
from megaverl.models.architectures import weights_of
from megaverl.sharding.megatron import megatron_layouts
from megaverl.weights.server_link import dealt
from tests.launcher import Launcher
from tests.sharding.specs import make_spec

RANKS = "tests.weights.link_ranks:deliver"
SIZE, SENDERS = 5, 2


@pytest.mark.parametrize("late", [False, True])
def test_every_worker_gets_each_element_once_into_its_place(
    launch: Launcher, late: bool
) -> None:
    found = launch.ranks(SIZE, RANKS, late=late).check()
    for worker in found[SENDERS:]:
        assert worker["wrong"] == []
        assert worker["received"] == [worker["planned"]] * 2 == [worker["needed"]] * 2
    for sender in found[:SENDERS]:
        assert sender["sent"] == [sender["planned"]] * 2
    sent = [sender["planned"] for sender in found[:SENDERS]]
    assert sum(sent) == sum(worker["needed"] for worker in found[SENDERS:])
    assert min(sent) > 0.3 * sum(sent)  # both send about half


def test_later_versions_are_sent_as_changes(launch: Launcher) -> None:
    found = launch.ranks(SIZE, RANKS, delta="auto").check()
    for worker in found[SENDERS:]:
        assert worker["wrong"] == []
        first, second = worker["received"]
        assert first == worker["needed"] and second < 0.4 * first
    for sender in found[:SENDERS]:
        assert sender["sent"][0] == sender["planned"] > 2.5 * sender["sent"][1]


def test_a_worker_that_refuses_ends_the_others_waits(launch: Launcher) -> None:
    found = launch.ranks(SIZE, RANKS, fault="refuses").check()
    *others, refuses = found
    assert refuses["error"] == "these weights do not fit"
    assert [other["error"] for other in others] == [
        "worker 4: these weights do not fit"
    ] * 4
    assert all(each["soon"] for each in found)


def test_a_worker_that_dies_is_named(launch: Launcher) -> None:
    ended = launch.ranks(SIZE, RANKS, fault="dies")
    assert ended.codes == [0, 0, 0, 0, 7], ended.text
    for other in ended.results[:4]:
        assert "rank 4 died or stalled" in other["error"] and other["soon"], (
            ended.results
        )


def test_ranks_that_hold_the_same_share_it_out() -> None:
    spec = make_spec(num_layers=2, num_kv_heads=2)
    weights = weights_of(spec)
    grid = GridShape(tp=2, dp=3)
    whole = megatron_layouts(weights, spec, grid, padded_vocab_size=64)
    shared = dealt(whole, 6)
    for tp_rank in range(2):
        replicas = [rank for rank in range(6) if grid.coords(rank).tp == tp_rank]
        held = [
            (piece.tensor, piece.box)
            for rank in replicas
            for piece in shared(rank).pieces
        ]
        assert len(set(held)) == len(held)
        assert sorted(held) == sorted(
            (piece.tensor, piece.box) for piece in whole(replicas[0]).pieces
        )
        sizes = [shared(rank).numel for rank in replicas]
        assert max(sizes) < 0.7 * sum(sizes)
        # What shares a tensor stays together, so that no rank keeps a tensor for a part
        # of it.
        homes = [set(shared(rank).local_shapes) for rank in replicas]
        assert sum(map(len, homes)) == len(set().union(*homes))
