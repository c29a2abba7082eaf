"""Train with a tool of which 10 % of calls time out, 5 % raise and 2 % kill their process, and with one that works.

    python tools/check_faults.py                # three seeds that work, one that does not; a quarter of an hour
    python tools/check_faults.py --steps 40 --seeds 0 1

The task is that of configs/games/calculator_tool.yaml, with the same warm start for all runs. Prints validation
accuracy by step for every run, how many episodes were tried again and left out, and what the unreliable run holds: the
resident memory of its processes, their number and their open files, at a tenth of the run and at its end. Ends with 1
if the last accuracy lies outside of the seeds' range by more than its width, or if something leaks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

# A checkout needs no installation of megaverl.
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RECIPE = ROOT / "configs" / "games" / "calculator_tool.yaml"
UNRELIABLE = f"{ROOT / 'tools' / 'unreliable_calculator.py'}:unreliable"
ACCURACY = "validation/accuracy"
SAMPLE_SECONDS = 1.0
# Growth of the resident memory that is no leak.
FLAT = 0.02


class Held(NamedTuple):
    """What the processes of a run hold at one time.

    Attributes:
        step: steps that were finished.
        ranks: bytes of resident memory of the ranks.
        processes: number of processes.
        files: number of open files and sockets of the ranks.
    """

    step: int
    ranks: int
    processes: int
    files: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="megaverl_faults_") as folder:
        curves = {
            f"seed {seed}": run(Path(folder), options.steps, seed)[0]
            for seed in options.seeds
        }
        first = options.seeds[0]
        records, held = run(Path(folder), options.steps, first, unreliable=True)
        curves[f"seed {first}, unreliable"] = records
    validated = [r["step"] for r in records if ACCURACY in r]
    print(f"{'accuracy at step':24}" + "".join(f"{step:>8}" for step in validated))
    for name, curve in curves.items():
        values = [record[ACCURACY] for record in curve if ACCURACY in record]
        print(f"{name:24}" + "".join(f"{value:>8.1%}" for value in values))
    return int(not (is_within(list(curves.values())) & is_flat(records, held)))


def run(
    folder: Path, steps: int, seed: int, *, unreliable: bool = False
) -> tuple[list[dict[str, float]], list[Held]]:
    """Train, and return the records of its metrics and what it held over time."""
    name = f"seed_{seed}{'_unreliable' if unreliable else ''}"
    settings = [
        f"run={{dir: {folder}, name: {name}, seed: {seed}, log_with: jsonl}}",
        f"trainer={{steps: {steps}, validate_every: {max(1, steps // 10)}}}",
        "checkpoint={save_interval: 0, export_hf: false}",
        "environment.options.seconds=0.5",
    ]
    if unreliable:
        tool = f"{{calculator: {{function: '{UNRELIABLE}', blame: environment}}}}"
        settings += [
            f"environment.options.tools={tool}",
            "environment.faults={backoff_seconds: 0.0}",
        ]
    command = [
        *(sys.executable, "-m", "megaverl", "quickstart", f"--config={RECIPE}"),
        *settings,
    ]
    log = folder / f"{name}.log"
    metrics = folder / name / "metrics.jsonl"
    held: list[Held] = []
    over = threading.Event()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
        watch = threading.Thread(target=watch_over, args=(process, metrics, held, over))
        watch.start()
        code = process.wait()
        over.set()
        watch.join()
    if code:
        raise SystemExit(f"{name} ended with {code}:\n{log.read_text()[-2000:]}")
    return read_records(metrics), held


def watch_over(
    process: subprocess.Popen[bytes],
    metrics: Path,
    held: list[Held],
    over: threading.Event,
) -> None:
    """Append what a run and its children hold, until it is over."""
    root = psutil.Process(process.pid)
    while not over.wait(SAMPLE_SECONDS):
        try:
            children = root.children(recursive=True)
            ranks = [
                process for process in children if "LOCAL_RANK" in process.environ()
            ]
            memory = sum(process.memory_info().rss for process in ranks)
            files = sum(process.num_fds() for process in ranks)
        except psutil.Error:
            # A process has ended meanwhile.
            continue
        records = read_records(metrics)
        step = int(max((record["step"] for record in records), default=0))
        held.append(Held(step, memory, len(children), files))


def read_records(metrics: Path) -> list[dict[str, float]]:
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def is_within(curves: Sequence[Sequence[Mapping[str, float]]]) -> bool:
    """Print and return whether the last curve ends where the others do, within their spread."""
    *earlier, last = [
        [record[ACCURACY] for record in curve if ACCURACY in record][-1]
        for curve in curves
    ]
    width = max(earlier) - min(earlier)
    right = min(earlier) - width <= last <= max(earlier) + width
    print(
        f"last accuracy {last:.1%}; of the others {min(earlier):.1%} to {max(earlier):.1%}: "
        f"{'within' if right else 'OUTSIDE OF'} their spread"
    )
    return right


def is_flat(records: Sequence[Mapping[str, float]], held: Sequence[Held]) -> bool:
    """Print and return whether the run held as much at its end as after a tenth of it."""
    for name in ("faults", "retries", "replacements"):
        values = [record.get(f"environment/{name}", 0.0) for record in records]
        print(f"environment/{name:14}{sum(values):8.0f}")
    lost = [
        r["environment/failed_fraction"] for r in records if "environment/faults" in r
    ]
    print(f"left out{sum(lost) / len(lost):22.2%} of the episodes")
    last_step = max(look.step for look in held)
    early = [look for look in held if last_step / 10 <= look.step < last_step / 5]
    late = [look for look in held if last_step * 0.9 <= look.step < last_step]
    flat = True
    for name, tolerance in (("ranks", FLAT), ("processes", 0.0), ("files", FLAT)):
        # The largest of many samples, since tools start and end all the time.
        before = max(getattr(look, name) for look in early)
        after = max(getattr(look, name) for look in late)
        is_leak = after > before * (1 + tolerance) + (name == "processes")
        flat &= not is_leak
        unit = 2**20 if name == "ranks" else 1
        print(
            f"{name:12}{before / unit:10.0f} ->{after / unit:10.0f}"
            f"{' MiB' if unit > 1 else ''}{'  LEAK' if is_leak else ''}"
        )
    return flat


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.0f} s")
    raise SystemExit(code)
