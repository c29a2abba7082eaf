"""Test worlds: real processes in a gloo process group, started once and used by many tests.

    from tests.worlds import run_world
    results = run_world(4, "tests.distributed.group_ranks:sum_of_ranks", scale=2)   # one JSON result per rank

The function is imported by name in every rank and called with the keyword arguments (JSON; paths become strings).
The default process group is up, and RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set as torchrun
sets them. Whatever a module keeps at module level (a built engine, say) lives on for the next job in that world.

A rank that raises fails the test with its traceback. A hang is cut at the deadline, with the Python stack of every
rank that had not answered. After either the world is killed, and the next job in it starts a new one.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import selectors
import shutil
import signal
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from tests.zygote import ROOT, Process, start

__all__ = ["ROOT", "World", "WorldError", "close_worlds", "free_port", "rank_environment", "run_world"]

JOB_DEADLINE = float(os.environ.get("MEGAVERL_TEST_DEADLINE", "120"))  # seconds until a job counts as hung
START_DEADLINE = 180.0  # seconds: the first world waits for the zygote's imports, on a busy machine
GRACE_AFTER_ERROR = 10.0  # seconds in which the other ranks may answer once one has raised
LOG_LINES_SHOWN = 40
MAX_WORLDS = int(os.environ.get("MEGAVERL_TEST_WORLDS", "3"))  # worlds alive at once; memory bounds it


class WorldError(AssertionError):
    """A rank raised, died, or did not answer in time; the message holds the tracebacks, stacks and logs."""


class World:
    """`num_ranks` worker processes (`tests.world_worker`) and the pipes to them."""

    def __init__(self, num_ranks: int, *, bare: bool = False) -> None:
        self.num_ranks, self.bare = num_ranks, bare
        self.folder = Path(tempfile.mkdtemp(prefix=f"megaverl_world{num_ranks}_"))
        self.processes: list[Process] = []
        self.jobs: list[BinaryIO] = []  # write ends of the pipes that jobs go through
        self.answers: list[int] = []  # read ends of the ranks' answer pipes
        self.unread = [b""] * num_ranks
        self.num_jobs = 0
        port = free_port()
        for rank in range(num_ranks):
            self._start_rank(rank, port)
        try:
            self._collect("start", START_DEADLINE)
        except BaseException:
            self.kill()
            raise

    def _start_rank(self, rank: int, port: int) -> None:
        (jobs, to_rank), (from_rank, answers) = os.pipe(), os.pipe()
        log = os.open(self.log_file(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        environment = rank_environment(rank, self.num_ranks, port)
        process = start("tests.world_worker", environment, stdin=jobs, output=log, further=answers, bare=self.bare)
        for end in (jobs, log, answers):
            os.close(end)
        self.processes.append(process)
        self.jobs.append(os.fdopen(to_rank, "wb"))
        self.answers.append(from_rank)

    def log_file(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def run(self, target: str, kwargs: dict[str, Any], deadline: float) -> list[Any]:
        """Run `target` on every rank; the results in rank order. Raises WorldError."""
        self.num_jobs += 1
        job = {"id": self.num_jobs, "target": target, "kwargs": kwargs}
        line = json.dumps(job, default=os.fspath).encode() + b"\n"
        for rank, jobs in enumerate(self.jobs):
            try:
                jobs.write(line)
                jobs.flush()
            except BrokenPipeError as error:
                raise WorldError(f"rank {rank} died before {target}:\n{self._log_tail(rank)}") from error
        return [answer["result"] for answer in self._collect(target, deadline)]

    def _collect(self, what: str, seconds: float) -> list[dict[str, Any]]:
        """One answer from every rank, or WorldError with all that is known about why not."""
        found: dict[int, dict[str, Any]] = {}
        dead: list[int] = []
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self.answers):
                selector.register(pipe, selectors.EVENT_READ, rank)
            while selector.get_map() and time.monotonic() < deadline:
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    rank = key.data
                    answer = self._read_answer(rank)
                    if answer is None:
                        continue
                    selector.unregister(key.fd)
                    if "closed" in answer:
                        dead.append(rank)
                    else:
                        found[rank] = answer
                    if "closed" in answer or "error" in answer:
                        deadline = min(deadline, time.monotonic() + GRACE_AFTER_ERROR)
        if len(found) == self.num_ranks and not any("error" in answer for answer in found.values()):
            return [found[rank] for rank in range(self.num_ranks)]
        raise WorldError(self._failure_report(what, seconds, found, dead))

    def _read_answer(self, rank: int) -> dict[str, Any] | None:
        """The rank's next JSON line, None when it is not complete yet, {"closed": True} when the rank is gone."""
        chunk = os.read(self.answers[rank], 1 << 20)
        if not chunk:
            return {"closed": True}
        self.unread[rank] += chunk
        line, newline, rest = self.unread[rank].partition(b"\n")
        if not newline:
            return None
        self.unread[rank] = rest
        return dict(json.loads(line))

    def _failure_report(self, what: str, seconds: float, found: dict[int, dict[str, Any]], dead: list[int]) -> str:
        failed = [rank for rank, answer in sorted(found.items()) if "error" in answer]
        silent = [rank for rank in range(self.num_ranks) if rank not in found and rank not in dead]
        lines = [f"{what} failed in a world of {self.num_ranks}"]
        for rank in failed:
            lines += [f"--- rank {rank} raised", found[rank]["traceback"]]
        for rank in dead:
            code = self.processes[rank].wait(timeout=GRACE_AFTER_ERROR)
            lines += [f"--- rank {rank} ended with exit code {code}; end of its log", self._log_tail(rank)]
        if silent:
            waited = f"within {seconds:g} s" if not failed and not dead else "after that"
            lines.append(f"ranks {silent} did not answer {waited}")
            for rank in silent:
                lines += [f"--- rank {rank}: stack and end of its log", self._stack_of(rank)]
        for rank in failed[:1]:
            lines += [f"--- end of the log of rank {rank}", self._log_tail(rank)]
        return "\n".join(lines)

    def _stack_of(self, rank: int) -> str:
        """The Python stacks of a rank that hangs, written into its log by faulthandler."""
        log = self.log_file(rank)
        size = log.stat().st_size
        self.processes[rank].send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 3.0
        while log.stat().st_size == size and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
        return self._log_tail(rank, 2 * LOG_LINES_SHOWN)

    def _log_tail(self, rank: int, num_lines: int = LOG_LINES_SHOWN) -> str:
        return "\n".join(self.log_file(rank).read_text(errors="replace").splitlines()[-num_lines:])

    def kill(self) -> None:
        """End the ranks and whatever they started (each leads its own process group), by their ids only."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process, jobs, answers in zip(self.processes, self.jobs, self.answers, strict=True):
            process.wait(timeout=GRACE_AFTER_ERROR)
            with suppress(BrokenPipeError):  # of what could not be written
                jobs.close()
            os.close(answers)
        shutil.rmtree(self.folder, ignore_errors=True)


_worlds: dict[tuple[int, str], World] = {}  # least recently used first


def run_world(
    num_ranks: int,
    target: str,
    *,
    deadline: float = JOB_DEADLINE,
    fresh: bool = False,
    bare: bool = False,
    pool: str = "",
    **kwargs: Any,
) -> list[Any]:
    """Run `target` ("tests.module:function") with `kwargs` on `num_ranks` real processes.

    Args:
        num_ranks: size of the world.
        target: function importable by name; must return something JSON can hold.
        deadline: seconds until a job counts as hung.
        fresh: run in new processes that end afterwards, for what cannot share a process with other tests.
        bare: the same in interpreters that have imported nothing, for tests of what an import does.
        pool: name of a separate world of that size, e.g. to keep engines out of other tests' memory.

    Returns:
        The ranks' results in rank order.

    Raises:
        WorldError: a rank raised, died or hung.
    """
    if fresh or bare:
        make_room(MAX_WORLDS - 1)
        world = World(num_ranks, bare=bare)
        try:
            return world.run(target, kwargs, deadline)
        finally:
            world.kill()
    key = (num_ranks, pool)
    known = _worlds.pop(key, None)
    world = known or new_world(num_ranks)
    try:
        results = world.run(target, kwargs, deadline)
    except BaseException:
        world.kill()  # after a failure, nobody knows what the ranks still wait for
        raise
    _worlds[key] = world
    return results


def new_world(num_ranks: int) -> World:
    make_room(MAX_WORLDS - 1)
    return World(num_ranks)


def make_room(num_kept: int) -> None:
    """Close the least recently used worlds until `num_kept` are left."""
    while len(_worlds) > max(num_kept, 0):
        _worlds.pop(next(iter(_worlds))).kill()


def close_worlds() -> None:
    make_room(0)


def free_port() -> int:
    """One that nobody listens at, and that the system gives to no connection meanwhile: below its range of those."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The environment that torchrun would give this rank on one node, over the loopback interface."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
    }


atexit.register(close_worlds)
