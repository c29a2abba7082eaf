"""A flow's edges between ranks: the job's where there is one; else torchrun's, met when a flow needs them first."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megaverl.data.batch import RolloutBatch
from megaverl.dataflow.plan import Edge, Places
from megaverl.dataflow.tensor_channel import Reads, TensorChannel
from megaverl.distributed.collectives import barrier
from megaverl.distributed.placement import ResolvedPlacement, World, ranks_text
from megaverl.distributed.rendezvous import NodeInfo, introduce
from megaverl.distributed.store import job_store
from megaverl.distributed.worlds import Fabric, join
from megaverl.errors import ConfigError
from megaverl.platform import platform

TIMEOUT = timedelta(minutes=10)  # for ranks to come, and for every message between them


class Carrier:
    """Carries values between the ranks of a job; `DataFlow.run` is given one.

    Args:
        known: dataclasses that may travel, besides batches, tensors and plain values.
        selective: operators that read some samples of a batch, and not all; known on every rank. Where all that take a
            batch on other ranks are such, each of these ranks gets what it reads.

    Attributes:
        reads: of those of them that this rank runs, which samples; asked when a batch is here.
    """

    def __init__(self, fabric: Fabric, known: Sequence[type] = (), selective: Collection[str] = ()) -> None:
        self.fabric, self._selective = fabric, frozenset(selective)
        self.reads: Mapping[str, Reads] = {}
        self._channel = TensorChannel(fabric, known)

    @property
    def rank(self) -> int:
        return self.fabric.rank

    def send(self, edge: Edge, values: Mapping[str, Any]) -> None:
        """Begin to send `edge.value`."""
        base, scattered = _base(edge, values), self._is_scattered(edge)
        self._channel.send(edge.value, values[edge.value], edge.source, edge.dest, base=base, scattered=scattered)

    def receive(self, edge: Edge, values: Mapping[str, Any]) -> Any:
        """`edge.value`, when it is here."""
        reads = self._reads_of(edge) if self._is_scattered(edge) else None
        return self._channel.receive(edge.value, edge.source, edge.dest, base=_base(edge, values), reads=reads)

    def settle(self) -> None:
        """Until all that was sent has been taken."""
        self._channel.settle()

    def _is_scattered(self, edge: Edge) -> bool:
        """Whether every rank that an edge leads to reads some samples alone."""
        return self._selective.issuperset(edge.takers)

    def _reads_of(self, edge: Edge) -> Reads:
        return Reads.together(self.reads[name] for name in edge.takers)


def _base(edge: Edge, values: Mapping[str, Any]) -> RolloutBatch | None:
    """The first batch that both sides have."""
    return next((values[name] for name in edge.bases if isinstance(values.get(name), RolloutBatch)), None)


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
    fabric, size = _Here.fabric, int(os.environ.get("WORLD_SIZE", "1"))
    if fabric is not None:
        size = fabric.placement.size
    elif size == 1:
        return None
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
    roles = {role: tuple(ranks) for role, ranks in places.items()}
    node_of = tuple(number for number, node in enumerate(nodes) for _ in range(node.size))
    world = World("flow on ranks " + ranks_text(every), every, tuple(roles))
    fabric = join(ResolvedPlacement(size, roles, (world,), (every,), nodes, node_of), store, rank, TIMEOUT)
    atexit.register(_leave)
    return fabric


def _leave() -> None:
    """At the program's end: with the others, unless an error ends it, which torchrun tells them."""
    if getattr(sys, "last_value", None) is None and dist.is_initialized():
        barrier()
        dist.destroy_process_group()
