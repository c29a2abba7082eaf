"""What the ranks do in test_liveness.py: actor on 0-1, critic on 2, coordinator on 3."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megaverl.checkpoint.commit import Committer
from megaverl.distributed.collectives import barrier
from megaverl.distributed.heartbeat import RankWatch
from megaverl.distributed.job_context import JobContext
from megaverl.distributed.liveness import Liveness
from megaverl.errors import CheckpointError, TrainingStopped
from tests.distributed.ranks import start

ROLES = {"actor": "0-1", "critic": 2, "coordinator": 3}


def make() -> tuple[JobContext, Liveness]:
    context = start({**ROLES, "rollout": "actor"})
    watch = RankWatch(stalled_after=1.0, interval=0.1, lost_after=5.0, grace=0.5)
    liveness = Liveness(
        context.store,
        context.rank,
        4,
        coordinator=3,
        watch=watch,
        name=context.describe,
        world=context.role_group.name,
    )
    return context, liveness


def role_of(context: JobContext) -> str:
    return {0: "actor", 1: "actor", 2: "critic"}.get(context.rank, "")


def committed() -> list[Any]:
    """The protocol of the checkpoint store, with the coordinator as the one that commits."""
    context = start({**ROLES, "rollout": "actor"})
    commits = Committer(context.control, context.placement.coordinator)
    collected = commits.conclude(
        {"rank": context.rank}, lambda reports: [*reports, context.rank]
    )
    answer = commits.decide(lambda: {"by": context.rank})

    def fail() -> None:
        raise CheckpointError("the disk is full")

    try:
        commits.decide(fail)
        error = ""
    except CheckpointError as caught:
        error = str(caught)
    return [commits.decides, collected, answer, error]


def lost(rank: int, how: str) -> str:
    """`rank` is lost in its third update; the others say what they hear, unless they are ended."""
    context, liveness = make()
    role = role_of(context)
    try:
        for step in range(5):
            liveness.status(f"{role}_update" if role else "wait")
            if step == 2 and context.rank == rank:
                vanish(how)
            if role:
                dist.all_reduce(torch.ones(1))
            barrier(context.control)
    except (TrainingStopped, RuntimeError) as error:  # as the trainer sees it
        return str(liveness.explain(error))
    return "nothing happened"


def waits_on_the_device(stage: str) -> str:
    """Rank 1 stalls in a stage; rank 0 of the same world is in `stage` and reads a
    number of what is not computed, as after a collective of NCCL's; the other worlds
    wait for both.
    """
    context, liveness = make()
    for begun in ("rollout", "values", "actor_update"):
        liveness.status(begun, 2)
        if context.rank == 1 and begun == "values":
            vanish("stalled")
        if context.rank == 0 and begun == stage:
            NotComputed().item()
    try:
        barrier(context.control)
    # A rank that has heard the verdict may end before this one has.
    except TrainingStopped as error:
        return str(liveness.explain(error))
    return "nothing happened"


class NotComputed:
    """A tensor whose value never comes."""

    def __init__(self) -> None:
        end, self._other_end = os.pipe()
        self.item = partial(os.read, end, 1)  # blocks in C, without a frame of its own


def vanish(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.01)  # busy, as far as anybody can see
