"""Ranks in a moment: a process that has imported everything forks the ranks of one job after another.

A server's module calls `serve` when it is run, and its users hold a `ForkServer` of that module. Nobody ends the ranks
of a job when one of them is lost: that they end by themselves is what is tested. Only what is left at the deadline,
or is stopped by a signal with nobody else left, is killed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from megaverl.processes import end_with_parent
from tests.worlds import free_port, rank_environment
from tests.zygote import end_with, start

TIMED_OUT = "still there at the deadline"

Job = dict[str, Any]  # `ranks`, `folder` of their output, `deadline` in seconds, and what the server's own body needs


class ForkServer:
    """Starts on entering, with everything imported; ends on leaving.

    Args:
        module: that calls `serve`.
        environment: of the server, and so of all ranks.
    """

    def __init__(self, module: str, **environment: str) -> None:
        self._module, self._environment = module, environment

    def __enter__(self) -> ForkServer:
        environment = rank_environment(0, 1, 0) | self._environment
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del environment[name]
        (stdin, jobs), (answers, output) = os.pipe(), os.pipe()
        self._process = start(self._module, environment, stdin=stdin, output=output, errors=2)
        for end in (stdin, output):
            os.close(end)
        self._jobs, self._answers = os.fdopen(jobs, "w", buffering=1), os.fdopen(answers)
        return self

    def __exit__(self, *error: object) -> None:
        self._jobs.close()
        self._process.wait(timeout=30)
        self._answers.close()

    def ask(self, job: Job) -> tuple[list[int], list[float], list[str]]:
        """Run a job's ranks until all have ended: exit codes (negative: the signal), when in seconds, output."""
        self._jobs.write(json.dumps(job, default=os.fspath) + "\n")
        line = self._answers.readline()
        assert line, "the server of ranks has ended"
        answer = json.loads(line)
        folder = Path(job["folder"])
        output = [(folder / f"rank_{rank}.out").read_text(errors="replace") for rank in range(job["ranks"])]
        return answer["codes"], answer["seconds"], output


def serve(preloaded: Iterable[str], body: Callable[[Job, int], int]) -> None:
    """Do the jobs that come on standard input.

    Args:
        preloaded: modules that the ranks find imported.
        body: what a rank of a job does; its exit code.
    """
    usual = gc.get_threshold()
    gc.set_threshold(100_000)
    for name in preloaded:
        importlib.import_module(name)
    gc.set_threshold(*usual)
    gc.freeze()  # the ranks share these pages, and need not look through them for garbage
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_do(json.loads(line), body)) + "\n")


def _do(job: Job, body: Callable[[Job, int], int]) -> dict[str, Any]:
    port, start = free_port(), time.monotonic()
    running = {_fork(job, rank, port, body): rank for rank in range(job["ranks"])}
    codes, seconds = [0] * job["ranks"], [0.0] * job["ranks"]
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            rank = running.pop(pid)
            codes[rank], seconds[rank] = os.waitstatus_to_exitcode(status), time.monotonic() - start
        elif all(_is_stopped(pid) for pid in running):
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        elif time.monotonic() - start > job["deadline"]:
            for pid, rank in running.items():
                with Path(job["folder"], f"rank_{rank}.out").open("a") as output:
                    output.write(TIMED_OUT + "\n")
                os.kill(pid, signal.SIGKILL)
            job["deadline"] = float("inf")
        else:
            time.sleep(0.01)
    return {"codes": codes, "seconds": seconds}


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _fork(job: Job, rank: int, port: int, body: Callable[[Job, int], int]) -> int:
    server, pid = os.getpid(), os.fork()
    if pid == 0:
        end_with_parent(server)
        _be_rank(job, rank, port, body)
    return pid


def _be_rank(job: Job, rank: int, port: int, body: Callable[[Job, int], int]) -> NoReturn:
    def as_rank() -> int:
        log = os.open(Path(job["folder"], f"rank_{rank}.out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a script starts in the background
        os.environ.update(rank_environment(rank, job["ranks"], port))
        return body(job, rank)

    end_with(as_rank)
