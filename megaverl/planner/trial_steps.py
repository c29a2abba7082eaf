"""Measure real trainer steps, operator by operator, on a machine where other programs may be running."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megaverl.errors import MegaverlError
from megaverl.outside import MAX_TRACE_BYTES, read_json_file
from megaverl.processes import ending_with_parent

WARM_UP = 2  # steps
WATCH_SECONDS = 0.2
OPERATORS = (
    "rollout",
    "reward",
    "old_log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "critic_update",
    "actor_update",
    "draft_update",
    "reshard",
)
# Turns off work that does not occur in every step, so that all steps are alike.
SETTLED = (
    "checkpoint={save_interval: 0, export_hf: false}",
    "trainer.validate_every=0",
    "trainer.validate_at_start=false",
)


@dataclass(frozen=True)
class MeasuredOperator:
    """Median times of an operator, or of the whole "step", over steps without disturbance.

    Attributes:
        seconds: duration on the slowest rank.
        work: processor seconds per rank, without waits.
    """

    seconds: float
    work: float


@dataclass(frozen=True)
class MeasuredSteps:
    """Measurements of a run.

    Attributes:
        operators: operator name, or "step" -> its median times.
        others: largest number of processors that other programs used during the measured steps.
    """

    operators: dict[str, MeasuredOperator]
    others: float


class Watch(threading.Thread):
    """Thread that records how much of the machine's processors other programs use while a command runs."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self._process, self._done = process, threading.Event()
        # (wall clock, seconds of processors that others have used).
        self._looks: list[tuple[float, float]] = []

    def run(self) -> None:
        """Sample the processors' busy time until `end`, and subtract that of the command and its children."""
        import psutil

        before, busy, other_seconds = dict[int, float](), _busy_seconds(), 0.0
        while not self._done.wait(WATCH_SECONDS):
            by_process, now = dict[int, float](), _busy_seconds()
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(self._process)
                for process in (root, *root.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        times = process.cpu_times()
                        by_process[process.pid] = times.user + times.system
            run_seconds = sum(
                seconds - before.get(pid, 0.0) for pid, seconds in by_process.items()
            )
            other_seconds += max(0.0, now - busy - run_seconds)
            before, busy = by_process, now
            self._looks.append((time.time(), other_seconds))

    def end(self) -> None:
        """Stop recording and wait for the thread."""
        self._done.set()
        self.join()

    def others(self, begin: float, end: float) -> float:
        """Return the mean number of processors that other programs used between two wall-clock times."""
        if not self._looks:
            return 0.0
        looks_before = [look for look in self._looks if look[0] <= begin]
        looks_after = [look for look in self._looks if look[0] >= end]
        begin_time, begin_busy = looks_before[-1] if looks_before else self._looks[0]
        end_time, end_busy = looks_after[0] if looks_after else self._looks[-1]
        if end_time <= begin_time:
            return 0.0
        return (end_busy - begin_busy) / (end_time - begin_time)


def _busy_seconds() -> float:
    """Return the busy seconds of all processors since the machine started."""
    import psutil

    times = psutil.cpu_times()
    return float(
        times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    )


def real_steps(
    folder: Path, keys: Sequence[str], ranks: int, steps: int
) -> MeasuredSteps:
    """Run the trainer and return the times of its operators, without the first steps.

    They are read from the trace of the first rank of each role group. Only the quieter
    half of the steps counts: those in which other programs used the least.

    Raises:
        MegaverlError: the run failed.
    """
    run_settings = [
        f"run={{name: run, dir: {folder}, nproc: {ranks}, log_with: jsonl}}",
        f"trainer.steps={steps}",
    ]
    command = [
        sys.executable,
        "-m",
        "megaverl",
        "train",
        *keys,
        *run_settings,
        *SETTLED,
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            ending_with_parent(command),
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        watch = Watch(process.pid)
        watch.start()
        failed = process.wait()
        watch.end()
        output.seek(0)
        if failed:
            raise MegaverlError(
                f"calibrate: {' '.join(command)} failed.\n{output.read()[-4000:]}"
            )
    return steps_of_trace(folder / "run" / "timeline.json", watch.others)


def steps_of_trace(
    path: Path, load_between: Callable[[float, float], float]
) -> MeasuredSteps:
    """Return medians over the quieter half of a trace's steps.

    Args:
        load_between: from wall-clock times (begin, end) to the number of processors that other programs used.
    """
    events = read_json_file(path, MAX_TRACE_BYTES)["traceEvents"]
    seconds: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    work: defaultdict[str, defaultdict[int, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    disturbed: dict[int, float] = {}
    for event in events:
        facts = event.get("args", {})
        if (
            event["ph"] == "X"
            and facts.get("step") is not None
            and facts["step"] >= WARM_UP
        ):
            name, step = event["name"], facts["step"]
            seconds[name][step].append(event["dur"] / 1e6)
            work[name][step] += facts.get("processor_us", 0.0) / 1e6
            if name == "step":
                begin = event["ts"] / 1e6
                disturbed[step] = max(
                    disturbed.get(step, 0.0),
                    load_between(begin, begin + event["dur"] / 1e6),
                )
    quiet = sorted(disturbed, key=lambda step: disturbed[step])[
        : max(3, len(disturbed) // 2)
    ]
    operators = {}
    for name in (*(name for name in seconds if name in OPERATORS), "step"):
        spans = [max(seconds[name][step]) for step in quiet if step in seconds[name]]
        worked = [
            work[name][step] / len(seconds[name][step])
            for step in quiet
            if step in seconds[name]
        ]
        if spans:
            operators[name] = MeasuredOperator(
                statistics.median(spans), statistics.median(worked)
            )
    return MeasuredSteps(operators, max(disturbed[step] for step in quiet))
