"""The ranks that a program's own flow runs on: torchrun's, met when such a flow is run for the first time."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from megaverl.dataflow.carrier import Carrier
from megaverl.dataflow.plan import Places
from megaverl.distributed.placement import ResolvedPlacement, World, ranks_text
from megaverl.distributed.rendezvous import NodeInfo, introduce
from megaverl.distributed.store import job_store
from megaverl.distributed.worlds import Fabric, join
from megaverl.errors import ConfigError
from megaverl.platform import platform

TIMEOUT = timedelta(minutes=10)  # for ranks to come, and for every message between them


class _Here:
    """The fabric of this process."""

    fabric: Fabric | None = None


def use_fabric(fabric: Fabric) -> None:
    """Flows that are run from here on go over this one, the job's."""
    _Here.fabric = fabric


def carrier_for(places: Places) -> Carrier | None:
    """What carries values between these ranks; None where this process is the only one.

    Raises:
        ConfigError: a role has a rank that there is not.
        TrainingStopped: ranks that do not come.
    """
    fabric = _Here.fabric
    if fabric is None and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    size = fabric.placement.size if fabric is not None else int(os.environ["WORLD_SIZE"])
    outside = [
        f"places: {role} is on rank {max(ranks)}; the job has {size} ranks, 0 to {size - 1}"
        for role, ranks in places.items()
        if ranks and max(ranks) >= size
    ]
    if outside:
        raise ConfigError("\n".join(outside))
    if fabric is None:
        fabric = _Here.fabric = _join(places)
    return Carrier(fabric)


def _join(places: Places) -> Fabric:
    """One world of all ranks, in which every role has those that the flow gives it."""
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialised already. Leave that to the flow, or call megaverl's init_distributed."
        )
    platform.start()
    store, rank, size = job_store(TIMEOUT)
    nodes = introduce(store, rank, size, NodeInfo(), TIMEOUT)
    every = tuple(range(size))
    roles: Mapping[str, tuple[int, ...]] = {role: tuple(ranks) for role, ranks in places.items()}
    node_of = tuple(number for number, node in enumerate(nodes) for _ in range(node.size))
    world = World("flow on ranks " + ranks_text(every), every, tuple(roles))
    fabric = join(ResolvedPlacement(size, roles, (world,), (every,), nodes, node_of), store, rank, TIMEOUT)
    atexit.register(_leave)
    return fabric


def _leave() -> None:
    """At the program's end: with the others, unless an error ends it, which torchrun tells them."""
    if getattr(sys, "last_value", None) is None and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
