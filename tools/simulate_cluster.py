#!/usr/bin/env python3
"""Control plane of a run of up to 1,024 ranks, without models: its cost for a rank, and the rank named after a loss.

    python tools/simulate_cluster.py                    # 64, 256 and 1,024 ranks: wants a machine to itself
    python tools/simulate_cluster.py --ranks 8 --faults lost --lost-after 3 --stalled-after 3

Ranks are threads of a few processes; rank 0, the coordinator and the rank that a fault hits have a process each. They
call the functions of a real run: `introduce` and `resolve`, gloo whose connections open on first use, `reduce_json`,
`make_plans` with `agree_on_dtypes`, `Committer` with `prepare_folder` and `commit`, `ControllerConnection`. Counted
messages are requests to the store and messages of the group; bytes are those sent and received in both. Not counted are
the connections that roles on ranks of their own open at the start (each rank to all), and the messages with which
torch's checkpointing plans a save (each rank's plan to the one that commits, and back).

Faults: `lost`: the rank is killed on the coordinator's machine, which sees the process gone. `silent`: it is stopped,
as if a node or a link were gone. `slow`: it works while the others wait. `flapping`: it is stopped three times, each
time for half of the time after which it would count as lost; no rank may be named. `first`: rank 0 is killed, and with
it the store that it keeps.

The controller asks all ranks each second; N > 256 ranks every N / 256 seconds.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import os
import queue
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# A lost store is seen by all.
os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "FATAL"}
# As megaverl.rank_environment says.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

import torch
import torch.distributed as dist

from megaverl.checkpoint import (
    FORMAT_VERSION,
    Manifest,
    folder_of,
    partial_name,
    write_bytes,
)
from megaverl.checkpoint.commit import Committer, commit, prepare_folder
from megaverl.controller import connection as connections
from megaverl.controller import thread as threads
from megaverl.controller.connection import ControllerConnection
from megaverl.controller.core import CallTimeouts
from megaverl.controller.messages import NO_QUESTION, encode
from megaverl.controller.zmq_transport import ZmqController, ZmqRank
from megaverl.distributed.collectives import barrier, connects_lazily, reduce_json
from megaverl.distributed.heartbeat import RankWatch
from megaverl.distributed.job_context import JobContext
from megaverl.distributed.placement import parse_wanted
from megaverl.distributed.placement_resolver import resolve
from megaverl.distributed.rendezvous import NodeInfo, digests, introduce
from megaverl.distributed.store import keep_store
from megaverl.processes import end_with_parent, raise_open_files
from megaverl.sharding.boxes import Box, whole
from megaverl.sharding.layout import Layout, Piece
from megaverl.sharding.plan import Plan, make_plans
from megaverl.sharding.proof import check_plan
from megaverl.weights.transports import agree_on_dtypes
from tools.bench_control import (
    SUMS,
    CountedGroup,
    CountedMessages,
    CountedStore,
    Traffic,
)

HOST, PATIENCE = "127.0.0.1", timedelta(minutes=5)
PER_NODE, PER_PROCESS = 8, 64
LARGE = 16384
SECTIONS = {"actor": {"tp": 8, "pp": 8}, "trainer": {"steps": 100}}
ITEMS = 20  # of a checkpoint, that a rank writes
PHASES = {
    "rendezvous": "rendezvous and placement, once",
    "plan": "a weight plan's agreements, once",
    "agreement": "an agreement on 20 sums",
    "save": "a checkpoint's agreements and commit",
    "rest": "a second of the watch",
}
# Ranks that begin a step each second, so that two cores have time for the watch.
PACE = 100
PLANNER = threading.Lock()  # it is made for one thread
FAULTS = ("lost", "silent", "slow", "flapping", "first")


class Setup(NamedTuple):
    """Settings that all ranks share."""

    size: int
    port: int
    folder: Path
    watch: RankWatch
    rest: float  # seconds in which the watch is counted

    @property
    def hit(self) -> int:
        return self.size // 3


@functools.cache
def plans(size: int) -> Sequence[Plan]:
    """Return the plans of one weight from TP8 x PP8, or the largest grid that fits, to engines at TP4."""

    def layouts(parts: int) -> Callable[[int], Layout]:
        count = 4096 // parts
        boxes = [
            Box((number * count, 0), (number * count + count, 4))
            for number in range(parts)
        ]
        pieces = [Piece("w", box, "w", whole((count, 4))) for box in boxes]
        by_part = [
            Layout((piece,), {"w": (count, 4)}, {"w": (4096, 4)}) for piece in pieces
        ]
        return lambda rank: by_part[rank % parts]

    return make_plans(
        layouts(min(64, size)),
        layouts(min(4, size)),
        size,
        lambda rank: rank // PER_NODE,
    )


# Traffic of the ranks of this process.
TRAFFIC: dict[int, Traffic] = {}


class CountedRank(ZmqRank):
    """Rank's end of the control messages, which counts them."""

    def send(self, message: bytes) -> None:
        TRAFFIC[self.rank].add(1, len(message))
        super().send(message)

    def _take(self, message: bytes, socket: Any) -> None:
        TRAFFIC[self.rank].add(0, len(message))
        if message:
            # A question, which the side thread answers.
            answer = encode(self._board.answer(NO_QUESTION))
            TRAFFIC[self.rank].add(1, len(answer))
        super()._take(message, socket)


