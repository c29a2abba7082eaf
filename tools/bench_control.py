#!/usr/bin/env python3
"""Cost of agreements and process groups for a rank, by the number of ranks: real processes over gloo.

The tables of docs/scaling.md:

    python tools/bench_control.py                          # up to 256 processes: a minute
    python tools/bench_control.py --ranks 1024             # 6 GB of memory, over ten minutes on two cores
    python tools/bench_control.py --only sockets           # seconds

Both sides are measured in the same processes. "mesh" is a gloo group as torch makes it, in which an update gathers
every rank's 20 sums on every rank, once the lengths and once the bytes. "tree" is the exchange along the tree of
`distributed/collectives.py`. Messages and bytes are those that the process writes (/proc/self/io). Only processor time
is reported, since hundreds of processes share a few cores here.

"sockets" counts the connections that a rank has open for the groups of a run (`distributed/job_context.py`), after
agreements in all of them and a message to each of two ranks; the store's connections are not counted. A group over NCCL
is replaced by one that carries nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# It would warn of every client whose name it does not find.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: E402, F401 (the backend "fake")
from torch.distributed import distributed_c10d

from megaverl.distributed import job_context
from megaverl.distributed.collectives import barrier, connects_lazily, reduce_json
from megaverl.distributed.messages import HostMessages
from megaverl.distributed.placement import Node, ResolvedPlacement, RoleGroup
from megaverl.distributed.store import keep_store
from megaverl.processes import raise_open_files

PATIENCE = timedelta(minutes=10)
SUMS = {f"actor/metric_{number}": [512.0, 0.1 + number, 1 / 3] for number in range(20)}
ROUNDS = 10  # agreements that are measured
SIDES = ("mesh", "tree")
MESH_AT_MOST = 256  # ranks: of 1,024, all would hold a million sockets
COLUMNS = {
    "sockets": "sockets",
    "messages": "messages",
    "bytes": "bytes",
    "processor_ms": "processor ms",
}

# Ranks that are counted, and those that follow from them.
OF_SOCKETS, OF_MANY = (4, 8, 16), 1024

Ranks = Sequence[dict[str, dict[str, float]]]


def main() -> int:
    described = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    described.add_argument(
        "--ranks", default="8,64,256", help="numbers of ranks, with commas"
    )
    described.add_argument("--only", choices=("control", "sockets"))
    described.add_argument("--json", metavar="FILE")
    options = described.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    raise_open_files()
    measured: dict[int, Ranks] = {}
    if options.only != "sockets":
        measured = {
            size: measure(size, do_rank) for size in map(int, options.ranks.split(","))
        }
        print(
            "\n".join([*agreement_table(measured), ""]),
            flush=True,
        )
    if options.only != "control":
        print(
            "\n".join(
                socket_table({size: measure(size, do_groups) for size in OF_SOCKETS})
            )
        )
    if options.json:
        Path(options.json).write_text(
            json.dumps(measured, indent=2) + "\n", encoding="utf-8"
        )
    return 0


def agreement_table(measured: dict[int, Ranks]) -> list[str]:
    """Return the table of one agreement's cost for a rank: the median of all ranks, and the first rank."""
    lines = [
        "| ranks | | "
        + " | ".join(f"{name}: a rank, the first" for name in COLUMNS.values())
        + " | of all, ms |"
    ]
    lines.append("| --- " * (len(COLUMNS) + 3) + "|")
    for size, ranks in measured.items():
        for side in sides_of(size):
            cells = [
                short(statistics.median(rank[side][key] for rank in ranks))
                for key in COLUMNS
            ]
            firsts = [short(ranks[0][side][key]) for key in COLUMNS]
            both = " | ".join(
                f"{cell}, {first}" for cell, first in zip(cells, firsts, strict=True)
            )
            total = sum(rank[side]["processor_ms"] for rank in ranks)
            lines.append(f"| {size:,} | {side} | {both} | {short(total)} |")
    return lines


def short(number: float) -> str:
    """Format a number with two significant digits, or as a whole number from 100 on."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def sides_of(size: int) -> Sequence[str]:
    return SIDES if size <= MESH_AT_MOST else SIDES[1:]


def socket_table(measured: dict[int, Ranks]) -> list[str]:
    """Return the table of open connections on the rank that has the most.

    Numbers for many ranks are extrapolated by fitting a N + b log2 N + c to the counted
    ones.
    """
    lines = [
        "| sockets of a rank | "
        + " | ".join(f"{size} ranks" for size in measured)
        + f" | {OF_MANY:,}, by these |"
    ]
    lines.append("| --- " + "| ---: " * (len(measured) + 1) + "|")
    growth = np.array([[size, math.log2(size), 1.0] for size in measured])
    for kind in KINDS:
        counts = [
            int(max(rank[kind]["sockets"] for rank in ranks))
            for ranks in measured.values()
        ]
        many = np.linalg.solve(growth, counts) @ [OF_MANY, math.log2(OF_MANY), 1.0]
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} | {many:,.0f} |")
    return lines


def measure(size: int, function: Callable[..., None]) -> Ranks:
    """Fork `size` ranks, which call `function`, and return their measurements. A fork shares this process's imports."""
    gc.collect()
    gc.freeze()  # what nobody looks through stays one memory of all copies
    keeper = keep_store("127.0.0.1", 0, PATIENCE)
    copies = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(size):
        own_end, child_end = copies.Pipe(duplex=False)
        processes.append(
            copies.Process(
                target=function, args=(rank, size, keeper.port, child_end), daemon=True
            )
        )
        processes[-1].start()
        child_end.close()
        pipes.append(own_end)
    measured = [json.loads(pipe.recv_bytes()) for pipe in pipes]
    for process in processes:
        process.join()
    return measured


