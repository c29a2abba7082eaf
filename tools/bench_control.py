#!/usr/bin/env python3
"""What agreements and heartbeats cost a rank, and the first one, by the number of ranks: real processes over gloo.

    python tools/bench_control.py                     # 8, 64 and 256 ranks, which need 5 GB of memory
    python tools/bench_control.py --ranks 8,64 --json control.json

Both sides in the same processes. "mesh": a gloo group as torch makes it, and what an update did before there was
`distributed/host_tree.py`: every rank's 20 sums to every rank, in two gathers, of lengths and of bytes. "tree": what it
does since. Messages and bytes are those that the process writes (/proc/self/io). Hundreds of processes share a few
cores here, so there are processor times and no others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

from megaverl.distributed.collectives import reduce_json  # noqa: E402
from megaverl.distributed.host_tree import connects_lazily  # noqa: E402
from megaverl.distributed.liveness import Liveness, Timeouts  # noqa: E402
from megaverl.distributed.store import keep_store  # noqa: E402
from megaverl.processes import raise_open_files  # noqa: E402

PATIENCE = timedelta(minutes=10)
SUMS = {f"actor/metric_{number}": [512.0, 0.1 + number, 1 / 3] for number in range(20)}
ROUNDS, REST = 10, 5.0  # agreements that are measured; seconds at rest
SIDES = ("mesh", "tree")
COLUMNS = {"sockets": "sockets", "messages": "messages", "bytes": "bytes", "processor_ms": "processor ms"}

Ranks = Sequence[dict[str, dict[str, float]]]


def main() -> int:
    described = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    described.add_argument("--ranks", default="8,64,256", help="numbers of ranks, with commas")
    described.add_argument("--json", metavar="FILE")
    given = described.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    raise_open_files()
    found = {size: measure(size) for size in map(int, given.ranks.split(","))}
    print("\n".join([*of_agreements(found), "", *at_rest_all(found)]))
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def of_agreements(found: dict[int, Ranks]) -> list[str]:
    """A table: an agreement, of a rank (the median of all) and of the first."""
    lines = ["| ranks | | " + " | ".join(f"{name}: a rank, the first" for name in COLUMNS.values()) + " | all, ms |"]
    lines.append("| --- " * (len(COLUMNS) + 3) + "|")
    for size, ranks in found.items():
        for side in SIDES:
            cells = [f"{statistics.median(each[side][key] for each in ranks):.4g}" for key in COLUMNS]
            firsts = [f"{ranks[0][side][key]:.4g}" for key in COLUMNS]
            both = " | ".join(f"{cell}, {first}" for cell, first in zip(cells, firsts, strict=True))
            total = sum(each[side]["processor_ms"] for each in ranks)
            lines.append(f"| {size} | {side} | {both} | {total:.4g} |")
    return lines


def at_rest_all(found: dict[int, Ranks]) -> list[str]:
    """A table: a second of ranks that do nothing but live."""
    lines = ["| ranks | store requests: a rank, the first, the keeper | processor ms: a rank, the first |"]
    lines.append("| --- | --- | --- |")
    for size, ranks in found.items():
        requests = [each["rest"]["requests"] for each in ranks]
        seconds = [each["rest"]["processor_ms"] for each in ranks]
        lines.append(
            f"| {size} | {statistics.median(requests):.3g}, {requests[0]:.3g}, {sum(requests):.4g} | "
            f"{statistics.median(seconds):.3g}, {seconds[0]:.3g} |"
        )
    return lines


def measure(size: int) -> Ranks:
    """What each of so many ranks has measured; they are copies of this process, which has imported everything."""
    keeper = keep_store("127.0.0.1", 0, PATIENCE)
    copies = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(size):
        here, there = copies.Pipe(duplex=False)
        processes.append(copies.Process(target=do_rank, args=(rank, size, keeper.port, there), daemon=True))
        processes[-1].start()
        there.close()
        pipes.append(here)
    found = [json.loads(pipe.recv_bytes()) for pipe in pipes]
    for process in processes:
        process.join()
    return found


def do_rank(rank: int, size: int, port: int, result: Connection) -> None:
    """A rank of the measurement."""
    store = dist.TCPStore("127.0.0.1", port, None, False, PATIENCE, wait_for_workers=False)
    found = {side: do_side(side, dist.PrefixStore(side, store), rank, size) for side in SIDES}
    found["rest"] = at_rest(store, rank, size)
    result.send_bytes(json.dumps(found).encode())
    store.add("done", 1)
    while store.add("done", 0) < size:  # others look for the first rank's beat
        time.sleep(0.5)


def do_side(side: str, store: dist.Store, rank: int, size: int) -> dict[str, float]:
    """A group, and agreements in it."""
    before = num_sockets()
    with connects_lazily() if side == "tree" else nullcontext():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    agree = agree_along_tree if side == "tree" else gather_over_mesh
    agree()  # opens what it needs
    found = per_call(agree) | {"sockets": num_sockets() - before}
    agree()  # nobody leaves before all have measured
    dist.destroy_process_group()
    return found


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
    return [json.loads(bytes(each[: int(n)].numpy())) for each, n in zip(received, counts, strict=True)]


def per_call(function: Callable[[], Any]) -> dict[str, float]:
    """Messages, bytes and processor time of a call."""
    begun, seconds = psutil.Process().io_counters(), time.process_time()
    for _ in range(ROUNDS):
        function()
    ended, seconds = psutil.Process().io_counters(), time.process_time() - seconds
    return {
        "messages": (ended.write_count - begun.write_count) / ROUNDS,
        "bytes": (ended.write_chars - begun.write_chars) / ROUNDS,
        "processor_ms": seconds / ROUNDS * 1e3,
    }


@dataclass
class Traffic:
    """What a rank has sent and received."""

    messages: float = 0.0
    bytes: float = 0.0

    def add(self, messages: int, num_bytes: int) -> None:
        self.messages += messages
        self.bytes += num_bytes

    def since(self, before: Traffic, times: float) -> Traffic:
        return Traffic((self.messages - before.messages) / times, (self.bytes - before.bytes) / times)


class CountedStore(dist.Store):
    """A connection to the job's store."""

    def __init__(self, store: Any, traffic: Traffic) -> None:
        super().__init__()
        self._store, self._traffic = store, traffic

    def clone(self) -> CountedStore:
        return CountedStore(self._store.clone(), self._traffic)

    def has_extended_api(self) -> bool:
        return True

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in ("clone", "has_extended_api"):
            return super().__getattribute__(name)

        def counted(*arguments: Any) -> Any:
            found = getattr(self._store, name)(*arguments)
            lists = [each if isinstance(each, list) else [each] for each in (*arguments, found)]
            self._traffic.add(1, sum(len(one) for each in lists for one in each if isinstance(one, str | bytes)))
            return found

        return counted