class CountedController(ZmqController):
    """Controller's end of the control messages, which counts them for its rank, the last one of the job."""

    def send(self, ranks: Sequence[int], message: bytes) -> None:
        TRAFFIC[self.num_ranks - 1].add(len(ranks), len(ranks) * len(message))
        super().send(ranks, message)

    def _take(self, peer: bytes, rank: int, message: bytes) -> None:
        TRAFFIC[self.num_ranks - 1].add(0, len(message))
        super()._take(peer, rank, message)


class Rank:
    """One rank, whose thread does the work named in `asked`."""

    def __init__(self, rank: int, setup: Setup, store: Any) -> None:
        self.rank, self.setup = rank, setup
        self.traffic = Traffic()
        self.store = CountedStore(store, self.traffic)
        # Not a wait for ranks, as the watch sees it.
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.done: queue.Queue[str] = queue.Queue()
        self.before = Traffic()
        self.at_rest: Traffic | None = None
        self.sleeps, self.stops = 0.0, False
        self.heard: float | None = None  # when there was a failure reason
        self.ended: float | None = None
        self.connection: ControllerConnection | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            phase = self.asked.get()
            try:
                getattr(self, phase)()
            except BaseException:  # the others would wait for it
                traceback.print_exc()
                os._exit(1)
            self.done.put(phase)

    def begin(self) -> None:
        """Reset the counts, before any rank enters the next phase, as some may be answered before others begin."""
        self.before, self.at_rest = replace(self.traffic), None

    @property
    def cost(self) -> Traffic:
        """Return the traffic of the last phase."""
        return self.at_rest or self.traffic.since(self.before, 1.0)

    def rendezvous(self) -> None:
        size, rank = self.setup.size, self.rank
        facts = NodeInfo(
            f"node{rank // PER_NODE:04d}",
            (),
            digests(SECTIONS, {}),
            SECTIONS,
            agent=rank // PER_NODE,
        )
        nodes = introduce(self.store, rank, size, facts, PATIENCE)
        half = size // 2
        places = {
            "actor": f"0-{half - 1}",
            "critic": f"{half}-{size - 2}",
            "rollout": "actor",
            "coordinator": size - 1,
        }
        wanted = {role: parse_wanted(value) for role, value in places.items()}
        placement = resolve(wanted, size, dict.fromkeys([*places, "reward"]), nodes)
        self.group = CountedGroup(
            dist.PrefixStore("control", self.store), rank, size, self.traffic
        )
        role_group = placement.role_group_of(rank)
        messages = CountedMessages(self.store, rank, size, self.traffic)
        self.context = JobContext(
            placement,
            rank,
            role_group,
            self.group,
            self.group,
            self.store,
            PATIENCE,
            messages,
        )
        barrier(self.group)

    def plan(self) -> None:
        with PLANNER:
            plan = plans(self.setup.size)[self.rank]
        check_plan(plan)
        both = {"source": plan.source_layout, "destination": plan.dest_layout}
        held = {
            name: torch.empty(layout.local_shapes["w"], device="meta")
            for name, layout in both.items()
        }
        agree_on_dtypes(
            {name: (layout, {"w": held[name]}) for name, layout in both.items()},
            self.group,
        )
        reduce_json(bool(plan.sends or plan.receives), any, self.group)

    def agreement(self) -> None:
        reduce_json(SUMS, lambda ranks: ranks[0], self.group)

    def save(self) -> None:
        """Save as `CheckpointStore` does, with a file of random state and each rank's entries of the index."""
        committer = Committer(self.group, self.setup.size - 1)
        folder = folder_of(self.setup.folder, 1)
        partial, name = partial_name(folder), f"random_{self.rank:05d}.json"
        committer.conclude(
            10**3, lambda sizes: prepare_folder(folder.parent, partial, sum(sizes))
        )
        items = [
            [f"actor.layer.{item}", [self.rank, 0], item, name, item * 64, 64]
            for item in range(ITEMS)
        ]
        report = [[{name: write_bytes(partial / name, b"{}" * 500)}, items], None]

        def commit_all(reports: list[Any]) -> None:
            files = {
                name: record
                for (written, _), _ in reports
                for name, record in written.items()
            }
            manifest = Manifest(FORMAT_VERSION, 0, 1, committer.size, "", {}, {}, files)
            commit(folder, manifest, best=False, phase=lambda name: None)
            assert len(files) == committer.size and not Manifest.read(
                folder
            ).wrong_sizes(folder)

        committer.conclude(report, commit_all)

    def rest(self) -> None:
        # The controller's traffic counts as that of its rank.
        TRAFFIC[self.rank] = self.traffic
        self.connection = ControllerConnection(
            self.context,
            CallTimeouts(),
            watch=self.setup.watch,
            name=self.context.describe,
            show_error=lambda text: None,
            end=self._end,
        )
        barrier(self.group)
        begun, before = time.monotonic(), replace(self.traffic)
        time.sleep(self.setup.rest)
        self.at_rest = self.traffic.since(before, time.monotonic() - begun)

    def _end(self, code: int) -> None:
        """End the process of a rank that is alone in it."""
        self.ended = self.ended or time.time()

    def steps(self) -> None:
        """Take steps until all are asked to stop, or the run fails."""
        assert self.connection is not None
        try:
            for number in range(10**9):
                self.connection.status("values", number)
                time.sleep(self.sleeps + self.setup.size / PACE)
                if reduce_json(self.stops, any, self.group):
                    break
                self.connection.status("update", number)
                reduce_json(SUMS, lambda ranks: ranks[0], self.group)
        except Exception as error:  # as a run's main thread does
            self.connection.explain(error)
        self.ended = self.ended or time.time()


