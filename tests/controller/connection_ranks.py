"""What the ranks do in test_connection.py: actor on 0-1, critic on 2, coordinator on 3."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megaverl.checkpoint.commit import Committer
from megaverl.controller.connection import ControllerConnection
from megaverl.controller.core import CallTimeouts, Controller
from megaverl.controller.messages import RowTransfer
from megaverl.controller.references import PendingCall
from megaverl.distributed.collectives import barrier
from megaverl.distributed.heartbeat import RankWatch
from megaverl.distributed.job_context import JobContext
from megaverl.errors import CheckpointError, TrainingStopped
from tests.controller.every_rank import EveryRank
from tests.distributed.ranks import start

ROLES = {"actor": "0-1", "critic": 2, "coordinator": 3}


def make() -> tuple[JobContext, ControllerConnection]:
    context = start({**ROLES, "rollout": "actor"})
    watch = RankWatch(stalled_after=1.0, interval=0.1, lost_after=5.0, grace=0.5)
    connection = ControllerConnection(
        context, CallTimeouts(leave=2.0), watch=watch, name=context.describe
    )
    return context, connection


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
    context, connection = make()
    role = role_of(context)
    try:
        for step in range(5):
            connection.status(f"{role}_update" if role else "wait")
            if step == 2 and context.rank == rank:
                # Long enough in this stage that the others have been told of it.
                time.sleep(0.4)
                vanish(how)
            if role:
                dist.all_reduce(torch.ones(1))
            barrier(context.control)
    except (TrainingStopped, RuntimeError) as error:  # as the trainer sees it
        return str(connection.explain(error))
    return "nothing happened"


def waits_on_the_device(stage: str) -> str:
    """Rank 1 stalls in a stage; rank 0 of the same world is in `stage` and reads a
    number of what is not computed, as after a collective of NCCL's; the other worlds
    wait for both.
    """
    context, connection = make()
    for begun in ("rollout", "values", "actor_update"):
        connection.status(begun, 2)
        if context.rank == 1 and begun == "values":
            vanish("stalled")
        if context.rank == 0 and begun == stage:
            NotComputed().item()
    try:
        barrier(context.control)
    # A rank that has heard the verdict may end before this one has.
    except TrainingStopped as error:
        return str(connection.explain(error))
    return "nothing happened"


class NotComputed:
    """A tensor whose value never comes."""

    def __init__(self) -> None:
        end, self._other_end = os.pipe()
        self.item = partial(os.read, end, 1)  # blocks in C, without a frame of its own


class Adder:
    """Worker that adds its rank to a number."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def add(self, number: int) -> int:
        return self._rank + number


async def add_up(controller: Controller, number: int, sums: list[int]) -> None:
    for step in range(3):
        sums.append(sum(await Adders("all", range(4), controller).add(number + step)))


class Adders(EveryRank):
    def add(self, number: int) -> PendingCall[list[int]]:
        return self.report_all("add", int, number)


class NoMover:
    """Mover of programs that move nothing."""

    async def send(self, move: RowTransfer, value: object) -> None:
        raise NotImplementedError

    async def receive(self, move: RowTransfer, present: object | None) -> object:
        raise NotImplementedError


def several_programs(end: str) -> Any:
    """Serve two programs over one connection, then leave the job as `end` says."""
    context, connection = make()
    sums: list[int] = []
    for number in (10, 20):
        connection.status("between", number)
        connection.serve(
            partial(add_up, number=number, sums=sums),
            {"all": Adder(context.rank)},
            NoMover(),
        )
    connection.status("export")
    if end == "leave":
        barrier(context.control)
        connection.leave()
        return [sums, connection.reason]
    if end == "alike":
        return connection.explain(ValueError("the disk is full"))
    try:
        if context.rank == 1:
            raise KeyboardInterrupt if end == "interrupted" else ValueError("no room")
        barrier(context.control)
    except BaseException as error:
        first = connection.explain(error)
        assert first == connection.explain(RuntimeError("what follows")) or not first
        try:
            connection.serve(partial(add_up, number=0, sums=sums), {}, NoMover())
        except TrainingStopped as stopped:
            return [first, str(stopped)]
    return "nothing happened"


def silent() -> str:
    """The coordinator's process is stopped without ending, as if its node were cut off."""
    context, connection = make()
    connection.status("values", 3)
    barrier(context.control)
    time.sleep(0.5)
    if context.rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        barrier(context.control)
    except TrainingStopped as error:
        return str(connection.explain(error))
    return "nothing happened"


def vanish(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.01)  # busy, as far as anybody can see