class CountedGroup(dist.ProcessGroup):
    """All ranks, over gloo, beside a default group of this process alone, as `worlds._joined` has it."""

    def __init__(self, store: dist.Store, rank: int, size: int, traffic: Traffic) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._traffic = traffic
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, PATIENCE)
        names = list(range(size))
        names[0], names[rank] = rank, 0
        distributed_c10d._world.pg_map[self] = ("gloo", store)
        distributed_c10d._world.pg_group_ranks[self] = {name: number for number, name in enumerate(names)}

    def send(self, tensors: list[torch.Tensor], dest: int, tag: int = 0) -> Any:  # type: ignore[override]
        self._traffic.add(1, tensors[0].nbytes)
        return self._gloo.send(tensors, dest, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Any:  # type: ignore[override]
        self._traffic.add(0, tensors[0].nbytes)
        return self._gloo.recv(tensors, source, tag)


def at_rest(store: dist.Store, rank: int, size: int) -> dict[str, float]:
    """A second of a rank that does nothing but live."""
    traffic = Traffic()
    liveness = Liveness(
        CountedStore(store, traffic), rank, size, coordinator=0, timeouts=Timeouts(stalled_after=3600.0)
    )
    begun, requests, seconds = time.monotonic(), traffic.messages, time.process_time()
    time.sleep(REST)
    requests, seconds = traffic.messages - requests, time.process_time() - seconds
    wall = time.monotonic() - begun
    liveness.leave()
    return {"requests": requests / wall, "processor_ms": seconds / wall * 1e3}


def num_sockets() -> int:
    """That this process has open."""
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(file).startswith("socket")
        except FileNotFoundError:  # the listing's own
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
