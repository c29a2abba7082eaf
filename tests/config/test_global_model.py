"""What goes together with `coordinator.aggregates: gradients`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megaverl.config.global_model import global_section
from megaverl.config.grids import smallest_world
from megaverl.distributed.grid import GridSizes, Sizes
from megaverl.distributed.placement import Node, PlacementError
from megaverl.distributed.placement_resolver import resolve
from tests.config.test_placement import InvalidConfig, load

PLACED = "placement={rollout: 0, actor: 1-2, coordinator: 3, actor_islands: 2}"
GRADIENTS = "coordinator.aggregates=gradients"


def test_the_coordinator_has_the_ranks_of_its_grid() -> None:
    two = "placement={rollout: 0, actor: 1-2, coordinator: 3-4, actor_islands: 2}"
    load(PLACED, GRADIENTS, world=4)
    load(two, "coordinator={aggregates: gradients, pp: 2}", world=5)
    assert smallest_world(load(two, "coordinator={aggregates: gradients, tp: 2}")) == 5
    with pytest.raises(InvalidConfig, match="it is one rank"):
        load(two, world=5)


def test_nodes_may_take_the_coordinator() -> None:
    """Two nodes of two ranks hold the global model, and a coordinator without one has a single rank."""
    nodes = [
        Node("gen", 2, ("rollout",)),
        Node("a", 2, ("actor",)),
        Node("b", 2, ("actor",)),
        Node("c", 2, ("coordinator",)),
        Node("d", 2, ("coordinator",)),
    ]
    grids: dict[str, GridSizes | None] = {
        "actor": Sizes(tp=2),
        "rollout": Sizes(),
        "coordinator": Sizes(tp=2, pp=2),
    }
    placement = resolve({}, 10, grids, nodes, islands=2)
    assert placement.ranks["coordinator"] == (6, 7, 8, 9)
    assert placement.coordinator == 6 and placement.role_groups[-1].size == 4
    with pytest.raises(PlacementError, match="all claim it"):
        resolve({}, 10, {**grids, "coordinator": None}, nodes, islands=2)
    nodes = [replace(node, memory=8e10 * (node.name != "d")) for node in nodes]
    with pytest.raises(PlacementError, match="'d' has no GPU"):
        resolve({}, 10, grids, nodes, islands=2)


def test_the_global_model_has_a_grid_of_its_own() -> None:
    config = load("actor={tp: 2, cp: 2, megatron: {sequence_parallel: true}}")
    coordinator = config.coordinator.model_copy(update={"pp": 4})
    section = global_section(config.actor, coordinator)
    assert (section.tp, section.cp, section.pp) == (1, 1, 4)
    assert section.megatron == config.actor.megatron and config.actor.tp == 2


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        ([PLACED, "coordinator.tp=2"], "coordinator.tp", "only a global model has"),
        ([GRADIENTS], "coordinator.aggregates", "has no islands"),
        (
            [PLACED, GRADIENTS, "coordinator.pp=2"],
            "placement.coordinator",
            "sharded over 2 ranks",
        ),
        (
            [PLACED, GRADIENTS, "coordinator.islands_every=2"],
            "coordinator.islands_every",
            "take no local steps",
        ),
        (
            [PLACED, GRADIENTS, "coordinator.islands_compress=bfloat16"],
            "coordinator.islands_compress",
            "sent as they are",
        ),
        (
            [PLACED, GRADIENTS, "reshard.overlap=true"],
            "reshard.overlap",
            "after the global model's step",
        ),
        (
            [PLACED, GRADIENTS, "reshard.folder=shared"],
            "reshard.folder",
            "do not travel through files",
        ),
        ([PLACED, GRADIENTS, "model.dtype=float16"], "model.dtype", "Use bfloat16"),
        ([PLACED, GRADIENTS, "actor.engine=fsdp"], "actor.engine", "Use megatron"),
        ([PLACED, GRADIENTS, "actor.lora.rank=4"], "actor.lora", "adapters are small"),
        (
            [PLACED, GRADIENTS, "actor.ddp.use_distributed_optimizer=true"],
            "actor.ddp.use_distributed_optimizer",
            "have no optimizer",
        ),
        (
            [PLACED, GRADIENTS, "actor.megatron.fp8=hybrid"],
            "actor.megatron.fp8",
            "sent in model.dtype",
        ),
        (
            [PLACED, GRADIENTS, "rollout.engine=server"],
            "rollout.engine",
            "Use vllm or hf",
        ),
        (
            [
                "placement={rollout: 0, actor: 1-2, coordinator: 2-3, actor_islands: 2}",
                "coordinator={aggregates: gradients, tp: 2}",
            ],
            "placement.coordinator",
            "is the actor's rank 2",
        ),
    ],
)
def test_refused(overrides: list[str], key: str, said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(*overrides, world=4)
    lines = str(caught.value).splitlines()
    assert any(key in line and said in line for line in lines), caught.value