def do_rank(rank: int, size: int, port: int, result: Connection) -> None:
    """Measure agreements as one rank."""
    store = dist.TCPStore(
        "127.0.0.1", port, None, False, PATIENCE, wait_for_workers=False
    )
    costs = {
        side: do_side(side, dist.PrefixStore(side, store), rank, size)
        for side in sides_of(size)
    }
    result.send_bytes(json.dumps(costs).encode())


# What a job looks like: whether roles have ranks of their own, whether devices speak by
# NCCL.
KINDS = {
    "one world over gloo": (False, False),
    "roles on ranks of their own, over gloo": (True, False),
    "one world over NCCL: hosts alone": (False, True),
    "roles on ranks of their own, over NCCL: hosts alone": (True, True),
}


def do_groups(rank: int, size: int, port: int, result: Connection) -> None:
    """Count the connections of one rank in jobs of each kind, one after another."""
    store = dist.TCPStore(
        "127.0.0.1", port, None, False, PATIENCE, wait_for_workers=False
    )
    counts = {}
    for kind, (is_apart, nccl) in KINDS.items():
        before = num_sockets()
        placement = placement_of(size, apart=is_apart)
        groups = groups_over_nccl if nccl else groups_over_gloo
        every, messages = groups(placement, dist.PrefixStore(kind, store), rank)
        for group in every:
            barrier(group)
        neighbours = [(rank + 1) % size, (rank - 1) % size]
        sent = [messages.send(other, "rows", [b"1"]) for other in neighbours]
        for other in neighbours:
            messages.receive(other, "rows", PATIENCE)
        for taken in sent:
            taken.result()
        counts[kind] = {"sockets": num_sockets() - before}
        store.add(kind, 1)
        while store.add(kind, 0) < size:  # nobody leaves before all have counted
            time.sleep(0.05)
        messages.close()
        del every, group
        dist.destroy_process_group()
        gc.collect()
    result.send_bytes(json.dumps(counts).encode())


def placement_of(size: int, *, apart: bool) -> ResolvedPlacement:
    """Return a placement with actor and rollout on the same ranks, or on half of the ranks each."""
    half = size // 2
    ranks = {
        "actor": tuple(range(half if apart else size)),
        "rollout": tuple(range(half if apart else 0, size)),
    }
    ranks["coordinator"] = (0,)
    actor, rollout = (
        RoleGroup("actor", ranks["actor"], ("actor", "coordinator")),
        RoleGroup("rollout", ranks["rollout"], ()),
    )
    worlds_of = (actor, rollout) if apart else (actor,)
    return ResolvedPlacement(
        size, ranks, worlds_of, (ranks["actor"],), (Node("node", size),)
    )


Groups = tuple[list[dist.ProcessGroup], HostMessages]


def groups_over_gloo(
    placement: ResolvedPlacement, store: dist.Store, rank: int
) -> Groups:
    """Make the job's group, this rank's role group's and, where roles are apart, the group that moves weights."""
    context = job_context.join(placement, store, rank, PATIENCE)
    weights = (
        []
        if placement.is_colocated
        else [job_context.join_some(context, "weights", range(placement.size))]
    )
    return [
        context.control,
        context.group,
        job_context.default_group(),
        *weights,
    ], context.messages


def groups_over_nccl(
    placement: ResolvedPlacement, store: dist.Store, rank: int
) -> Groups:
    """Make the same groups as `join` makes them with NCCL as backend."""
    role_group = placement.role_group_of(rank)
    group_rank, size = role_group.ranks.index(rank), placement.size
    group_store = dist.PrefixStore(f"role_group/{role_group.name}", store)
    dist.init_process_group(
        "fake",
        store=group_store,
        rank=group_rank,
        world_size=role_group.size,
        timeout=PATIENCE,
    )
    messages = HostMessages(store, rank, size)
    if placement.is_colocated:
        job_context._hosts_of_all(PATIENCE)
        return [job_context.default_group()], messages
    with connects_lazily():
        control = job_context._joined(
            "gloo", "control", store, (rank, size, group_rank), PATIENCE
        )
    name: Any = "weights"
    weights, _ = distributed_c10d._new_process_group_helper(
        size,
        rank,
        [],
        "fake",
        dist.PrefixStore("weights", store),
        group_name=name,
        timeout=PATIENCE,
    )
    return [control, job_context.default_group(), weights], messages


