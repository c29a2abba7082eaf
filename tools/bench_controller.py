#!/usr/bin/env python3
"""Measure the cost of a controller's call by the number of ranks: real sockets, with and without relays.

    python tools/bench_controller.py                        # 4, 64 and 1,024 ranks: a minute
    python tools/bench_controller.py --ranks 4,64 --calls 500

Every rank is a `ZmqRank` with its side thread and its serving thread; they share a few processes, since hundreds of
interpreters do not fit on a laptop. A step is five calls (generate, score, log_probs, update, load) that compute
nothing, so what is printed is the control's own time. A decision is a question of one rank, in a call that all ranks
are in, and the program's answer to all of them. "direct": every rank connects to the controller. "relay": a relay for
each node of eight ranks. All ends share this machine's cores; processor time is that of the controller's process, for
a step, and for a second in which it only watches the ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import multiprocessing.synchronize
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil
import zmq

from megaverl.controller.core import Controller
from megaverl.controller.dialogue import Dialogue
from megaverl.controller.groups import WorkerGroup
from megaverl.controller.messages import (
    CallRequest,
    Left,
    PlainArgument,
    Reply,
    RowTransfer,
    encode,
    encode_value,
)
from megaverl.controller.references import PendingCall
from megaverl.controller.relay import Relay
from megaverl.controller.serving import run_blocking, serve
from megaverl.controller.status_board import StatusBoard
from megaverl.controller.zmq_transport import ZmqController, ZmqRank
from megaverl.distributed.curve_sockets import Address
from megaverl.distributed.heartbeat import RankWatch
from megaverl.distributed.rank_observer import RankObserver
from megaverl.processes import raise_open_files

CALLS = ("generate", "score", "log_probs", "update", "load")
RANKS_PER_NODE = 8
REST = 5.0  # seconds in which the ranks are only watched
JOIN_SECONDS = 120.0


class Worker:
    """Worker whose methods return at once, or only ask the program."""

    def __init__(self, rank: int, dialogue: Dialogue) -> None:
        self._rank, self._dialogue = rank, dialogue

    def decide(self, count: int) -> int:
        """Ask the program `count` times. The first rank asks, and all wait for the answers."""
        for number in range(count):
            run_blocking(self._dialogue.ask(number if self._rank == 0 else None, int))
        return count

    def generate(self, step: int) -> int:
        return step

    score = log_probs = update = load = generate


class Group(WorkerGroup):
    """Handle on the workers of all ranks."""

    def run(self, method: str, step: int) -> PendingCall[int]:
        """Run one of `CALLS`."""
        return self.report(method, int, step)

    def decide(self, count: int) -> PendingCall[int]:
        """Let the first rank ask `count` times."""
        return self.report("decide", int, count, asking=self.ranks[:1])


class _NoMover:
    """Mover of the controller that moves nothing, as the benchmark's calls have no data."""

    async def send(self, move: RowTransfer, value: object) -> None:
        raise NotImplementedError

    async def receive(self, move: RowTransfer, present: object | None) -> object:
        raise NotImplementedError


def serve_ranks(address: Address, ranks: Sequence[int], relays: bool) -> None:
    """Serve several ranks with a thread each; with relays, in nodes of eight ranks."""
    raise_open_files()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 8 * len(ranks) + 64)
    nodes = [
        ranks[first : first + RANKS_PER_NODE]
        for first in range(0, len(ranks), RANKS_PER_NODE)
    ]
    started = (
        [Relay(address, "127.0.0.1", node[0], node) for node in nodes] if relays else []
    )
    threads = []
    for place, node in enumerate(nodes):
        target = started[place].address if relays else address
        for rank in node:
            thread = threading.Thread(target=_serve_one, args=(target, rank, context))
            thread.start()
            threads.append(thread)
    for thread in threads:
        thread.join()
    for relay in started:
        relay.close()


