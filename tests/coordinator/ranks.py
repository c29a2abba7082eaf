"""What the ranks do in tests/coordinator: actor on 0-1, critic on 2, coordinator on 3, where nothing else is said."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megaverl.checkpoint.commit import Committer
from megaverl.coordinator import Coordinator, GradientReport, Participant, Rules
from megaverl.distributed.collectives import barrier
from megaverl.distributed.liveness import Liveness, Timeouts
from megaverl.distributed.placement import Node, parse_wanted
from megaverl.distributed.placement_resolver import resolve
from megaverl.distributed.store import job_store
from megaverl.distributed.worlds import Fabric, join
from megaverl.errors import CheckpointError, TrainingStopped
from megaverl.trainer.islands import IslandMember, serve_join
from tests.distributed.ranks import start

ROLES = {"actor": "0-1", "critic": 2, "coordinator": 3}


def make(timeout: float = 30.0) -> tuple[Fabric, Coordinator, Liveness]:
    fabric = start({**ROLES, "rollout": "actor"})
    fabric = replace(fabric, timeout=timedelta(seconds=timeout))
    timeouts = Timeouts(stalled_after=1.0, interval=0.1, lost_after=5.0, grace=0.5)
    liveness = Liveness(
        fabric.store, fabric.rank, 4, coordinator=3, timeouts=timeouts, name=fabric.describe, world=fabric.world.name
    )
    participants = (Participant("actor", 0), Participant("critic", 2))
    return fabric, Coordinator(fabric, participants, Rules(max_staleness=1), liveness=liveness), liveness


def role_of(fabric: Fabric) -> str:
    return {0: "actor", 1: "actor", 2: "critic"}.get(fabric.rank, "")


def good(step: int, **changes: Any) -> GradientReport:
    return GradientReport(step, step, tokens=8.0, squared_norm=16.0, divided_by=8.0, **changes)


def rounds(num: int) -> dict[str, Any]:
    """Decisions together and apart, then many for the clock, then a NaN of the critic's."""
    fabric, coordinator, liveness = make()
    role, seen, stopped, next_schedule = role_of(fabric), [], "", None
    other = {"actor": "critic", "critic": "actor"}.get(role, "")
    committed = commit_things(fabric)
    if role:
        limit = {"max_norm": 1.0 if role == "actor" else 0.0}
        together = coordinator.decide(role, good(0, **limit), [other])
        apart = coordinator.decide(role, good(1, newest=2 if role == "critic" else 0, **limit))
        for decision in (together, apart):
            seen.append([decision.verdict, decision.reason, decision.version, decision.clip, decision.schedule_step])
        begin = coordinator.bytes_sent + coordinator.bytes_received
        start_time = time.perf_counter()
        for step in range(2, 2 + num):
            version = step if role == "actor" else step - 1  # one of the critic's was skipped
            decision = coordinator.decide(role, replace(good(step), version=version), [other])
            next_schedule = decision.schedule_step if next_schedule is None else next_schedule
        seconds = (time.perf_counter() - start_time) / num
        num_bytes = (coordinator.bytes_sent + coordinator.bytes_received - begin) / num
        try:
            step = 2 + num
            bad = replace(good(step), squared_norm=math.nan, version=step - 1)
            coordinator.decide(role, bad if role == "critic" else good(step), [other])
        except TrainingStopped as error:
            stopped = str(error)
    else:
        seconds = num_bytes = 0.0
    try:
        coordinator.close()
    except TrainingStopped as error:
        stopped = str(error)
    progress = coordinator.progress.to_dict() if fabric.rank == 3 else None
    barrier(fabric.control)
    liveness.leave()
    return {
        "seen": seen,
        "next_schedule": next_schedule,
        "seconds": seconds,
        "bytes": num_bytes,
        "stopped": stopped,
        "progress": progress,
        "committed": committed,
    }


