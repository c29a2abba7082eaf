"""Planned memory and traffic of a global model on the coordinator's ranks."""

from __future__ import annotations

import math

import pytest

from megaverl.models.architectures import weights_of
from megaverl.planner.hardware import Hardware
from megaverl.planner.job import PlannedJob
from megaverl.planner.memory import MemoryModel
from megaverl.planner.operators import StepLoad, operations
from megaverl.planner.simulator import default_lengths
from megaverl.planner.traffic import make_traffic, make_update_traffic
from tests.planner.jobs import make
from tests.sharding.specs import make_spec

# Four islands of two ranks.
PLACED = "placement={rollout: 0, actor: 1-8, coordinator: 9-10, actor_islands: 4}"
SIZES = {"hidden_size": 256, "ffn_hidden_size": 512, "head_dim": 64, "vocab_size": 1280}
SETTINGS = ("model.dtype=bfloat16", "algorithm={name: grpo, group_size: 4}")
MODEL = make_spec("LlamaForCausalLM", **SIZES)


def job(coordinator: str) -> PlannedJob:
    has_global_model = "gradients" in coordinator
    placed = PLACED if has_global_model else PLACED.replace("9-10", "9")
    return make(
        MODEL, 10 + has_global_model, placed, coordinator, "actor.tp=2", *SETTINGS
    )


def test_the_optimizer_is_where_the_global_model_is() -> None:
    planned = job("coordinator={aggregates: gradients, pp: 2}")
    memory = MemoryModel(planned).ranks()
    elements = sum(math.prod(weight.shape) for weight in weights_of(MODEL))
    replica, *shards = (memory[rank].parts for rank in (1, 9, 10))
    assert replica["actor"]["optimizer"] == 0 and memory[1].saved == 0
    # In float32: the weights and Adam's two moments. Buffers are padded a little.
    optimizer = sum(parts["global_actor"]["optimizer"] for parts in shards)
    assert optimizer == pytest.approx(12 * elements, rel=0.01)
    staged = sum(parts["global_actor"]["gradients"] for parts in shards)
    assert staged == pytest.approx(2 * 4 * elements, rel=0.01)
    saved = sum(rank.saved for rank in memory)
    assert saved == pytest.approx(14 * elements, rel=0.01)
    assert not any("global_actor forward" in rank.phases for rank in memory)


def test_an_update_moves_every_gradient_and_every_weight_once() -> None:
    planned = job("coordinator={aggregates: gradients, pp: 2}")
    elements = sum(math.prod(weight.shape) for weight in weights_of(MODEL))
    update = make_update_traffic(planned, "actor")
    assert len(update.gradients) == 4
    for transfer in update.gradients:
        received = [sum(rank.from_rank.values()) for rank in transfer.ranks]
        assert sum(received) == sum(received[9:]) == 4 * elements
    received = [sum(rank.from_rank.values()) for rank in update.weights.ranks]
    norms = sum(
        math.prod(weight.shape)
        for weight in weights_of(MODEL)
        if len(weight.shape) == 1
    )
    # Both tensor-parallel ranks of an island have the norms.
    assert sum(received) == sum(received[1:9]) == 4 * 2 * (elements + norms)
    # The engine's weights come from the coordinator's ranks.
    sync = make_traffic(planned).ranks[0].from_rank
    assert set(sync) == {9, 10}


def test_a_step_waits_for_the_transfers() -> None:
    planned = job("coordinator={aggregates: gradients, pp: 2}")
    load = StepLoad(planned, Hardware.read("h100"), default_lengths(planned), None)
    named = {operation.name: operation for operation in operations(load)}
    updates = planned.config.algorithm.num_mini_batches
    assert named["actor_update"].seconds > updates * load.update_seconds("actor") > 0


def test_one_rank_that_sums_gradients_takes_longer() -> None:
    """In bfloat16 weights are half as large as gradients, and two ranks share them."""

    def seconds(coordinator: str) -> float:
        planned = job(coordinator)
        load = StepLoad(planned, Hardware.read("h100"), default_lengths(planned), None)
        named = {operation.name: operation for operation in operations(load)}
        return named["actor_update"].seconds

    summed = seconds("coordinator.aggregates=statistics")
    assert summed > seconds("coordinator={aggregates: gradients, pp: 2}")
    assert summed > seconds("coordinator.islands_compress=bfloat16")
    assert summed > seconds("coordinator.islands_every=4")
