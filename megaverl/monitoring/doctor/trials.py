"""Trials of the doctor: two ranks run an all-reduce, and an engine generates a token.

Each trial runs in separate processes, so that a hang or crash does not end the report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from megaverl.monitoring.doctor import Finding
from megaverl.processes import ending_with_parent, free_port
from megaverl.temporary import SHARED_MEMORY, folder_for_processes, remove_abandoned

RANKS = 2
# Limit of each trial; a cold import of vLLM alone was measured at 33 s.
TRIAL_SECONDS = 90.0
TRIAL_RANKS = "megaverl.monitoring.doctor.trial_ranks"
LAST_LINES = 6
KEPT_APART = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class Trial:
    """Processes of one trial, and the finding that results.

    The ranks' answers decide, not how their processes end: on a busy machine a rank may
    still be closing its connections at the deadline, or find those of other ranks
    broken.

    Example:
        trial = Trial("all-reduce", "package.module", 2, "what to do if it fails", {})
        ...                                            # its ranks work meanwhile, and call `answer`
        finding = trial.finish(time.monotonic() + 30)

    Args:
        name: name of the finding.
        module: run as `python -m module arguments` in each rank. Rank 0's last answer is the finding.
        ranks: number of processes.
        fix: advice if the trial fails.
        section: section of the finding.
    """

    def __init__(
        self,
        name: str,
        module: str,
        ranks: int,
        fix: str,
        environment: dict[str, str],
        *,
        arguments: Sequence[str] = (),
        section: str = "trials",
    ) -> None:
        self.name, self.fix, self.section = name, fix, section
        self._start = time.monotonic()
        self._logs: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(ranks)]  # noqa: SIM115 - read by finish()
        # `finish` removes the folder, since a killed rank cannot.
        self._files = ExitStack()
        variables = self._files.enter_context(folder_for_processes())
        self._scratch = Path(variables["TMPDIR"])
        port = str(free_port())
        kept = {
            key: value for key, value in os.environ.items() if key not in KEPT_APART
        }
        self._processes = [
            subprocess.Popen(
                ending_with_parent([sys.executable, "-m", module, *arguments]),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={
                    **kept,
                    **variables,
                    **environment,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                },
            )
            for rank, log in enumerate(self._logs)
        ]

    def finish(self, deadline: float) -> Finding:
        """Wait until all ranks have ended or `deadline` (of time.monotonic) passes, and return the finding."""
        # In the order in which they ended: the first failure breaks the other ranks'
        # connections.
        failed: list[int] = []
        while running := [
            rank
            for rank, process in enumerate(self._processes)
            if process.poll() is None
        ]:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
            failed += [rank for rank in running if self._processes[rank].poll()]
        failed += [
            rank
            for rank, process in enumerate(self._processes)
            if process.returncode and rank not in failed
        ]
        self._end(running)
        answers = [self._answer(rank) for rank in range(len(self._processes))]
        silent = [rank for rank, answer in enumerate(answers) if answer is None]
        if failed := [rank for rank in failed if rank in silent]:
            text = f"rank {failed[0]} ended with {self._processes[failed[0]].returncode}:\n{self._tail(failed[0])}"
            return Finding(self.section, self.name, "fail", text, self.fix)
        if unfinished := [rank for rank in silent if rank in running]:
            return self._cut_off(unfinished[0])
        first_answer = answers[0]
        if first_answer is None:
            text = f"rank 0 ended without an answer:\n{self._tail(0)}"
            return Finding(self.section, self.name, "fail", text, self.fix)
        return Finding(
            self.section,
            self.name,
            first_answer.get("status", "ok"),
            first_answer["found"],
            first_answer.get("fix", ""),
        )

    def _end(self, running: Sequence[int]) -> None:
        """Kill these ranks, and remove what all ranks have left behind."""
        for rank in running:
            self._processes[rank].kill()
        for process in self._processes:
            process.wait()
        self._files.close()
        remove_abandoned(SHARED_MEMORY)

    def _answer(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's last answer, or None. A library may print more lines after it."""
        answers = (
            line
            for line in reversed(self._lines(rank))
            if line.startswith('{"found": ')
        )
        line = next(answers, None)
        return None if line is None else dict(json.loads(line))

    def _cut_off(self, rank: int) -> Finding:
        seconds = time.monotonic() - self._start
        text = f"not done after {seconds:.0f} s, and ended. Its last words:\n{self._tail(rank)}"
        return Finding(
            self.section,
            self.name,
            "fail",
            text,
            f"give it longer with --timeout 120; then: {self.fix}",
        )

    def _lines(self, rank: int) -> list[str]:
        self._logs[rank].seek(0)
        return self._logs[rank].read().decode(errors="replace").strip().splitlines()

    def _tail(self, rank: int) -> str:
        return "\n".join(self._lines(rank)[-LAST_LINES:]) or "(it said nothing)"


def start_trials(*, generate: bool) -> Iterator[Trial]:
    """Yield the trials. Each one starts when it is asked for."""
    one_each = torch.cuda.device_count() >= RANKS
    network = "look at the section network; NCCL_DEBUG=INFO shows what NCCL tries"
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    yield Trial(
        "all-reduce of two ranks",
        TRIAL_RANKS,
        RANKS,
        network
        if one_each
        else "name a working interface with GLOO_SOCKET_IFNAME (such as lo)",
        environment,
        arguments=["add_up"],
    )
    if generate:
        yield Trial(
            "one token",
            TRIAL_RANKS,
            1,
            "the last lines say why; VLLM_LOGGING_LEVEL=INFO says more, rollout.engine=hf does without vLLM",
            environment,
            arguments=["draw_token"],
        )


def join(ranks: int) -> tuple[int, int, torch.device]:
    """Join the other ranks of a trial, over NCCL if each has a GPU; return (rank, world size, device)."""
    from megaverl.distributed.store import job_store

    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=60)
    with_gpus = torch.cuda.device_count() >= max(RANKS, ranks)
    device = torch.device("cuda", rank) if with_gpus else torch.device("cpu")
    if with_gpus:
        torch.cuda.set_device(device)
    store, rank, size = job_store(timeout)
    backend = "nccl" if with_gpus else "gloo"
    dist.init_process_group(
        backend, timeout=timeout, store=store, rank=rank, world_size=size
    )
    return rank, size, device


def answer(finding: str = "", **details: str) -> None:
    """Print a rank's answer, which says that its part of the trial succeeded. Rank 0's answer is the finding."""
    print(json.dumps({"found": finding, **details}), flush=True)


def measure_rates(timeout: float) -> Finding:
    """Run one rank on each GPU, with no other trial running, and report NCCL's rates between them."""
    gpus = torch.cuda.device_count()
    if gpus < RANKS:
        return Finding(
            "trials",
            "NCCL rates",
            "note",
            f"{gpus} GPU here: there is nothing to measure between",
        )
    fix = "NCCL_DEBUG=INFO shows what NCCL tries; look at the sections network and hardware"
    environment = {"OMP_NUM_THREADS": "1"}
    trial = Trial(
        "NCCL rates", TRIAL_RANKS, gpus, fix, environment, arguments=["measure_links"]
    )
    return trial.finish(time.monotonic() + timeout)
