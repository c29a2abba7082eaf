"""Ranks in a tenth of a second: a process that has imported torch forks the ranks of one job after another.

    with Server() as server:
        ended = server.run("tests.fabric.ranks:exchange", ranks=4, seed=3)

Each rank calls the function with the keyword arguments, in an environment as torchrun would set it, with no process
group made. Nobody ends the ranks when one of them is lost: that they end by themselves is what is tested.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.worlds import ROOT, free_port, rank_environment

PRELOADED = ("megaverl.fabric", "megaverl.coordinator", "megaverl.config.schema")


@dataclass(frozen=True)
class Ended:
    """How the ranks of a job ended.

    Attributes:
        codes: exit codes; negative: the signal.
        seconds: from the start to each rank's end.
        results: what the function returned, None where it raised or was ended.
        output: what each rank wrote, with the traceback.
    """

    codes: list[int]
    seconds: list[float]
    results: list[Any]
    output: list[str]

    def check(self) -> list[Any]:
        """The results; an AssertionError with the output of a rank that failed."""
        for rank, code in enumerate(self.codes):
            assert code == 0, f"rank {rank} ended with {code}\n{self.output[rank]}"
        return self.results


class Server:
    """Starts on entering, with everything imported; ends on leaving."""

    def __enter__(self) -> Server:
        environment = rank_environment(0, 1, 0)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del environment[name]
        self._folder = tempfile.TemporaryDirectory(prefix="megaverl_forks_")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fabric.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
        self._folder.cleanup()

    def run(self, target: str, *, ranks: int, deadline: float = 60.0, **kwargs: Any) -> Ended:
        """Call `target` ("module:function") on so many ranks, until all have ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        job = {"target": target, "ranks": ranks, "kwargs": kwargs, "folder": self._folder.name, "deadline": deadline}
        self._process.stdin.write(json.dumps(job, default=os.fspath) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the server of ranks has ended"
        answer = json.loads(line)
        output = [_read(Path(self._folder.name), rank, "out") for rank in range(ranks)]
        results = [json.loads(_read(Path(self._folder.name), rank, "json") or "null") for rank in range(ranks)]
        return Ended(answer["codes"], answer["seconds"], results, output)


def _read(folder: Path, rank: int, suffix: str) -> str:
    path = folder / f"rank_{rank}.{suffix}"
    return path.read_text(errors="replace") if path.exists() else ""


def serve() -> None:
    """Do the jobs that come on standard input."""
    for name in PRELOADED:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_do(json.loads(line))) + "\n")


def _do(job: dict[str, Any]) -> dict[str, Any]:
    for path in Path(job["folder"]).glob("rank_*"):
        path.unlink()
    port = free_port()
    start = time.monotonic()
    running = {_fork(job, rank, port): rank for rank in range(job["ranks"])}
    codes, seconds = [0] * job["ranks"], [0.0] * job["ranks"]
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            rank = running.pop(pid)
            codes[rank], seconds[rank] = os.waitstatus_to_exitcode(status), time.monotonic() - start
        elif time.monotonic() - start > job["deadline"]:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            job["deadline"] = float("inf")
        else:
            time.sleep(0.01)
    return {"codes": codes, "seconds": seconds}


def _fork(job: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid == 0:
        _be_rank(job, rank, port)
    return pid


def _be_rank(job: dict[str, Any], rank: int, port: int) -> NoReturn:
    code = 1
    try:
        log = os.open(Path(job["folder"], f"rank_{rank}.out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.update(rank_environment(rank, job["ranks"], port))
        module, function = job["target"].split(":")
        result = getattr(importlib.import_module(module), function)(**job["kwargs"])
        Path(job["folder"], f"rank_{rank}.json").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
