"""Ranks in a second instead of ten: a process that has imported everything forks the ranks of one run after another.

    with Server() as server:
        ended = server.run(["train", ...], ranks=2, environment=fault.environment(), logs=folder)

Nobody ends the ranks of a run when one of them is lost: that they end by themselves is what is tested. Only what
is left at the deadline is killed.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.worlds import ROOT, free_port, rank_environment

PRELOADED = (
    "megaverl.cli.train",
    "megaverl.trainer.run",
    "megaverl.trainer.rl",
    "megaverl.rollout.hf_engine",
    "transformers.models.qwen3.modeling_qwen3",
    "torch.distributed.checkpoint",
)
TIMED_OUT = "still there at the deadline"


@dataclass(frozen=True)
class Ended:
    """How the ranks of a run ended: exit codes (negative: the signal), when in seconds from the start, their output."""

    codes: list[int]
    seconds: list[float]
    output: list[str]

    @property
    def text(self) -> str:
        """What all ranks have said."""
        return "".join(self.output)

    @property
    def spread(self) -> float:
        """Seconds between the first rank's end and the last one's."""
        return max(self.seconds) - min(self.seconds)


class Server:
    """Starts on entering, with everything imported; ends on leaving."""

    def __enter__(self) -> Server:
        environment = rank_environment(0, 1, 0) | {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del environment[name]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def run(
        self,
        arguments: Sequence[str],
        *,
        logs: Path,
        ranks: int = 2,
        environment: Mapping[str, str] | None = None,
        on_rank: Mapping[int, Mapping[str, str]] | None = None,
        more: Mapping[int, Sequence[str]] | None = None,
        deadline: float = 120.0,
    ) -> Ended:
        """Run `megaverl ARGUMENTS` on so many ranks until all have ended.

        Args:
            environment: of all ranks, over what torchrun would give them.
            on_rank, more: what some ranks have besides: variables, arguments.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        logs.mkdir(parents=True, exist_ok=True)
        job = {"arguments": list(arguments), "ranks": ranks, "environment": dict(environment or {}), "logs": str(logs)}
        job |= {"on_rank": dict(on_rank or {}), "more": dict(more or {}), "deadline": deadline}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        output = [(logs / f"rank_{rank}.out").read_text(errors="replace") for rank in range(ranks)]
        return Ended(answer["codes"], answer["seconds"], output)


def serve() -> None:
    """Do the jobs that come on standard input."""
    import importlib

    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # the ranks share these pages, and need not look through them for garbage
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_do(json.loads(line))) + "\n")


def _do(job: dict[str, Any]) -> dict[str, Any]:
    port = free_port()
    start = time.monotonic()
    running = {_fork(job, rank, port): rank for rank in range(job["ranks"])}
    codes, seconds = [0] * job["ranks"], [0.0] * job["ranks"]
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            rank = running.pop(pid)
            codes[rank], seconds[rank] = os.waitstatus_to_exitcode(status), time.monotonic() - start
        elif all(_is_stopped(pid) for pid in running):  # by a signal; nobody else is left
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        elif time.monotonic() - start > job["deadline"]:
            for pid, rank in running.items():
                with Path(job["logs"], f"rank_{rank}.out").open("a") as output:
                    output.write(TIMED_OUT + "\n")
                os.kill(pid, signal.SIGKILL)
            job["deadline"] = float("inf")
        else:
            time.sleep(0.02)
    return {"codes": codes, "seconds": seconds}


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _fork(job: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid == 0:
        _be_rank(job, rank, port)
    return pid


def _be_rank(job: dict[str, Any], rank: int, port: int) -> NoReturn:
    code = 1
    try:
        log = os.open(Path(job["logs"], f"rank_{rank}.out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.update(rank_environment(rank, job["ranks"], port) | job["environment"])
        os.environ.update(job["on_rank"].get(str(rank), {}))
        from tests.faults.rank import main

        code = main(job["arguments"] + job["more"].get(str(rank), []))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