def do_side(side: str, store: dist.Store, rank: int, size: int) -> dict[str, float]:
    """Make a group of one kind and measure agreements in it."""
    before = num_sockets()
    with connects_lazily() if side == "tree" else nullcontext():
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE
        )
    agree = agree_along_tree if side == "tree" else gather_over_mesh
    agree()  # opens what it needs
    costs = per_call(agree) | {"sockets": num_sockets() - before}
    agree()  # nobody leaves before all have measured
    dist.destroy_process_group()
    return costs


def agree_along_tree() -> Any:
    return reduce_json(SUMS, lambda ranks: ranks[0])


def gather_over_mesh() -> Any:
    data = torch.frombuffer(bytearray(json.dumps(SUMS).encode()), dtype=torch.uint8)
    count = torch.tensor([data.numel()])
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)
    padded = data.new_zeros(max(int(number) for number in counts))
    padded[: data.numel()] = data
    received = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(received, padded)
    return [
        json.loads(bytes(text[: int(n)].numpy()))
        for text, n in zip(received, counts, strict=True)
    ]


def per_call(function: Callable[[], Any]) -> dict[str, float]:
    """Return the messages, bytes and processor time of one call."""
    begun, seconds = psutil.Process().io_counters(), time.process_time()
    for _ in range(ROUNDS):
        function()
    ended, seconds = psutil.Process().io_counters(), time.process_time() - seconds
    return {
        "messages": (ended.write_count - begun.write_count) / ROUNDS,
        "bytes": (ended.write_chars - begun.write_chars) / ROUNDS,
        "processor_ms": seconds / ROUNDS * 1e3,
    }


# Torch asks for the name of a connection's other end, which takes seconds on many
# threads.
_ONE = threading.Lock()


@dataclass
class Traffic:
    """Counts the messages and bytes that a rank has sent and received."""

    messages: float = 0.0
    bytes: float = 0.0

    def add(self, messages: int, num_bytes: int) -> None:
        self.messages += messages
        self.bytes += num_bytes

    def since(self, before: Traffic, times: float) -> Traffic:
        return Traffic(
            (self.messages - before.messages) / times,
            (self.bytes - before.bytes) / times,
        )


class CountedStore(dist.Store):
    """Connection to the job's store that counts its requests."""

    def __init__(self, store: Any, traffic: Traffic) -> None:
        super().__init__()
        self._store, self._traffic = store, traffic

    def clone(self) -> CountedStore:
        with _ONE:
            return CountedStore(self._store.clone(), self._traffic)

    def has_extended_api(self) -> bool:
        return True

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in ("clone", "has_extended_api"):
            return super().__getattribute__(name)

        def counted(*arguments: Any) -> Any:
            answer = getattr(self._store, name)(*arguments)
            lists = [
                value if isinstance(value, list) else [value]
                for value in (*arguments, answer)
            ]
            self._traffic.add(
                1,
                sum(
                    len(text)
                    for value in lists
                    for text in value
                    if isinstance(text, str | bytes)
                ),
            )
            return answer

        return counted


class CountedGroup(dist.ProcessGroup):
    """Group of all ranks over gloo, made as `job_context._joined` does. This process is alone in its default group."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, traffic: Traffic
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._traffic = traffic
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, PATIENCE)
        names = list(range(size))
        names[0], names[rank] = rank, 0
        distributed_c10d._world.pg_map[self] = ("gloo", store)
        distributed_c10d._world.pg_group_ranks[self] = {
            name: number for number, name in enumerate(names)
        }

    def send(self, tensors: list[torch.Tensor], dest: int, tag: int = 0) -> Any:  # type: ignore[override]
        self._traffic.add(1, tensors[0].nbytes)
        return self._gloo.send(tensors, dest, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Any:  # type: ignore[override]
        self._traffic.add(0, tensors[0].nbytes)
        return self._gloo.recv(tensors, source, tag)


class CountedMessages(HostMessages):
    """Messages between hosts that are counted."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, traffic: Traffic
    ) -> None:
        self._traffic = traffic
        super().__init__(store, rank, size)

    def send(
        self, dest: int, name: str, parts: Sequence[torch.Tensor | bytes]
    ) -> Future[None]:
        self._traffic.add(
            1,
            sum(
                len(part) if isinstance(part, bytes) else part.nbytes for part in parts
            ),
        )
        return super().send(dest, name, parts)

    def receive(self, source: int, name: str, timeout: timedelta) -> list[torch.Tensor]:
        parts = super().receive(source, name, timeout)
        self._traffic.add(0, sum(part.nbytes for part in parts))
        return parts


def num_sockets() -> int:
    """Return the number of sockets that this process has open."""
    count = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(file).startswith("socket")
        except FileNotFoundError:  # the listing's own
            continue
    return count


if __name__ == "__main__":
    sys.exit(main())