def commit_things(fabric: Fabric) -> list[Any]:
    """The protocol of the checkpoint store, with the coordinator as the one that commits."""
    commits = Committer(fabric.control, fabric.placement.coordinator)
    collected = commits.conclude({"rank": fabric.rank}, lambda reports: [*reports, fabric.rank])
    answer = commits.decide(lambda: {"by": fabric.rank})

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
    fabric, coordinator, liveness = make(timeout=3.0)
    role = role_of(fabric)
    other = {"actor": "critic", "critic": "actor"}.get(role, "")
    try:
        for step in range(5 if role else 0):
            liveness.status(f"{role}_update")
            if step == 2 and fabric.rank == rank:
                vanish(how)
            dist.all_reduce(torch.ones(1))
            coordinator.decide(role, good(step), [other])
            liveness.status("waiting for the next step")
        if fabric.rank == rank:
            vanish(how)
        coordinator.close()
    except TrainingStopped as error:
        return str(error)
    except RuntimeError as error:  # a collective's, as the trainer would see it
        return str(liveness.explain(error))
    return "nothing happened"


def unheard() -> str:
    """The critic is there, and does not report: nobody else would notice."""
    fabric = replace(start({**ROLES, "rollout": "actor"}), timeout=timedelta(seconds=1))
    coordinator = Coordinator(fabric, (Participant("actor", 0), Participant("critic", 2)), Rules())
    told = ""
    try:
        if role_of(fabric) == "actor":
            coordinator.decide("actor", good(0), ["critic"])
        barrier(fabric.control)
        coordinator.close()
    except TrainingStopped as error:
        told = str(error)
        if role_of(fabric) == "actor":
            barrier(fabric.control)
            coordinator.close()
    return told


def waits_on_the_device(stage: str) -> str:
    """Rank 1 stalls in a stage; rank 0 of the same world is in `stage` and reads a number of what is not computed, as
    after a collective of NCCL's; the other worlds wait for both."""
    fabric, _, liveness = make()
    for begun in ("rollout", "values", "actor_update"):
        liveness.status(begun, 2)
        if fabric.rank == 1 and begun == "values":
            vanish("stalled")
        if fabric.rank == 0 and begun == stage:
            NotComputed().item()
    try:
        barrier(fabric.control)
    except TrainingStopped as error:  # a rank that has heard the verdict may end before this one has
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


def islands_join() -> dict[str, Any]:
    """Three islands of one rank each, and on rank 3 the coordinator, whose node has no GPU where the others' have."""
    deadline = timedelta(seconds=30)
    store, rank, size = job_store(deadline)
    wanted = {"actor": parse_wanted("0-2"), "coordinator": parse_wanted(3)}
    grids: dict[str, Any] = {"actor": None, "rollout": None, "reward": None}
    nodes = [Node("strong", 3, memory=1e9), Node("small", 1)]
    fabric = join(resolve(wanted, size, grids, nodes, islands=3), store, rank, deadline)
    assert (fabric.group is fabric.control) == (rank == 3) and dist.get_world_size(fabric.control) == 4
    if rank == 3:
        serve_join(fabric)
        serve_join(fabric)
        try:
            serve_join(fabric)
        except TrainingStopped as error:
            return {"joins": 3, "refused": str(error)}
    gradients = [make_gradients(island) for island in range(3)]
    tokens = [3.0, 1.0, 8.0]
    divisors = [3.0, 1.0, 1.0]  # of each island's loss; that over all islands' tokens is divided by their number
    expected = {
        name: sum(one[name].double() * by / sum(tokens) for one, by in zip(gradients, divisors, strict=True)).float()
        for name in gradients[0]
    }
    errors, digest, total = [], 0.0, 0.0
    for compress in (False, True):
        member = IslandMember(fabric, compress=compress, bucket=64)
        mine = {name: tensor.clone() for name, tensor in gradients[rank].items()}
        total = member.join(mine, tokens=tokens[rank], divided_by=divisors[rank])
        errors.append(max(float((mine[name] - expected[name]).abs().max()) for name in mine))
        digest = float(sum(tensor.double().sum() for tensor in mine.values()))
    try:
        IslandMember(fabric, bucket=64).join({"w": torch.zeros(4 + (rank == 2))}, tokens=1.0, divided_by=1.0)
        refused = ""
    except TrainingStopped as error:
        refused = "islands differ" if "islands differ" in str(error) else str(error)
    return {"error": errors[0], "compressed": errors[1], "digest": digest, "tokens": total, "refused": refused}


def make_gradients(island: int) -> dict[str, torch.Tensor]:
    """The same shapes for all, more than a bucket holds."""
    generator = torch.Generator().manual_seed(island)
    return {"w": torch.randn(9, 11, generator=generator), "b": torch.randn(70, generator=generator), "s": torch.ones(1)}
