"""Ranks on which flows run: those of the job that this process has joined, or all ranks that torchrun started."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta

import torch.distributed as dist

from megaverl.dataflow.plan import Places
from megaverl.distributed.collectives import barrier
from megaverl.distributed.job_context import JobContext, join
from megaverl.distributed.placement import ResolvedPlacement, RoleGroup, ranks_text
from megaverl.distributed.rendezvous import NodeInfo, introduce
from megaverl.distributed.store import job_store
from megaverl.errors import ConfigError
from megaverl.platform import platform

TIMEOUT = timedelta(minutes=10)  # for ranks to join, and for every message between them


class _Here:
    """Context of this process, if it has joined a job."""

    context: JobContext | None = None


def use_context(context: JobContext) -> None:
    """Use the context of a job for all flows that run afterwards."""
    _Here.context = context


def context_for(places: Places) -> JobContext | None:
    """Return the context of the job's ranks, which join here if they have not yet. None if it is the only process.

    Raises:
        ConfigError: a role is placed on a rank that does not exist.
        TrainingStopped: ranks do not join in time.
    """
    context, size = _Here.context, int(os.environ.get("WORLD_SIZE", "1"))
    if context is not None:
        size = context.placement.size
    elif size == 1:
        return None
    outside = [
        f"places: {role} is on rank {max(ranks)}; the job has {size} ranks, 0 to {size - 1}"
        for role, ranks in places.items()
        if ranks and max(ranks) >= size
    ]
    if outside:
        raise ConfigError("\n".join(outside))
    if context is None:
        context = _Here.context = _join(places)
    return context


def _join(places: Places) -> JobContext:
    """Join all ranks as one role group, in which every role has the ranks that the flow gives it.

    Raises:
        ConfigError: the program has already initialized torch.distributed.
    """
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialised already. Leave that to the flow, or call megaverl's init_distributed."
        )
    platform.start()
    store, rank, size = job_store(TIMEOUT)
    nodes = introduce(store, rank, size, NodeInfo(), TIMEOUT)
    every = tuple(range(size))
    roles = {"coordinator": (0,)} | {
        role: tuple(ranks) for role, ranks in places.items()
    }
    role_group = RoleGroup("flow on ranks " + ranks_text(every), every, tuple(roles))
    context = join(
        ResolvedPlacement(size, roles, (role_group,), (every,), nodes),
        store,
        rank,
        TIMEOUT,
    )
    atexit.register(_leave)
    return context


def _leave() -> None:
    """Leave the job together with the other ranks at the program's end.

    If an error ends the program, torchrun stops the other ranks.
    """
    if getattr(sys, "last_value", None) is None and dist.is_initialized():
        barrier()
        dist.destroy_process_group()
