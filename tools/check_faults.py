"""Train with a tool of which 10 % of calls time out, 5 % raise and 2 % kill their process, and with one that works.

    python tools/check_faults.py                # three seeds, each with both tools; half an hour
    python tools/check_faults.py --steps 40 --seeds 0 1

The task is that of configs/games/calculator_tool.yaml, with the same warm start for all runs. Prints validation
accuracy by step for every run, how many episodes were tried again and left out, and what the runs of the first seed
hold: the resident memory of their processes, their number and their open files, at a tenth of the run and at its end.

Failed calls are repeated with the same draws. Unless an episode is left out or replaced, a run with the unreliable tool
has therefore the losses of the run with the tool that works, and the number of steps whose losses differ is printed.

Ends with 1 if the unreliable runs learn less: if the mean of their accuracies over the last half of the run is below
those of all seeds with the tool that works. Ends with 1, too, if the unreliable run leaks: if it has more processes or
files at its end, or if its memory grows by more than 2 %: the most that it holds in some steps, which depends on the
lengths of the samples as well, or the least, which is what objects hold from step to step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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


Records = Sequence[Mapping[str, float]]


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
    working: dict[int, Records] = {}
    unreliable: dict[int, Records] = {}
    with tempfile.TemporaryDirectory(prefix="megaverl_faults_") as folder:
        first = options.seeds[0]
        for seed in options.seeds:
            working[seed], held = run(Path(folder), options.steps, seed)
            if seed == first:
                held_by_working = held
            unreliable[seed], held = run(
                Path(folder), options.steps, seed, unreliable=True
            )
            if seed == first:
                held_by_unreliable = held
    validated = [r["step"] for r in working[first] if ACCURACY in r]
    print(f"{'accuracy at step':24}" + "".join(f"{step:>8}" for step in validated))
    for seed in options.seeds:
        for kind, records in (("", working), (", unreliable", unreliable)):
            values = accuracies(records[seed])
            name = f"seed {seed}{kind}"
            print(f"{name:24}" + "".join(f"{value:>8.1%}" for value in values))
        differ = steps_that_differ(working[seed], unreliable[seed])
        print(f"seed {seed}: losses differ in {differ} of {options.steps} steps")
    learns = learns_as_much([*working.values()], [*unreliable.values()])
    print_faults(unreliable[first])
    flat = is_flat(held_by_working, held_by_unreliable)
    return int(not (learns and flat))


def run(
    folder: Path, steps: int, seed: int, *, unreliable: bool = False
) -> tuple[Records, list[Held]]:
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


def accuracies(records: Records) -> list[float]:
    """Return the validation accuracies of a run, in the order of its steps."""
    return [record[ACCURACY] for record in records if ACCURACY in record]


def steps_that_differ(some: Records, other: Records) -> int:
    """Return the number of steps whose loss or gradient norm is not the same in two runs."""

    def numbers(records: Records) -> dict[float, tuple[float, float]]:
        return {
            record["step"]: (record["actor/loss"], record["actor/grad_norm"])
            for record in records
            if "actor/loss" in record
        }

    one, two = numbers(some), numbers(other)
    return sum(one.get(step) != two.get(step) for step in {*one, *two})


def learns_as_much(working: Sequence[Records], unreliable: Sequence[Records]) -> bool:
    """Print and return whether unreliable runs learn as much as the others, within the spread of these."""

    def late(records: Records) -> float:
        values = accuracies(records)
        return statistics.mean(values[len(values) // 2 :])

    each = [late(records) for records in working]
    mean = statistics.mean(late(records) for records in unreliable)
    learns = mean >= min(each)
    print(
        f"accuracy over the last half: {mean:.1%} in the mean of the unreliable runs; "
        f"{min(each):.1%} to {max(each):.1%} of the others{'' if learns else ': LESS'}"
    )
    return learns


def print_faults(records: Records) -> None:
    """Print how many faults a run met, and what followed them."""
    for name in ("faults", "retries", "replacements"):
        values = [record.get(f"environment/{name}", 0.0) for record in records]
        print(f"environment/{name:14}{sum(values):8.0f}")
    lost = [
        r["environment/failed_fraction"] for r in records if "environment/faults" in r
    ]
    print(f"left out{sum(lost) / len(lost):22.2%} of the episodes")


def is_flat(working: Sequence[Held], unreliable: Sequence[Held]) -> bool:
    """Print both runs' growth, and return whether the unreliable one held as much at its end as after a tenth of it."""
    flat = True
    for title, name, pick in (
        ("memory, least", "ranks", min),
        ("memory, most", "ranks", max),
        ("processes", "processes", max),
        ("files", "files", max),
    ):
        unit = 2**20 if name == "ranks" else 1
        fewer, more = growth(unreliable, name, pick)
        # One more tool may run when the last sample is taken.
        is_leak = more > fewer * (1 + FLAT) + (name == "processes")
        flat &= not is_leak
        before, after = growth(working, name, pick)
        print(
            f"{title:16}{fewer / unit:8.0f} ->{more / unit:8.0f}{' MiB' if unit > 1 else ''}"
            f"   with the tool that works {before / unit:8.0f} ->{after / unit:8.0f}{'   LEAK' if is_leak else ''}"
        )
    return flat


def growth(
    held: Sequence[Held], name: str, pick: Callable[[Iterable[int]], int]
) -> tuple[int, int]:
    """Return the least or the most that a run held after a tenth of its steps, and in the last tenth.

    Args:
        pick: min or max of the samples. Tools start and end all the time, so one sample would not do.
    """
    last_step = max(look.step for look in held)
    early = [look for look in held if last_step / 10 <= look.step < last_step / 5]
    late = [look for look in held if last_step * 0.9 <= look.step < last_step]
    return (
        pick(getattr(look, name) for look in early),
        pick(getattr(look, name) for look in late),
    )


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.0f} s")
    raise SystemExit(code)
