"""Learning curves of optimizers on the quickstart's task, from the same warm starts and with the same draws.

    python tools/bench_optimizers.py --out runs/optimizers --seconds 280      # again and again, until done

Trains the quickstart's model by GRPO with each optimizer and seed, one run after the other in one process
(Megatron-core, generation by transformers). It starts none that would last longer than `--seconds`, and prints reward
and accuracy by step of the finished runs, which `--out` keeps: medians over the seeds.

Adam has the quickstart's settings. Muon has the same learning rate, with its update scaled to the size of Adam's
(`muon_extra_scale_factor: 0.2`, arXiv 2502.16982), and needs Python 3.12 and emerging-optimizers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.learning_curves import (
    ACCURACY,
    attempt,
    configuration,
    join_world,
    recorded,
    warm_start,
)

ALGORITHM = "grpo"
REWARD = "reward/mean"
# Settings of each optimizer, on top of the quickstart's.
OPTIMIZERS: dict[str, list[str]] = {
    "adam": [],
    "muon": ["actor.optimizer={optimizer: muon, muon_extra_scale_factor: 0.2}"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument(
        "--optimizers", nargs="*", default=list(OPTIMIZERS), choices=list(OPTIMIZERS)
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="start no run that would last longer",
    )
    options = parser.parse_args()
    code = run(options)
    print(table(options))
    return code


def run(options: argparse.Namespace) -> int:
    """Train the missing runs. Return 0 if all are there, 3 if time ran out, 1 if one failed."""
    start, longest = time.monotonic(), 0.0
    joined = False
    for seed in options.seeds:
        for name in options.optimizers:
            if (options.out / "results" / f"{name}_{seed}.json").exists():
                continue
            began = time.monotonic()
            if began - start + longest > options.seconds:
                return 3
            if not joined:
                join_world()
                joined = True
            if error := train(options, name, seed):
                print(f"{name} seed {seed}: {error}", file=sys.stderr)
                return 1
            longest = max(longest, time.monotonic() - began)
    return 0


def train(options: argparse.Namespace, name: str, seed: int) -> str | None:
    """Train with one optimizer, and write its records. Return the error that stopped the run, if any."""
    warm = warm_start(options.out, seed)
    run_name = f"{name}_{seed}"
    steps = f"trainer={{steps: {options.steps}, validate_every: {options.steps // 3}}}"
    config = configuration(
        options.out, seed, run_name, ALGORITHM, warm, *OPTIMIZERS[name], steps
    )
    if error := attempt(config):
        return error
    records = [
        {
            key: record[key]
            for key in ("step", REWARD, ACCURACY, "train/step_time_ms")
            if key in record
        }
        for record in recorded(options.out, run_name)
    ]
    folder = options.out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{run_name}.part"
    part.write_text(json.dumps(records), encoding="utf-8")
    part.replace(folder / f"{run_name}.json")
    return None


def table(options: argparse.Namespace) -> str:
    """Format the medians of all finished runs as a table in Markdown."""
    curves: dict[str, list[list[dict[str, Any]]]] = {}
    for name in options.optimizers:
        files = (
            options.out / "results" / f"{name}_{seed}.json" for seed in options.seeds
        )
        curves[name] = [
            json.loads(file.read_text(encoding="utf-8"))
            for file in files
            if file.exists()
        ]
    lines = ["| optimizer | seeds | figure | by step |", "| --- | --- | --- | --- |"]
    for name, runs in curves.items():
        for key in (REWARD, ACCURACY):
            points = ", ".join(
                f"{step}: {value:.3f}" for step, value in _medians(runs, key)
            )
            lines.append(f"| {name} | {len(runs)} | {key} | {points} |")
    return "\n".join(lines)


def _medians(runs: list[list[dict[str, Any]]], key: str) -> list[tuple[int, float]]:
    """Return (step, median over the runs), at about seven steps."""
    by_step: dict[int, list[float]] = {}
    for records in runs:
        for record in records:
            if key in record:
                by_step.setdefault(int(record["step"]), []).append(float(record[key]))
    steps = sorted(by_step)
    stride = max(1, len(steps) // 6)
    shown = [*steps[::stride], *steps[-1:]]
    return [(step, statistics.median(by_step[step])) for step in dict.fromkeys(shown)]


if __name__ == "__main__":
    sys.exit(main())