def host(ranks: list[int], setup: Setup, parent: int, pipe: Connection) -> None:
    """Run some of the ranks in this process, and do the work that is asked for through the pipe."""
    end_with_parent(parent)
    torch.set_num_threads(1)
    # Else each thread that waits for the interpreter wakes 200 times a second.
    sys.setswitchinterval(0.2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = dist.TCPStore(
        HOST, setup.port, None, False, PATIENCE, wait_for_workers=False
    )
    connections.ZmqRank = CountedRank  # type: ignore[attr-defined]
    threads.ZmqController = CountedController  # type: ignore[attr-defined]
    members = [Rank(rank, setup, store.clone()) for rank in ranks]  # type: ignore[attr-defined]
    with connects_lazily():
        while (phase := pipe.recv()) != "end":
            if phase == "begin":
                for member in members:
                    member.begin()
                pipe.send(None)
                continue
            if phase == "count":
                pipe.send({member.rank: member.cost for member in members})
                continue
            for member in members:
                member.asked.put(phase)
            if phase == "steps":
                pipe.send(watch(members, pipe))
            else:
                pipe.send([member.done.get() for member in members])
    os._exit(0)


def watch(members: list[Rank], pipe: Connection) -> dict[int, tuple[str, float, float]]:
    """Return for each rank the failure reason that it received, the time of that, and the time of its end."""
    while any(member.ended is None for member in members):
        for member in members:
            if (
                member.heard is None
                and member.connection is not None
                and member.connection.reason is not None
            ):
                member.heard = time.time()
        if pipe.poll(0.05):
            order = pipe.recv()
            for member in members:
                member.sleeps, member.stops = (
                    (order, False) if isinstance(order, float) else (0.0, True)
                )
    return {
        rank.rank: (
            (rank.connection and rank.connection.reason) or "",
            rank.heard or 0.0,
            rank.ended or 0.0,
        )
        for rank in members
    }


def keep(pipe: Connection, parent: int) -> None:
    """Keep the job's store in this process."""
    end_with_parent(parent)
    store = keep_store(HOST, 0, PATIENCE)
    pipe.send(store.port)
    pipe.recv()


class Cluster:
    """The processes of all simulated ranks."""

    def __init__(self, size: int, folder: Path, watch: RankWatch, rest: float) -> None:
        # By their first rank; the store's: -1.
        self._processes: dict[int, tuple[Any, Connection]] = {}
        plans(size)  # once for all, who are copies of this process
        port = self._start(-1, keep).recv()
        self.setup = Setup(size, port, folder, watch, rest)
        own_process = [0, self.setup.hit, size - 1]
        others = [rank for rank in range(size) if rank not in own_process]
        many = [
            others[begin : begin + PER_PROCESS]
            for begin in range(0, len(others), PER_PROCESS)
        ]
        for ranks in [*([rank] for rank in own_process), *many]:
            self._start(ranks[0], functools.partial(host, ranks, self.setup))

    def _start(self, name: int, target: Callable[..., None]) -> Connection:
        copies = multiprocessing.get_context("fork")
        here, child_end = copies.Pipe()
        arguments = {"parent": os.getpid(), "pipe": child_end}
        process = copies.Process(target=target, kwargs=arguments, daemon=True)
        process.start()
        child_end.close()
        self._processes[name] = process, here
        return here

    def _tell(self, message: Any, names: Sequence[int] = ()) -> None:
        for name, (_, pipe) in self._processes.items():
            if name >= 0 and (not names or name in names):
                pipe.send(message)

    def cost(self, phase: str) -> list[Traffic]:
        """Return the traffic of every rank in a phase."""
        self._hear("begin")
        self._hear(phase)
        return [cost for answer in self._hear("count") for cost in answer.values()]

    def _hear(self, phase: str) -> list[Any]:
        self._tell(phase)
        return [pipe.recv() for name, (_, pipe) in self._processes.items() if name >= 0]

    def suffer(self, fault: str) -> dict[str, Any]:
        """Cause a fault in the middle of steps and measure how it is noticed.

        Returns:
            Seconds until the first rank knew and until the last one had ended, and the named ranks with the number of
            ranks that named each.
        """
        watch, hit = self.setup.watch, 0 if fault == "first" else self.setup.hit
        self._tell("steps")
        time.sleep(2.0 + 2 * self.setup.size / PACE)
        begun = time.time()
        if fault == "slow":
            self._tell(4 * watch.stalled_after + 30.0, [hit])
        elif fault == "flapping":
            for signal_number in (signal.SIGSTOP, signal.SIGCONT) * 3:
                self._signal(hit, signal_number)
                time.sleep(watch.lost_after / 2)
            self._tell("stop", [0])
        else:
            self._signal(hit, signal.SIGSTOP if fault == "silent" else signal.SIGKILL)
            if fault == "first":
                self._signal(-1, signal.SIGKILL)
        # The rank that is hit says nothing any more.
        silent = (-1,) if fault == "flapping" else (-1, hit)
        left = [
            pipe for name, (_, pipe) in self._processes.items() if name not in silent
        ]
        end = time.time() + 60.0 + 2 * (watch.lost_after + watch.stalled_after)
        reports: dict[int, tuple[str, float, float]] = {}
        while left and time.time() < end:
            for pipe in [pipe for pipe in left if pipe in wait(left, timeout=1.0)]:
                reports |= pipe.recv()
                left.remove(pipe)
        # Few: all pass on the first one's.
        reasons = {reason: None for reason, _, _ in reports.values() if reason}
        print(
            *(
                f"{self.setup.size} ranks, {fault}, said: {reason}"
                for reason in reasons
            ),
            sep="\n",
            file=sys.stderr,
        )
        blamed = [
            (re.findall(r"rank \d+", reason), reason)
            for reason, _, _ in reports.values()
        ]
        named = Counter(
            ranks[0] if ranks else reason or "nobody" for ranks, reason in blamed
        )
        if left:
            named["no end came"] = (
                self.setup.size - (fault != "flapping") - len(reports)
            )
        heard = [when for _, when, _ in reports.values() if when]
        last = max((ended for *_, ended in reports.values()), default=begun)
        return {
            "found": min(heard, default=begun) - begun,
            "ended": last - begun,
            "named": named,
        }

    def _signal(self, name: int, number: int) -> None:
        os.kill(self._processes[name][0].pid, number)

    def end(self) -> None:
        for process, _ in self._processes.values():
            process.kill()
            process.join()


def simulate(
    size: int, faults: Sequence[str], watch: RankWatch, rest: float
) -> dict[str, Any]:
    """Simulate one size of cluster.

    Returns:
        "costs": messages and bytes of each phase, on average and on the rank with most; "faults": results of
        `Cluster.suffer` by fault.
    """
    results: dict[str, Any] = {"costs": {}, "faults": {}}
    watch = replace(watch, interval=max(1.0, size / 256))
    for fault in faults or [""]:
        with tempfile.TemporaryDirectory(prefix="megaverl_cluster_") as folder:
            cluster = Cluster(size, Path(folder) / "checkpoints", watch, rest)
            try:
                for phase in PHASES:
                    begun = time.monotonic()
                    ranks = [
                        (traffic.messages, traffic.bytes)
                        for traffic in cluster.cost(phase)
                    ]
                    results["costs"][phase] = [
                        [sum(traffic) / size, max(traffic)]
                        for traffic in zip(*ranks, strict=True)
                    ]
                    text = (
                        f"{time.monotonic() - begun:.1f} s, {results['costs'][phase]}"
                    )
                    print(f"{size} ranks, {phase}: {text}", file=sys.stderr, flush=True)
                if fault:
                    results["faults"][fault] = cluster.suffer(fault)
                    print(
                        f"{size} ranks, {fault}: {results['faults'][fault]}",
                        file=sys.stderr,
                        flush=True,
                    )
            finally:
                cluster.end()
    return results


def table_of_costs(results: dict[int, Any]) -> list[str]:
    """Return the table of messages and bytes, their growth, and their values extrapolated to `LARGE` ranks."""
    sizes = sorted(results)
    few, many = sizes[0], sizes[-1]
    log = math.log2(many) / math.log2(few)
    heads = [
        *(f"{size:,}" for size in sizes),
        f"growth (log: {log:.2f}; ranks: {many / few:g})",
        f"{LARGE:,}",
    ]
    lines = [
        f"| messages; bytes | {' | '.join(heads)} |",
        "| --- " * (len(heads) + 1) + "|",
    ]
    for phase, title in PHASES.items():
        for number, who in enumerate((f"{title}: a rank", "the one with most")):
            columns = []
            for kind in (0, 1):
                values = [results[size]["costs"][phase][kind][number] for size in sizes]
                growth = values[-1] / values[0] if values[0] else 1.0
                large = extrapolated(sizes, values)
                shown = [
                    f"{value:,.3f}" if value < 10 else f"{value:,.0f}"
                    for value in (*values, growth, large)
                ]
                columns.append(shown)
            lines.append(
                f"| {who} | {' | '.join('; '.join(pair) for pair in zip(*columns, strict=True))} |"
            )
    return lines


def extrapolated(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Extrapolate to `LARGE` ranks along log N or N, whichever meets the middle value more closely."""
    few, many, middle = sizes[0], sizes[-1], len(sizes) // 2

    def along(f: Callable[[float], float], size: int) -> float:
        return values[0] + (values[-1] - values[0]) * (f(size) - f(few)) / (
            (f(many) - f(few)) or 1.0
        )

    closest = min(
        (math.log2, float), key=lambda f: abs(along(f, sizes[middle]) - values[middle])
    )
    return along(closest, LARGE)


def table_of_faults(results: dict[int, Any], watch: RankWatch) -> list[str]:
    """Return the table of the times to detect each fault, and the named ranks."""
    due = {"silent": watch.lost_after, "slow": watch.stalled_after}
    lines = [
        "| fault | ranks | due after, s | found after, s | all ended after, s | named |",
        "| --- " * 6 + "|",
    ]
    for fault in FAULTS:
        for size, result in sorted(results.items()):
            if fault in result["faults"]:
                found_after, ended, named = result["faults"][fault].values()
                hit = (
                    "nobody"
                    if fault == "flapping"
                    else f"rank {0 if fault == 'first' else size // 3}"
                )
                right = named.get(hit, 0)
                others = "".join(
                    f", {who} by {count:,}"
                    for who, count in named.items()
                    if who != hit
                )
                due_after = (
                    f"{due.get(fault, 0.0):g}" if fault != "flapping" else "never"
                )
                lines.append(
                    f"| {fault} | {size:,} | {due_after} | {found_after:.1f} | {ended:.1f} | "
                    f"{hit} by {right:,} of {sum(named.values()):,}{others} |"
                )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    described = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    described.add_argument(
        "--ranks",
        default="64,256,1024",
        help="numbers of ranks, 8 or more, with commas",
    )
    described.add_argument(
        "--faults", default=",".join(FAULTS), help="with commas; empty: none"
    )
    described.add_argument(
        "--lost-after", type=float, default=15.0, help="seconds; a run's are 30"
    )
    described.add_argument(
        "--stalled-after",
        type=float,
        default=15.0,
        help="seconds; a run's: run.timeout_minutes",
    )
    described.add_argument(
        "--rest", type=float, default=5.0, help="seconds in which the watch is counted"
    )
    options = described.parse_args(arguments)
    raise_open_files()
    watch = RankWatch(
        stalled_after=options.stalled_after, lost_after=options.lost_after, grace=2.0
    )
    faults = [fault for fault in options.faults.split(",") if fault]
    results = {
        int(size): simulate(int(size), faults, watch, options.rest)
        for size in options.ranks.split(",")
    }
    print("\n".join([*table_of_costs(results), "", *table_of_faults(results, watch)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
