"""Time of a reshard to 1, 2, 4 and 8 replicas over links of one rate: fan-out, direct, broadcast and a ring.

    sudo python tools/bench_fanout.py                        # 100 Mbit/s, 1 to 8 replicas: about three minutes
    sudo python tools/bench_fanout.py --replicas 8 --mbit 200 --turns 5

Every rank is a node: a network namespace of its own on this machine, whose link to a bridge carries `--mbit` in each
direction (`tc`). Two trainers hold the halves of a model at TP2, and every replica is one engine at TP1, so that an
engine receives the whole model. The receive bound is the model's bytes over the rate of a link. No way can be faster.

    fan-out      reshard.fan_out: auto
    direct       reshard.fan_out: never; the trainers send every replica its weights
    broadcast    each trainer broadcasts its half to all engines in buckets, with gloo's own broadcast
    ring         each trainer sends its half along a chain of all engines, which forward it piece by piece

Broadcast and ring leave the bytes in a buffer, while the first two write them into the engine's weights. All ways take
turns in one run; the table has medians of the slowest rank. The engines' bytes after `fan-out` are compared with those
after `direct`. Needs root, iproute2 and network namespaces; exits with 77 where it cannot run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from megaverl.distributed.grid import GridShape
from megaverl.models.architectures import weights_of
from megaverl.processes import end_with_parent
from megaverl.sharding.layout import EMPTY, Layout
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.plan import make_plan
from megaverl.sharding.vllm import vllm_layouts
from megaverl.weights.fingerprint import ReshardCheck
from megaverl.weights.reshard import Resharder
from megaverl.weights.transports import TransportOptions
from tests.faults.networks import Networks, address, enter, networks, why_not

TRAINERS = 2
PORT = 29_460
WAYS = ("fan-out", "direct", "broadcast", "ring")
BUCKET = 4 * 2**20  # bytes of a broadcast
PIECE = 2**18  # bytes that a ring forwards at a time
CANNOT_RUN = 77
PATIENCE = timedelta(minutes=5)

Run = Callable[[], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--replicas",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        help="numbers of engines",
    )
    parser.add_argument(
        "--mbit",
        type=float,
        default=100.0,
        help="rate of every link in each direction, Mbit/s",
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3, help="measurements of each way")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    if reason := why_not() or why_no_shaping():
        print(f"bench_fanout.py: {reason}", file=sys.stderr)
        return CANNOT_RUN
    with networks(TRAINERS + max(options.replicas)) as nodes:
        shape(nodes, options.mbit)
        figures = run_on(nodes, run_rank, options)
    print(table(figures, options.mbit))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def why_no_shaping() -> str:
    """Return why links cannot be limited to a rate here, or ''."""
    try:
        done = subprocess.run(["tc", "-Version"], capture_output=True, check=False)
    except FileNotFoundError:
        return "needs `tc`: install iproute2."
    return "" if done.returncode == 0 else "`tc` does not work here."


def shape(nodes: Networks, mbit: float) -> None:
    """Limit every node's link to a rate in each direction.

    A queue limits what leaves a device: the node's end what it sends, the bridge's end
    what the node receives.
    """
    limit = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "50ms"]
    for node in range(nodes.count):
        for namespace, device in (
            (f"{nodes.prefix}{node}", "eth0"),
            (f"{nodes.prefix}switch", f"to-{node}"),
        ):
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "add", "dev", device, *limit],
                check=True,
            )


def run_on(
    nodes: Networks,
    rank_function: Callable[
        [int, Networks, argparse.Namespace, Connection | None, int], None
    ],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Start a rank on each node and return rank 0's figures.

    Args:
        rank_function: called with the rank, the nodes, the options, the connection that takes rank 0's figures (None on
            other ranks) and the id of this process.
    """
    forked = multiprocessing.get_context("fork")
    receiving, sending = forked.Pipe(duplex=False)
    parent = os.getpid()
    ranks = [
        forked.Process(
            target=rank_function,
            args=(rank, nodes, options, sending if rank == 0 else None, parent),
        )
        for rank in range(nodes.count)
    ]
    for process in ranks:
        process.start()
    sending.close()
    try:
        figures: list[dict[str, Any]] = receiving.recv()
        for process in ranks:
            process.join()
    except EOFError:
        tool = Path(sys.argv[0]).name
        raise SystemExit(f"{tool}: a rank failed; its traceback is above.") from None
    finally:
        for process in ranks:
            process.kill()
    return figures


