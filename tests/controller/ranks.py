"""What real ranks run in tests of the controller over sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megaverl.controller import relay
from megaverl.controller.connection import merge_dictionaries
from megaverl.controller.core import CallTimeouts, Controller
from megaverl.controller.failures import CallFailed, ControllerLost
from megaverl.controller.messages import Left, RowTransfer, encode
from megaverl.controller.references import PendingCall, Ref
from megaverl.controller.serving import run_blocking, serve
from megaverl.controller.status_board import StatusBoard
from megaverl.controller.thread import ControllerThread
from megaverl.controller.zmq_transport import ZmqRank
from megaverl.distributed.collectives import reduce_json
from megaverl.distributed.curve_sockets import Address
from megaverl.distributed.placement import Node, ResolvedPlacement, RoleGroup
from tests.controller.every_rank import EveryRank

FOUR_RANKS = (0, 1, 2, 3)
TWO_NODES = ResolvedPlacement(
    size=4,
    ranks={"actor": FOUR_RANKS},
    role_groups=(RoleGroup("actor", FOUR_RANKS, ("actor",)),),
    islands=(FOUR_RANKS,),
    nodes=(Node("first", 2), Node("second", 2)),
)


@dataclass
class Shard:
    """Rows of a matrix, by number."""

    rows: dict[int, torch.Tensor]

    def held_rows(self) -> tuple[int, ...]:
        return tuple(sorted(self.rows))

    def describe(self) -> int:
        return sum(len(row) for row in self.rows.values())


class GlooMover:
    """Moves rows of a `Shard` with blocking sends, as NCCL's would block."""

    async def send(self, move: RowTransfer, value: Any) -> None:
        rows = sorted(value.rows) if move.rows is None else move.rows
        dist.send(torch.stack([value.rows[row] for row in rows]), move.dest)

    async def receive(self, move: RowTransfer, present: Any) -> Shard:
        assert move.rows is not None
        block = torch.empty(len(move.rows), 3)
        dist.recv(block, move.source)
        received = dict(zip(move.rows, block, strict=True))
        return Shard({**(present.rows if present is not None else {}), **received})


class Worker:
    """Generates rows, adds them up over its group, and misbehaves where a test asks for it."""

    def __init__(self, rank: int, board: StatusBoard) -> None:
        self._rank, self._board = rank, board

    def generate(self, step: int, num_rows: int) -> Shard:
        mine = range(self._rank, num_rows, 2)
        return Shard({row: torch.full((3,), float(step * 100 + row)) for row in mine})

    def add_up(self, shard: Shard) -> float:
        return float(sum(row.sum() for row in shard.rows.values()))

    def fail(self, rank: int) -> int:
        if rank == self._rank:
            raise SystemExit(0)
        return 0

    def stay(self, rank: int) -> int:
        self._board.enter("decode")
        while rank == self._rank:
            time.sleep(0.05)
        return 0

    def rest(self, rank: int) -> int:
        time.sleep(1.0)
        return 0

    def linger(self, rank: int) -> int:
        if rank == self._rank:
            time.sleep(1.2)
        return 0

    def die(self, rank: int) -> int:
        if rank == self._rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        return 0


class Group(EveryRank):
    def generate(self, step: int, num_rows: int) -> PendingCall[Ref[Shard]]:
        return self.keep("generate", step, num_rows)

    def add_up(self, shard: Ref[Shard]) -> PendingCall[list[float]]:
        everything = dict.fromkeys(self.ranks)
        return self.report_all("add_up", float, shard, wanted={shard.id: everything})

    def misbehave(self, how: str, rank: int) -> PendingCall[int]:
        return self.report(how, int, rank)


async def split_steps(
    rollout: Group, actor: Group, *, how: str = ""
) -> list[list[float]]:
    """Generate a step ahead of the ranks that add up; fail in the second step where `how` says so."""
    sums = []
    coming = rollout.generate(0, 7)
    for step in range(3):
        shard = await coming
        assert shard.describe(int) in (9, 12)
        added = actor.add_up(shard)
        coming = rollout.generate(step + 1, 7)
        sums.append(await added)
        if how == "lose the controller" and step == 1:
            resting = actor.misbehave("rest", 3)
            rollout.misbehave("rest", 1)
            # All are inside a call, and reply to a process that is gone.
            await asyncio.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
            await resting
        if how == "outlast the relay":
            if step == 2:
                # Not awaited: rank 2, which hosts the relay of rank 3, leaves before it.
                actor.misbehave("linger", 3)
        elif how == "die as the relay" and step == 1:
            await actor.misbehave("die", 2)
        elif how and step == 1:
            await actor.misbehave(how, 3)
    await coming
    return sums


def run(how: str = "", relayed: bool = False) -> dict[str, Any]:
    """Run `split_steps` on four ranks of the default process group: rollout on 0 and 1, actor on 2 and 3.

    Args:
        how: how rank 3 misbehaves in the second step; "die as the relay": rank 2, which hosts its node's relay;
            "outlast the relay": rank 3 stays in the last call when rank 2 has left.
        relayed: ranks connect as in a large job on two nodes, each with a relay.
    """
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    key = f"controller-{how}-{relayed}"
    thread: ControllerThread | None = None
    result_of_program: Future[list[list[float]]] | None = None
    if rank == 0:
        thread = ControllerThread(
            "127.0.0.1",
            4,
            lambda transport: Controller(transport, 4, timeouts=_timeouts(how)),
        )
        store.set(key, thread.address.encode().hex())
    board = StatusBoard()
    address = Address.decode(bytes.fromhex(store.get(key).decode()))
    relay.RELAYED_FROM = 4 if relayed else 5
    nearest = relay.node_address(
        address, TWO_NODES, rank, lambda part: reduce_json(part, merge_dictionaries)
    )
    workers = {"rollout": Worker(rank, board), "actor": Worker(rank, board)}
    leave_after = {"lose the controller": 20.0, "outlast the relay": 0.3}.get(how, 1.0)
    with (
        nearest as address,
        ZmqRank(address, rank, board, leave_after=leave_after) as transport,
    ):
        assert (
            address.endpoint
            == Address.decode(bytes.fromhex(store.get(key).decode())).endpoint
        ) is not relayed
        if thread is not None:
            result_of_program = thread.start(partial(_program, how=how))
        try:
            reason = run_blocking(
                serve(rank, transport, workers, GlooMover(), board)
            ).reason
        except ControllerLost as error:
            return {"lost": str(error)}
        transport.send(encode(Left()))
    result: dict[str, Any] = {"reason": reason}
    if thread is not None and result_of_program is not None:
        try:
            result["sums"] = result_of_program.result()
        except CallFailed as error:
            result |= {
                "error": str(error),
                "ranks": list(error.ranks),
                "call": error.call,
            }
        thread.close()
    return result


def lost(how: str, relayed: bool = False) -> dict[str, Any]:
    """Run `run` in a process group of its own, as ranks that torchrun has started do."""
    dist.init_process_group("gloo")
    return run(how, relayed)


def _timeouts(how: str) -> CallTimeouts:
    return CallTimeouts(call=1.5 if how == "stay" else 60.0, answer=0.5, leave=2.0)


def _program(
    controller: Controller, how: str
) -> Coroutine[Any, Any, list[list[float]]]:
    rollout, actor = (
        Group("rollout", (0, 1), controller),
        Group("actor", (2, 3), controller),
    )
    return split_steps(rollout, actor, how=how)
