"""Whatever starts processes leaves none behind, whether it is asked to end or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megaverl.processes import ending_with_parent
from megaverl.rewards.line_process import LineProcess
from tests.launcher import ROOT, start
from tests.rank import do_once

# seconds; more than a busy machine needs to start an interpreter with torch.
PATIENCE = 60.0
# seconds; what the kernel ends is gone in milliseconds, what ends by itself may need
# minutes.
GONE_WITHIN = 5.0

# What starts processes -> (a program that does, how many it has then, those of its
# children included).
STARTERS = {
    "a launched run": (
        "from megaverl.trainer.elastic_agent import start_ranks; start_ranks(['-m', 'tests.pausing'], 2)",
        2,
    ),
    "an agent": (
        "from megaverl.trainer.elastic_agent import main; main(['--nproc-per-node', '2', '-m', 'tests.pausing'])",
        2,
    ),
    "a reward's worker": (
        "import sys, signal; from megaverl.rewards.line_process import LineProcess\n"
        "LineProcess([sys.executable, '-c', 'while True: pass'], {}); signal.pause()",
        1,
    ),
    "the doctor": (
        "from megaverl.monitoring.doctor.trials import Trial; import time\n"
        "Trial('ranks', 'tests.pausing', 2, '', {}).finish(time.monotonic() + 600)",
        2,
    ),
    "ranks of the tests": (
        "from tests.launcher import Launcher; Launcher().ranks(2, 'signal:pause', deadline=600)",
        3,  # the server of copies too
    ),
    "ranks of the tests in new interpreters": (
        "from tests.launcher import Launcher; Launcher().world(2, 'signal:pause', bare=True)",
        2,
    ),
    "a benchmark's sides": (
        "import dataclasses, json, pathlib; from tools.bench_step import Job, measure\n"
        "pathlib.Path('job.json').write_text(json.dumps(dataclasses.asdict(Job())))\n"
        "measure(Job(), pathlib.Path.cwd(), ['megaverl'])",
        3,
    ),
    "a benchmark's process": (
        "import argparse; from tools.bench_memory import in_a_process\n"
        "in_a_process(argparse.Namespace(threads=1), 'model', [])",
        1,
    ),
}
# Others just end, as of SIGKILL.
HANDLE_SIGTERM = ("a launched run", "an agent", "a benchmark's sides")
CASES = [(kind, signal.SIGKILL) for kind in STARTERS] + [
    (kind, signal.SIGTERM) for kind in HANDLE_SIGTERM
]


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_nothing_stays_behind(kind: str, number: int, tmp_path: Path) -> None:
    program, count = STARTERS[kind]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(tmp_path),
    }
    environment["MEGAVERL_TEST_PRELOADS_NOTHING"] = "1"
    target, given = f"{__name__}:run", {"program": program, "folder": str(tmp_path)}
    arguments = (tmp_path / "log", environment, target, given, tmp_path / "result")
    # a copy's own ranks would be copies of the same server, and none of its descendants
    starter = start(do_once, *arguments, bare="ranks of the tests" in kind)
    started: set[tuple[int, str]] = set()
    deadline = time.monotonic() + PATIENCE
    while (
        len(started := descendants(starter.pid)) < count
        and starter.is_alive()
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    found = f"{kind} ended with {starter.exitcode} and has started {len(started)} of {count}"
    assert len(started) >= count, f"{found}\n{(tmp_path / 'log').read_text()}"
    os.kill(starter.pid, number)
    starter.join(PATIENCE)
    assert starter.exitcode is not None, (
        f"{kind} goes on after {signal.Signals(number).name}"
    )
    deadline = time.monotonic() + GONE_WITHIN
    try:
        while (
            remaining := {each for each in started if is_alive(*each)}
        ) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not remaining, (
            f"{kind}: {len(remaining)} of {len(started)} processes stayed"
        )
    finally:
        for pid, begun in started:
            if is_alive(pid, begun):
                os.kill(pid, signal.SIGKILL)


def run(program: str, folder: str) -> None:
    """What a starter does."""
    os.chdir(folder)
    exec(program, {})


def test_a_worker_outlives_the_thread_that_needed_it_first() -> None:
    """The kernel ends a process with the *thread* that has started it; a worker serves all threads of its process."""
    found: list[LineProcess] = []
    code = "print(1, flush=True); input(); print(2, flush=True)"
    thread = threading.Thread(
        target=lambda: found.append(LineProcess([sys.executable, "-c", code], {}))
    )
    thread.start()
    thread.join()
    [process] = found
    assert process.answer(PATIENCE) == 1
    process.send("go on")
    assert process.answer(PATIENCE) == 2
    process.close()


def test_a_command_keeps_its_number_output_and_exit_code() -> None:
    code = "import os, sys; print(os.getpid(), *sys.argv[1:]); sys.exit(7)"
    with subprocess.Popen(
        ending_with_parent([sys.executable, "-c", code, "a b", "--c"]),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        output, _ = process.communicate()
    assert (output, process.returncode) == (f"{process.pid} a b --c\n", 7)


def descendants(pid: int) -> set[tuple[int, str]]:
    """Processes below a process that run, each with the time at which it began."""
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _read(path).split()):
            fields = _fields(child)
            if fields and fields[0] != "Z":
                found |= {(child, fields[19])} | descendants(child)
    return found


def is_alive(pid: int, begun: str) -> bool:
    fields = _fields(pid)
    return bool(fields) and fields[0] != "Z" and fields[19] == begun


def _fields(pid: int) -> list[str]:
    """What /proc/PID/stat says after the name: the state first, the time of the start twentieth; empty: it is gone."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has just ended
        return ""