def run_rank(
    rank: int,
    nodes: Networks,
    options: argparse.Namespace,
    results: Connection | None,
    parent: int,
) -> None:
    """Measure every number of replicas on one rank."""
    end_with_parent(parent)
    enter(nodes.prefix, rank)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address(0)}:{PORT}",
        rank=rank,
        world_size=nodes.count,
        timeout=PATIENCE,
    )
    figures = []
    for count in options.replicas:
        members = list(range(TRAINERS + count))
        group = dist.new_group(members)
        halves = [
            dist.new_group([trainer, *range(TRAINERS, TRAINERS + count)])
            for trainer in range(TRAINERS)
        ]
        if rank in members:
            figures.append(Measurement(rank, count, group, halves, options).figures())
        dist.barrier()
    if results is not None:
        results.send(figures)
    dist.destroy_process_group()


class Measurement:
    """All ways of moving the weights to `count` replicas, on one rank."""

    def __init__(
        self,
        rank: int,
        count: int,
        group: dist.ProcessGroup,
        halves: Sequence[dist.ProcessGroup],
        options: argparse.Namespace,
    ) -> None:
        self.rank, self.count, self.group, self.halves, self.options = (
            rank,
            count,
            group,
            halves,
            options,
        )
        spec = make_spec(options.layers, options.hidden)
        weights = weights_of(spec)
        trainer_of = megatron_layouts(
            weights, spec, GridShape(tp=TRAINERS), padded_vocab_size=spec.vocab_size
        )
        engine = vllm_layouts(weights, spec, 1)(0)
        self.source_of: Callable[[int], Layout] = lambda place: (
            trainer_of(place) if place < TRAINERS else EMPTY
        )
        self.dest_of: Callable[[int], Layout] = lambda place: (
            engine if place >= TRAINERS else EMPTY
        )
        self.source = {
            name: random_shard(shape, rank)
            for name, shape in self.source_of(rank).local_shapes.items()
        }
        self.dest = {
            name: torch.zeros(shape, dtype=torch.bfloat16)
            for name, shape in self.dest_of(rank).local_shapes.items()
        }
        self.nbytes = sum(
            2 * torch.Size(shape).numel() for shape in engine.local_shapes.values()
        )
        self.buffer = torch.zeros(self.nbytes // TRAINERS, dtype=torch.uint8)
        self.sent: dict[str, int] = {}

    def figures(self) -> dict[str, Any]:
        """Return seconds of every way and bytes of the busiest sender. Collective over the group."""
        runs: dict[str, Run] = {}
        for name in self.options.ways:
            runs[name] = {
                "fan-out": lambda: self.reshard_by(fan_out=True),
                "direct": lambda: self.reshard_by(fan_out=False),
                "broadcast": lambda: self.broadcast,
                "ring": lambda: self.ring,
            }[name]()
        self.check(runs)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.options.turns):
            for name, run in runs.items():
                seconds[name].append(self.seconds_of(run))
        return {
            "replicas": self.count,
            "model_bytes": self.nbytes,
            "seconds": {
                name: statistics.median(times) for name, times in seconds.items()
            },
            "all_seconds": seconds,
            "busiest_sent": self.sent,
        }

    def seconds_of(self, run: Run) -> float:
        """Return the seconds until the slowest rank has finished. Collective over the group."""
        dist.barrier(self.group)
        start = time.perf_counter()
        run()
        seconds = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(seconds, dist.ReduceOp.MAX, self.group)
        return float(seconds)

    def reshard_by(self, *, fan_out: bool) -> Run:
        """Return a run of a resharder that has moved its first version."""
        node_of = list(range(TRAINERS + self.count)).__getitem__
        world = TRAINERS + self.count
        plan = make_plan(
            self.source_of, self.dest_of, world, self.rank, node_of, fan_out=fan_out
        )
        options = TransportOptions(node_of=node_of, timeout=PATIENCE)
        resharder = Resharder(plan, self.source, self.dest, self.group, options)

        def run() -> None:
            self.sent["fan-out" if fan_out else "direct"] = resharder.run().busiest_sent

        return run

    def check(self, runs: dict[str, Run]) -> None:
        """Run every way once, and compare the engines' bytes with the trainers' and between ways."""
        arrived: list[dict[str, torch.Tensor]] = []
        for name, run in runs.items():
            for tensor in self.dest.values():
                tensor.zero_()
            run()
            if name in ("fan-out", "direct"):
                ReshardCheck(
                    self.source_of, self.dest_of, self.source, self.dest, self.group
                ).compare()
                arrived.append(
                    {name: tensor.clone() for name, tensor in self.dest.items()}
                )
        for other in arrived[1:]:
            assert all(
                torch.equal(tensor, other[name]) for name, tensor in arrived[0].items()
            ), "other bytes"

    def broadcast(self) -> None:
        """Broadcast each trainer's half to all engines, bucket by bucket."""
        for trainer, half in enumerate(self.halves):
            if self.rank < TRAINERS and self.rank != trainer:
                continue
            for bucket in self.buffer.split(BUCKET):
                dist.broadcast(bucket, trainer, half)

    def ring(self) -> None:
        """Send each trainer's half along the engines, which forward it piece by piece."""
        engines = list(range(TRAINERS, TRAINERS + self.count))
        pieces = self.buffer.split(PIECE)
        chains = [[trainer, *engines] for trainer in range(TRAINERS)]
        own_chains = [
            (tag, chain) for tag, chain in enumerate(chains) if self.rank in chain
        ]
        arrivals: dict[int, list[dist.Work]] = {}
        for tag, chain in own_chains:
            place = chain.index(self.rank)
            if place:
                arrivals[tag] = [
                    started(dist.irecv(piece, chain[place - 1], self.group, tag))
                    for piece in pieces
                ]
        sends = []
        for number, piece in enumerate(pieces):
            for tag, chain in own_chains:
                if tag in arrivals:
                    arrivals[tag][number].wait()
                place = chain.index(self.rank)
                if place + 1 < len(chain):
                    sends.append(
                        started(dist.isend(piece, chain[place + 1], self.group, tag))
                    )
        for send in sends:
            send.wait()


