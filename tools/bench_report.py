"""Time that `megaverl report` takes for a long run, and the size of its page, on made-up records of 10,000 steps.

    python tools/bench_report.py [--steps 10000] [--runs 1] [--keep FOLDER]

The made-up run has as many records as a real one: 70 metrics, 12 spans and 4 samples a step.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from pathlib import Path

import yaml

from megaverl.config import Config
from megaverl.monitoring.report import write_report
from megaverl.monitoring.tracker import write_versions

STAGES = {
    "rollout": ("rollout", 400.0),
    "reward": ("reward", 20.0),
    "old_log_probs": ("actor", 120.0),
    "ref_log_probs": ("reference", 125.0),
    "values": ("critic", 65.0),
    "advantages": ("trainer", 1.5),
    "critic_update": ("critic", 240.0),
    "actor_update": ("actor", 340.0),
    "reshard": ("rollout", 8.0),
}
FAMILIES = ("actor", "critic", "rollout", "reward", "train", "reshard", "memory")


def make_run(folder: Path, steps: int, seed: int = 0) -> Path:
    """Write the files of a made-up run of `steps` steps."""
    random_numbers = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    config = Config().to_dict()
    config["trainer"]["steps"] = steps
    (folder / "train.yaml").write_text(yaml.safe_dump(config))
    write_versions(folder)
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "rank_0.log").write_text(
        "loading\nwarning: a warning of the run itself\n"
    )
    events: list[dict[str, object]] = []
    clock = 1.8e15
    with (
        (folder / "metrics.jsonl").open("w") as metrics,
        (folder / "samples.jsonl").open("w") as samples,
    ):
        for step in range(1, steps + 1):
            times = {
                name: usual * random_numbers.uniform(0.8, 1.3)
                for name, (_, usual) in STAGES.items()
            }
            metrics.write(
                json.dumps(_record(step, steps, clock / 1e6, times, random_numbers))
                + "\n"
            )
            for _ in range(4):
                samples.write(json.dumps(_sample(step, steps, random_numbers)) + "\n")
            begin = clock
            for name, milliseconds in times.items():
                facts = {"step": step - 1, "role": STAGES[name][0]}
                span = {
                    "ph": "X",
                    "pid": 0,
                    "tid": 1,
                    "name": name,
                    "ts": clock,
                    "dur": milliseconds * 1e3,
                }
                events.append({**span, "args": facts})
                clock += milliseconds * 1e3
            whole = {
                "ph": "X",
                "pid": 0,
                "tid": 1,
                "name": "step",
                "ts": begin,
                "dur": clock - begin,
            }
            events.append({**whole, "args": {"step": step - 1}})
    (folder / "timeline.json").write_text(json.dumps({"traceEvents": events}))
    return folder


def _record(
    step: int,
    steps: int,
    seconds: float,
    times: dict[str, float],
    numbers: random.Random,
) -> dict[str, float]:
    learned = 1 - math.exp(-5 * step / steps)
    record = {
        "step": step,
        "time": seconds,
        "reward/mean": learned + numbers.gauss(0, 0.05),
    }
    record |= {"reward/accuracy": min(1.0, max(0.0, learned + numbers.gauss(0, 0.03)))}
    record |= {
        f"{family}/number_{n}": numbers.gauss(n, 1)
        for family in FAMILIES
        for n in range(8)
    }
    record |= {f"time/{name}_ms": value for name, value in times.items()}
    total = sum(times.values())
    return record | {
        "time/step_ms": total,
        "train/step_time_ms": total,
        "train/tokens_per_sec": 5e6 / total,
    }


def _sample(step: int, steps: int, numbers: random.Random) -> dict[str, object]:
    answer = numbers.randrange(10**5)
    right = numbers.random() < step / steps
    response = f"Let me see. {'Step by step. ' * 10}The answer is {answer if right else answer + 1}."
    facts = {
        "prompt": f"What is {answer} + 0?",
        "response": response,
        "reference": str(answer),
    }
    return {
        "step": step,
        "split": "train",
        **facts,
        "reward": float(right),
        "finish_reason": "stop",
    }


def main() -> None:
    described = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    described.add_argument("--steps", type=int, default=10_000)
    described.add_argument("--runs", type=int, default=1)
    described.add_argument(
        "--keep", type=Path, help="write the runs and the page here, and leave them"
    )
    arguments = described.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        runs = [
            make_run(folder / f"run_{n}", arguments.steps, seed=n)
            for n in range(arguments.runs)
        ]
        nbytes = sum(
            path.stat().st_size
            for run in runs
            for path in run.rglob("*")
            if path.is_file()
        )
        start = time.perf_counter()
        page = write_report(runs, folder / "report.html")
        seconds = time.perf_counter() - start
        print(
            f"{arguments.runs} run(s) of {arguments.steps} steps, {nbytes / 1e6:.0f} MB of files: "
            f"{seconds:.2f} s, {page.stat().st_size / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    main()
