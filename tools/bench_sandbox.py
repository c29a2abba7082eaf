"""Programs a second in a pool of warm sandboxes, compared with an unconfined interpreter for each program.

    python tools/bench_sandbox.py [--programs 400 --workers 2 --rounds 5]

Every program reads a number and prints its square, which is checked. Both sides take turns in one run, with as many
programs at once. Prints medians over the rounds, and the processor seconds of all processes for one program.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaverl.rewards.sandbox import ConfinedProgram, Sandbox

PROGRAM = "number = int(input())\nprint(number * number)\n"


def in_sandboxes(pool: Sandbox, numbers: Sequence[int]) -> list[str]:
    outcomes = pool.run_all(
        [ConfinedProgram(PROGRAM, input=f"{number}\n") for number in numbers]
    )
    return [outcome.output for outcome in outcomes]


def in_interpreters(workers: int, numbers: Sequence[int]) -> list[str]:
    def run(number: int) -> str:
        command = [sys.executable, "-I", "-S", "-c", PROGRAM]
        return subprocess.run(
            command, input=f"{number}\n", capture_output=True, text=True, check=True
        ).stdout

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(run, numbers))


def processor_seconds() -> float:
    """Return the processor seconds of this process, its workers, and the finished children of both."""
    times = [
        psutil.Process().cpu_times(),
        *(
            process_times.cpu_times()
            for process_times in psutil.Process().children(recursive=True)
        ),
    ]
    return sum(
        process_times.user
        + process_times.system
        + process_times.children_user
        + process_times.children_system
        for process_times in times
    )


def measure(
    run: Callable[[Sequence[int]], list[str]], count: int
) -> tuple[float, float]:
    """Return the programs a second and the processor milliseconds of one; all outputs must be right."""
    numbers, work, start = range(count), processor_seconds(), time.perf_counter()
    outputs = run(numbers)
    elapsed = time.perf_counter() - start
    assert outputs == [f"{number * number}\n" for number in numbers], (
        "an output is wrong"
    )
    return count / elapsed, 1e3 * (processor_seconds() - work) / count


def main(arguments: Sequence[str] | None = None) -> int:
    described = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    described.add_argument("--programs", type=int, default=400, help="in each round")
    described.add_argument("--workers", type=int, default=2, help="at once")
    described.add_argument("--rounds", type=int, default=5)
    options = described.parse_args(arguments)
    pool = Sandbox(size=options.workers)
    sides: dict[str, Callable[[Sequence[int]], list[str]]] = {
        "warm sandboxes": lambda numbers: in_sandboxes(pool, numbers),
        "an interpreter each": lambda numbers: in_interpreters(
            options.workers, numbers
        ),
    }
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    try:
        for run in sides.values():
            measure(run, options.workers)  # workers start
        for _ in range(options.rounds):
            for name, run in sides.items():
                measured[name].append(measure(run, options.programs))
    finally:
        pool.close()
    print(
        f"{options.programs} programs, {options.workers} at once, {os.cpu_count()} cores; "
        f"medians of {options.rounds} rounds"
    )
    for name, rounds in measured.items():
        rates, works = zip(*rounds, strict=True)
        rate, spread = statistics.median(rates), f"{min(rates):.0f} to {max(rates):.0f}"
        print(
            f"{name:<20} {rate:>6.0f} a second ({spread}), {statistics.median(works):.1f} ms of processors each"
        )
    warm, cold = (
        statistics.median(rate for rate, _ in rounds) for rounds in measured.values()
    )
    print(f"ratio {warm / cold:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
