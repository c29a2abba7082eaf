"""Real ranks for tests, in three ways, by the fixture `launch`:

    results = launch.world(4, "tests.distributed.group_ranks:gather", value=2)   # in a gloo process group, kept
    ended = launch.ranks(4, "tests.controller.connection_ranks:lost", rank=2)         # new ones, until all have ended
    ended = launch.command(["train", ...], ranks=2, logs=folder)                 # the same for the real command

A function is imported by name in every rank and called with the keyword arguments; what
it returns must be JSON. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are
set as torchrun sets them. Ranks are copies of a process that has imported everything
(tests/preload.py) and start in a moment; on a GPU, which no copy can use, and where a
test asks for it (`bare`), they are new interpreters.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megaverl.gpus import count_gpus
from megaverl.temporary import folder_for_processes
from megaverl.trainer.preflight import CHECKED
from tests import rank as rank_program

ROOT = Path(__file__).resolve().parents[1]
# Seconds until a job counts as hung. Many times what any takes, because a machine may be
# busy, and nothing of a new environment has been imported yet.
JOB_DEADLINE = float(os.environ.get("MEGAVERL_TEST_DEADLINE", "300"))
# Seconds: the first world waits for the imports.
START_DEADLINE = 180.0
# Seconds in which the other ranks may answer once one has raised.
GRACE_AFTER_ERROR = 10.0
LOG_LINES_SHOWN = 40
# Worlds alive at once; memory bounds it.
MAX_WORLDS = int(os.environ.get("MEGAVERL_TEST_WORLDS", "3"))
TIMED_OUT = "still there at the deadline"
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}


class WorldError(AssertionError):
    """A rank raised, died, or did not answer in time; the message holds the tracebacks, stacks and logs."""


@dataclass(frozen=True)
class Ended:
    """How ranks ended, each by itself.

    Attributes:
        codes: exit codes; negative: the signal.
        seconds: from the start to each rank's end.
        output: what each rank wrote, with the traceback.
        results: what the function returned, None where it raised or was ended.
    """

    codes: list[int]
    seconds: list[float]
    output: list[str]
    results: list[Any]

    @property
    def text(self) -> str:
        """What all ranks wrote."""
        return "".join(self.output)

    @property
    def spread(self) -> float:
        """Seconds between the first rank's end and the last one's."""
        return max(self.seconds) - min(self.seconds)

    def check(self) -> list[Any]:
        """The results; an AssertionError with the output of all ranks that failed."""
        failed = [rank for rank, code in enumerate(self.codes) if code != 0]
        assert not failed, "\n".join(
            f"rank {n} ended with {self.codes[n]}\n{self.output[n]}" for n in failed
        )
        return self.results


class Launcher:
    """Starts ranks; ends on leaving the worlds that it has kept."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}  # least recently used first

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *error: object) -> None:
        self._keep(0)

    def world(
        self,
        num_ranks: int,
        target: str,
        *,
        deadline: float = JOB_DEADLINE,
        fresh: bool = False,
        bare: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `target` ("tests.module:function") with `kwargs` on ranks whose default process group is up.

        The ranks stay for the next job on as many, with whatever modules keep at module
        level (a built engine, say), unless this one fails.

        Args:
            deadline: seconds until a job counts as hung.
            fresh: in new processes that end afterwards, for what cannot share a process with other tests.
            bare: the same in interpreters that have imported nothing, for tests of what an import does.

        Returns:
            The ranks' results in rank order.

        Raises:
            WorldError: a rank raised, died or hung.
        """
        known = None if fresh or bare else self._worlds.pop(num_ranks, None)
        if known is None:
            self._keep(MAX_WORLDS - 1)
        world = known or World(num_ranks, bare=bare)
        try:
            results = world.run(target, kwargs, deadline)
        except BaseException:
            world.kill()  # after a failure, nobody knows what the ranks still wait for
            raise
        if fresh or bare:
            world.kill()
        else:
            self._worlds[num_ranks] = world
        return results

    def ranks(
        self,
        num_ranks: int,
        target: str,
        *,
        deadline: float = JOB_DEADLINE,
        **kwargs: Any,
    ) -> Ended:
        """Run `target` on new ranks without a process group, until all have ended by themselves.

        Nobody ends them when one is lost: that they end is what is tested. Only what is
        left at the deadline in seconds, or is stopped by a signal with nobody else
        left, is killed.
        """
        with folder_for_processes() as variables:
            return _until_ended(
                target,
                [_plain(kwargs)] * num_ranks,
                [variables] * num_ranks,
                Path(variables["TMPDIR"]),
                deadline,
            )

    def command(
        self,
        arguments: Sequence[str],
        *,
        logs: Path,
        ranks: int = 2,
        environment: Mapping[str, str] | None = None,
        on_rank: Mapping[int, Mapping[str, str]] | None = None,
        more: Mapping[int, Sequence[str]] | None = None,
        deadline: float = JOB_DEADLINE,
        folder: Path | None = None,
    ) -> Ended:
        """Run `megaverl ARGUMENTS` on new ranks without a GPU, until all have ended by themselves.

        Args:
            arguments: where the first is a .py file, that program is run with the others.
            logs: the folder for what the ranks write.
            environment: of all ranks, over what torchrun would give them.
            on_rank, more: what some ranks have besides: variables, arguments.
            folder: the ranks' working folder; None: this process's.
        """
        logs.mkdir(parents=True, exist_ok=True)
        on_rank, more = on_rank or {}, more or {}
        place = {} if folder is None else {"folder": str(folder)}
        kwargs = [
            {"arguments": [*arguments, *more.get(rank, ())], **place}
            for rank in range(ranks)
        ]
        # The command that starts ranks has checked code and data, for which each test
        # would wait seconds.
        of_all = {**CPU_ONLY, CHECKED: "1", **(environment or {})}
        with folder_for_processes() as variables:
            environments = [
                {**variables, **of_all, **on_rank.get(rank, {})}
                for rank in range(ranks)
            ]
            return _until_ended(
                "tests.faults.rank:command", kwargs, environments, logs, deadline
            )

    def _keep(self, num_worlds: int) -> None:
        """Close the least recently used worlds until so many are left."""
        while len(self._worlds) > max(num_worlds, 0):
            self._worlds.pop(next(iter(self._worlds))).kill()


class World:
    """Ranks in a process group (`tests.rank.stay`), and the pipes to them."""

    def __init__(self, num_ranks: int, *, bare: bool = False) -> None:
        self.num_ranks = num_ranks
        # Also for what ranks and engines leave when they are killed.
        self._files = contextlib.ExitStack()
        variables = self._files.enter_context(folder_for_processes())
        self.folder = Path(variables["TMPDIR"])
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.pipes: list[Connection] = []
        port = free_port()
        for rank in range(num_ranks):
            pipe, theirs = multiprocessing.Pipe()
            environment = rank_environment(rank, num_ranks, port) | variables
            with theirs:
                self.processes.append(
                    start(
                        rank_program.stay,
                        self.log_file(rank),
                        environment,
                        theirs,
                        bare=bare,
                    )
                )
            self.pipes.append(pipe)
        try:
            self._collect("start", START_DEADLINE)
        except BaseException:
            self.kill()
            raise

    def log_file(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def run(self, target: str, kwargs: dict[str, Any], deadline: float) -> list[Any]:
        """Run `target` on every rank; the results in rank order. Raises WorldError."""
        job = {"target": target, "kwargs": _plain(kwargs)}
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send(job)
            except BrokenPipeError as error:
                raise WorldError(
                    f"rank {rank} died before {target}:\n{self._log_tail(rank)}"
                ) from error
        return [answer["result"] for answer in self._collect(target, deadline)]

    def _collect(self, what: str, seconds: float) -> list[dict[str, Any]]:
        """One answer from every rank, or WorldError with all that is known about why not."""
        found: dict[int, dict[str, Any]] = {}
        dead: list[int] = []
        waiting: dict[object, int] = {
            pipe: rank for rank, pipe in enumerate(self.pipes)
        }
        deadline = time.monotonic() + seconds
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait([self.pipes[rank] for rank in waiting.values()], left):
                rank = waiting.pop(pipe)
                try:
                    found[rank] = json.loads(self.pipes[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    dead.append(rank)
                if rank in dead or "error" in found[rank]:
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_ERROR)
        if len(found) == self.num_ranks and not any(
            "error" in answer for answer in found.values()
        ):
            return [found[rank] for rank in range(self.num_ranks)]
        raise WorldError(self._failure_report(what, seconds, found, dead))

    def _failure_report(
        self,
        what: str,
        seconds: float,
        found: dict[int, dict[str, Any]],
        dead: list[int],
    ) -> str:
        failed = [rank for rank, answer in sorted(found.items()) if "error" in answer]
        silent = [
            rank
            for rank in range(self.num_ranks)
            if rank not in found and rank not in dead
        ]
        lines = [f"{what} failed in a world of {self.num_ranks}"]
        for rank in failed:
            lines += [f"--- rank {rank} raised", found[rank]["error"]]
        for rank in dead:
            self.processes[rank].join(GRACE_AFTER_ERROR)
            code = self.processes[rank].exitcode
            lines += [
                f"--- rank {rank} ended with exit code {code}; end of its log",
                self._log_tail(rank),
            ]
        if silent:
            waited = (
                f"within {seconds:g} s" if not failed and not dead else "after that"
            )
            lines.append(f"ranks {silent} did not answer {waited}")
            for rank in silent:
                lines += [
                    f"--- rank {rank}: stack and end of its log",
                    self._stack_of(rank),
                ]
        for rank in failed[:1]:
            lines += [f"--- end of the log of rank {rank}", self._log_tail(rank)]
        return "\n".join(lines)

    def _stack_of(self, rank: int) -> str:
        """The Python stacks of a rank that hangs, written into its log by faulthandler."""
        log = self.log_file(rank)
        size = log.stat().st_size
        if self.processes[rank].is_alive():
            os.kill(_pid(self.processes[rank]), signal.SIGUSR1)
        deadline = time.monotonic() + 3.0
        while log.stat().st_size == size and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
        return self._log_tail(rank, 2 * LOG_LINES_SHOWN)

    def _log_tail(self, rank: int, num_lines: int = LOG_LINES_SHOWN) -> str:
        return "\n".join(
            self.log_file(rank).read_text(errors="replace").splitlines()[-num_lines:]
        )

    def kill(self) -> None:
        """End the ranks and whatever they started (each leads its own process group), by their ids only."""
        for process in self.processes:
            if process.is_alive():
                # It has just ended, or leads no group yet.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(_pid(process), signal.SIGKILL)
                process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(GRACE_AFTER_ERROR)
            pipe.close()
        self._files.close()


def start(
    body: Any,
    log: Path,
    environment: dict[str, str],
    *arguments: Any,
    bare: bool = False,
) -> multiprocessing.process.BaseProcess:
    """A process that does `body` (of `tests.rank`) at the top of the repository and writes to a log."""
    hides_gpus = environment.get("CUDA_VISIBLE_DEVICES") == ""
    context = (
        multiprocessing.get_context("spawn")
        if bare or (_num_gpus() and not hides_gpus)
        else _copies()
    )
    log.write_text("")
    process = context.Process(target=body, args=(log, environment, *arguments))
    with contextlib.chdir(ROOT):
        process.start()
    return process


@functools.cache
def _copies() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


@functools.cache
def _num_gpus() -> int:
    return count_gpus()


def _until_ended(
    target: str,
    kwargs: list[dict[str, Any]],
    environments: list[dict[str, str]],
    folder: Path,
    deadline: float,
) -> Ended:
    """Run `target` with these arguments and variables, by rank, until all ranks have ended; logs go to `folder`."""
    port, num_ranks = free_port(), len(kwargs)
    logs, found = (
        [folder / f"rank_{rank}.{end}" for rank in range(num_ranks)]
        for end in ("out", "json")
    )
    processes = []
    for rank, log in enumerate(logs):
        found[rank].unlink(missing_ok=True)
        environment = rank_environment(rank, num_ranks, port) | environments[rank]
        processes.append(
            start(
                rank_program.do_once,
                log,
                environment,
                target,
                kwargs[rank],
                found[rank],
            )
        )
    # What the first ranks are copied from imports everything before.
    begun = time.monotonic()
    running, seconds = dict(enumerate(processes)), [0.0] * num_ranks
    while running:
        wait([process.sentinel for process in running.values()], 0.1)
        for rank in [
            rank for rank, process in running.items() if not process.is_alive()
        ]:
            seconds[rank] = time.monotonic() - begun
            del running[rank]
        is_late = time.monotonic() - begun > deadline
        if is_late or all(_is_stopped(_pid(process)) for process in running.values()):
            for rank, process in running.items():
                process.kill()
                if is_late:
                    with logs[rank].open("a") as log_file:
                        log_file.write(TIMED_OUT + "\n")
            deadline = float("inf")
    results = [
        json.loads(path.read_text()) if path.exists() else None for path in found
    ]
    output = [log.read_text(errors="replace") for log in logs]
    return Ended(
        [-1 if process.exitcode is None else process.exitcode for process in processes],
        seconds,
        output,
        results,
    )


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    """As JSON has them; paths become strings."""
    return dict(json.loads(json.dumps(kwargs, default=os.fspath)))


def _pid(process: multiprocessing.process.BaseProcess) -> int:
    assert process.pid is not None, "it has been started"
    return process.pid


def _is_stopped(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        )
    except OSError:  # it has just ended
        return False


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
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
        ),
        "PYTHONUNBUFFERED": "1",
    }