def _serve_one(
    address: Address, rank: int, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    board, dialogue = StatusBoard(observe=RankObserver().observe), Dialogue()
    with ZmqRank(address, rank, board, context=context) as transport:
        run_blocking(
            serve(
                rank,
                transport,
                {"all": Worker(rank, dialogue)},
                _NoMover(),
                board,
                dialogue=dialogue,
            )
        )
        transport.send(encode(Left()))


@dataclass(frozen=True)
class Measured:
    """Cost of the controller at one number of ranks.

    Attributes:
        milliseconds: median of a step of five calls.
        processor: processor time of the controller's process for a step.
        sockets: open connections of the controller's process.
        decision: median of the milliseconds between two questions of a call.
        watching: processor time of the controller's process for a second without calls, in milliseconds.
    """

    milliseconds: float
    processor: float
    sockets: int
    decision: float
    watching: float


async def measure(num_ranks: int, calls: int, relays: bool) -> Measured:
    """Time steps of ranks that live in four processes."""
    transport = ZmqController("127.0.0.1", num_ranks)
    spawn = multiprocessing.get_context("spawn")
    num_processes = min(4, -(-num_ranks // RANKS_PER_NODE))
    share = -(-num_ranks // num_processes)
    share = -(-share // RANKS_PER_NODE) * RANKS_PER_NODE
    processes = []
    for first in range(0, num_ranks, share):
        ranks = range(first, min(first + share, num_ranks))
        process = spawn.Process(
            target=serve_ranks, args=(transport.address, ranks, relays)
        )
        process.start()
        processes.append(process)
    await transport.join(JOIN_SECONDS)
    watch = RankWatch(stalled_after=3600.0)
    controller = Controller(transport, num_ranks, watch=watch)
    controller.start()
    group = Group("all", range(num_ranks), controller)
    try:
        return await controller.run(_steps(group, max(calls // len(CALLS), 5)))
    finally:
        await controller.close()
        await transport.close()
        for process in processes:
            await asyncio.to_thread(process.join)


async def _steps(group: Group, steps: int) -> Measured:
    seconds: list[float] = []
    await group.run("generate", 0)
    sockets = len(
        [
            connection
            for connection in psutil.Process().net_connections("tcp")
            if connection.status == psutil.CONN_ESTABLISHED
        ]
    )
    processor = time.process_time()
    for step in range(steps):
        start = time.perf_counter()
        for name in CALLS:
            await group.run(name, step)
        seconds.append(time.perf_counter() - start)
    processor = (time.process_time() - processor) / steps
    decision = statistics.median(await _time_decisions(group, steps))
    watching = time.process_time()
    await asyncio.sleep(REST)
    watching = (time.process_time() - watching) / REST
    return Measured(
        statistics.median(seconds) * 1e3,
        processor * 1e3,
        sockets,
        decision * 1e3,
        watching * 1e3,
    )


async def _time_decisions(group: Group, count: int) -> list[float]:
    """Return the seconds between the questions of one call."""
    call = group.decide(count)
    seconds: list[float] = []
    last: float | None = None
    while questions := await call.questions(int):
        now = time.perf_counter()
        if last is not None:
            seconds.append(now - last)
        last = now
        call.answer(questions[0])
    await call
    return seconds


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--ranks", default="4,64,1024", help="numbers of ranks (default: 4,64,1024)"
    )
    parser.add_argument(
        "--calls", type=int, default=200, help="calls that are timed (default: 200)"
    )
    options = parser.parse_args()
    raise_open_files()
    call = CallRequest(1, "all", "generate", (PlainArgument(encode_value(1)),))
    sizes = len(encode(call)), len(encode(Reply(1, value=encode_value(1))))
    print(
        f"a call is {sizes[0]} bytes to a rank, its reply {sizes[1]}; a step is {len(CALLS)} calls"
    )
    print(
        f"{'ranks':>6} {'way':>7} {'ms a step':>10} {'processor ms':>13} {'connections':>12} {'ms a decision':>14} "
        f"{'watching, ms/s':>15}"
    )
    for num_ranks in map(int, options.ranks.split(",")):
        for relays in (False, True):
            if relays and num_ranks <= RANKS_PER_NODE:
                continue
            cost = asyncio.run(measure(num_ranks, options.calls, relays))
            route = "relay" if relays else "direct"
            print(
                f"{num_ranks:6} {route:>7} {cost.milliseconds:10.2f} {cost.processor:13.2f} {cost.sockets:12} "
                f"{cost.decision:14.2f} {cost.watching:15.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
