#!/usr/bin/env python3
"""Cost of the coordinator: its share of a step's time, and the bytes of a decision, for models of several sizes.

    python tools/bench_coordinator.py                        # engine, critic, actor and coordinator, a rank each
    python tools/bench_coordinator.py --sizes 64,256,512

Every row is a real run of `megaverl train`, PPO with two updates a step. Counted is the round trip of the actor's
reports and decisions, without the wait for the critic, which takes part in the same decision. The aims are less than
1 % of a step, and a number of bytes that does not depend on the model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RANKS = 4
LIMIT = 0.01
FIRST = 3  # steps in which every kernel is used once


def main() -> int:
    described = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    described.add_argument("--sizes", default="64,256,512", help="hidden sizes of the models, with commas")
    described.add_argument("--steps", type=int, default=10)
    described.add_argument("--json", metavar="FILE")
    options = described.parse_args()
    rows = [measure(int(size), options.steps) for size in options.sizes.split(",")]
    print(f"{'hidden size':>11}{'weights':>13}{'step, ms':>10}{'exchange, ms':>14}{'share':>9}{'bytes a step':>14}")
    for row in rows:
        print(
            f"{row['hidden']:>11.0f}{row['weights']:>13,.0f}{row['step_ms']:>10.0f}{row['exchange_ms']:>14.2f}"
            f"{row['share']:>9.2%}{row['bytes']:>14.0f}"
        )
    same = len({row["bytes"] for row in rows}) == 1
    longest = max(row["exchange_ms"] for row in rows)
    least = longest / LIMIT
    print(f"bytes the same for all models: {same}; at most {LIMIT:.0%} of every step of {least:.0f} ms or more")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(hidden: int, steps: int) -> dict[str, float]:
    """Run one size and return the medians over its later steps."""
    from megaverl.trainer.elastic_agent import start_ranks
    from tools.bench_overlap import make_arguments

    with tempfile.TemporaryDirectory(prefix="megaverl_coordinator_") as name:
        folder = Path(name)
        arguments = make_arguments(folder, argparse.Namespace(real=False, steps=steps), hidden=hidden)
        arguments += [
            "placement={rollout: 0, critic: 1, actor: 2, reference: actor, coordinator: 3}",
            "algorithm.num_mini_batches=2",
            "run.name=run",
        ]
        command = ["-m", "megaverl.cli.main", "train", *arguments]
        if code := start_ranks(command, RANKS, log_hint=str(folder / "run" / "logs")):
            raise SystemExit(f"hidden size {hidden}: the run ended with {code}")
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines][FIRST:-1]
        weights = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors")) / 4
    medians = {
        name: statistics.median(record[key] for record in records)
        for name, key in (
            ("step_ms", "train/step_time_ms"),
            ("exchange_ms", "coordinator/exchange_ms"),
            ("bytes", "coordinator/bytes"),
        )
    }
    return {"hidden": hidden, "weights": weights, "share": medians["exchange_ms"] / medians["step_ms"], **medians}


if __name__ == "__main__":
    sys.exit(main())