def started(work: dist.Work | None) -> dist.Work:
    """Return the work of a message between two ranks of the group, which torch types as optional."""
    assert work is not None, "this rank is in the group"
    return work


def random_shard(shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """Return a trainer's part of a weight. Vectors are equal on all ranks, because norms are not cut."""
    generator = torch.Generator().manual_seed(rank if len(shape) > 1 else 0)
    return torch.randn(shape, generator=generator).bfloat16()


def make_spec(num_layers: int, hidden: int) -> ModelSpec:
    """Return a Qwen2 of these sizes, and a vocabulary of 8,192."""
    return ModelSpec.from_config(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "num_hidden_layers": num_layers,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 8192,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
        }
    )


def table(figures: Sequence[dict[str, Any]], mbit: float) -> str:
    """Format the figures as a table in Markdown, with the multiple of the receive bound in brackets."""
    methods = list(figures[0]["seconds"])
    megabytes = figures[0]["model_bytes"] / 1e6
    bound = figures[0]["model_bytes"] * 8 / (mbit * 1e6)
    lines = [
        f"{megabytes:.1f} MB a replica, links of {mbit:g} Mbit/s: receive bound {bound:.2f} s",
        "",
        "| "
        + " | ".join(["replicas", *(f"{method}, s (x bound)" for method in methods)])
        + " |",
        "| " + " | ".join(["---"] * (1 + len(methods))) + " |",
    ]
    for of_count in figures:
        cells = [
            f"{seconds:.2f} ({seconds / bound:.2f})"
            for seconds in of_count["seconds"].values()
        ]
        lines.append("| " + " | ".join([str(of_count["replicas"]), *cells]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
