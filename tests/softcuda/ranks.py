"""The process whose copies are ranks on the software device, and how tests start them.

    python -m tests.softcuda.ranks FOLDER          FOLDER: of tests.softcuda.build

torch, megatron-core and transformers take an interpreter some fifteen seconds. So one
process imports them with the device, once for a session of tests, and each rank is a
copy of it, as with `tests.launcher` for ranks on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from megaverl.temporary import folder_for_processes
from tests.launcher import ROOT, TIMED_OUT, Ended, free_port, rank_environment
from tests.softcuda import install, vllm
from tests.softcuda.install import Options

START_DEADLINE = 180.0  # seconds, on a busy machine
MODULES = (
    "megaverl.cli.train",
    "megaverl.trainer.run",
    "megaverl.trainer.loop",
    "megaverl.rollout.hf_engine",
    "transformers.models.qwen3.modeling_qwen3",
    "torch.distributed.checkpoint",
)


MATRIX_PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::linear",
    "aten::matmul",
)


@dataclass(frozen=True)
class EndedOnDevice(Ended):
    """How ranks on software devices ended.

    Attributes:
        kernels: by rank: how often each operator has run on its device.
        reports: what the devices have found wrong, in the order of ranks.
    """

    kernels: list[dict[str, int]]
    reports: list[str]

    def check(self) -> list[Any]:
        """Return the results. Raise where a rank failed, where a device reported something, or where none computed."""
        results = super().check()
        assert not self.reports, "\n".join(self.reports)
        for rank, counts in enumerate(self.kernels):
            assert counts, f"rank {rank} ran nothing on its device"
        return results

    def matrix_products(self, rank: int) -> int:
        """Return how many matrix products ran on a rank's device."""
        return sum(self.kernels[rank].get(name, 0) for name in MATRIX_PRODUCTS)


class SoftwareDevice:
    """Starts ranks whose GPUs are software devices.

    Example:
        with SoftwareDevice(build(folder)) as device:
            ended = device.command(["train", ...], ranks=2, logs=logs, options=Options(tracks_order=True))
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._template: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SoftwareDevice:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._template is not None and self._template.stdin is not None:
            self._template.stdin.close()
            self._template.wait()

    def ranks(
        self,
        num_ranks: int,
        target: str,
        *,
        options: Options | None = None,
        environment: Mapping[str, str] | None = None,
        logs: Path | None = None,
        deadline: float = 150.0,
        **kwargs: Any,
    ) -> EndedOnDevice:
        """Run `target` ("tests.module:function") with `kwargs` on new ranks until all have ended.

        Args:
            options: of the devices; by default as many as there are ranks, and nothing is looked for.
            environment: variables over those that torchrun would set.
            logs: folder for what the ranks write.
            deadline: seconds until the ranks are killed.
        """
        with contextlib.ExitStack() as stack:
            if logs is None:
                logs = Path(
                    stack.enter_context(
                        tempfile.TemporaryDirectory(prefix="megaverl_softcuda_")
                    )
                )
            reports = logs / "reports"
            reports.mkdir(parents=True, exist_ok=True)
            chosen = replace(
                options or Options(devices=num_ranks), reports=str(reports)
            )
            variables = stack.enter_context(folder_for_processes())
            port = free_port()
            jobs = []
            for rank in range(num_ranks):
                of_rank = rank_environment(rank, num_ranks, port) | variables
                of_rank["TORCHDYNAMO_DISABLE"] = "1"
                of_rank["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(num_ranks)))
                jobs.append(
                    {
                        "rank": rank,
                        "target": target,
                        "kwargs": json.loads(json.dumps(kwargs, default=os.fspath)),
                        "options": asdict(chosen),
                        "environment": of_rank | dict(environment or {}),
                        "log": str(logs / f"rank_{rank}.out"),
                        "result": str(logs / f"rank_{rank}.json"),
                        "kernels": str(logs / f"rank_{rank}.kernels.json"),
                    }
                )
            ended = self._run(jobs, deadline)
            counted = [Path(job["kernels"]) for job in jobs]
            return EndedOnDevice(
                **vars(ended),
                kernels=[
                    json.loads(path.read_text()) if path.exists() else {}
                    for path in counted
                ],
                reports=[path.read_text() for path in sorted(reports.iterdir())],
            )

    def command(
        self, arguments: Sequence[str], *, ranks: int = 2, logs: Path, **more: Any
    ) -> EndedOnDevice:
        """Run `megaverl ARGUMENTS` on new ranks; see `ranks`."""
        return self.ranks(
            ranks,
            "tests.faults.rank:command",
            logs=logs,
            arguments=list(arguments),
            **more,
        )

    def _run(self, jobs: list[dict[str, Any]], deadline: float) -> Ended:
        template = self._started()
        assert template.stdin is not None and template.stdout is not None
        begun = time.monotonic()
        for job in jobs:
            Path(job["log"]).write_text("")
            Path(job["result"]).unlink(missing_ok=True)
            template.stdin.write(json.dumps(job).encode() + b"\n")
        pids: dict[int, int] = {}
        codes: dict[int, int] = {}
        seconds = [0.0] * len(jobs)
        with selectors.DefaultSelector() as selector:
            selector.register(template.stdout, selectors.EVENT_READ)
            while len(codes) < len(jobs):
                if not selector.select(max(0.0, begun + deadline - time.monotonic())):
                    for rank in pids.keys() - codes.keys():
                        with Path(jobs[rank]["log"]).open("a") as log:
                            log.write(TIMED_OUT + "\n")
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(pids[rank], signal.SIGKILL)
                    deadline = float("inf")
                    continue
                line = template.stdout.readline()  # unbuffered: see `_started`
                if not line:
                    raise RuntimeError(
                        f"the process that ranks are copies of has ended with {template.wait()}"
                    )
                answer = json.loads(line)
                if "pid" in answer:
                    pids[answer["rank"]] = answer["pid"]
                    continue
                codes[answer["rank"]] = answer["code"]
                seconds[answer["rank"]] = time.monotonic() - begun
        outputs = [Path(job["log"]).read_text(errors="replace") for job in jobs]
        paths = [Path(job["result"]) for job in jobs]
        results = [
            json.loads(path.read_text()) if path.exists() else None for path in paths
        ]
        return Ended(
            [codes[rank] for rank in range(len(jobs))], seconds, outputs, results
        )

    def _started(self) -> subprocess.Popen[bytes]:
        if self._template is None:
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCHDYNAMO_DISABLE": "1",
            }
            environment["CUDA_VISIBLE_DEVICES"] = "0"
            command = [sys.executable, "-m", "tests.softcuda.ranks", str(self.folder)]
            pipe = subprocess.PIPE
            # unbuffered: what `select` does not see must not lie in a buffer of ours
            self._template = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, bufsize=0
            )
        return self._template


# ---- the process whose copies are ranks ------------------------------------------------------------------------------


def serve(folder: Path) -> None:
    """Import everything, then make a copy for each line of standard input, until it ends."""
    from megaverl.processes import end_with_parent

    end_with_parent(os.getppid())
    install.install(folder)
    vllm.install()
    from megaverl.platform import platform
    from megaverl.processes import freeze_objects

    assert platform.is_cuda
    platform.adapt_megatron()
    for name in MODULES:
        importlib.import_module(name)
    freeze_objects()
    answers = os.dup(1)
    os.dup2(2, 1)
    # File descriptor of the process -> rank, pid.
    running: dict[int, tuple[int, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        unread = b""
        while True:
            for key, _ in selector.select():
                if key.fd != 0:
                    rank, pid = running.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    os.write(
                        answers,
                        json.dumps({"rank": rank, "code": code}).encode() + b"\n",
                    )
                    continue
                data = os.read(0, 1 << 20)
                if not data:
                    return
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    job = json.loads(line)
                    pid = os.fork()
                    if not pid:
                        _be_a_rank(job)
                    process = os.pidfd_open(pid)
                    running[process] = (job["rank"], pid)
                    selector.register(process, selectors.EVENT_READ)
                    os.write(
                        answers,
                        json.dumps({"rank": job["rank"], "pid": pid}).encode() + b"\n",
                    )


def _be_a_rank(job: dict[str, Any]) -> None:
    """Do the job and end with its exit code."""
    from megaverl.processes import end_with_parent

    end_with_parent(os.getppid())
    os.setsid()
    output = os.open(job["log"], os.O_WRONLY | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, null), (1, output), (2, output)):
        os.dup2(file, number)
    code = 1
    try:
        os.environ.clear()
        os.environ.update(job["environment"])
        tempfile.tempdir = None  # that of the process it is a copy of
        sys.argv = [__file__]
        install.configure(Options(**job["options"]))
        module, function = job["target"].split(":")
        value = getattr(importlib.import_module(module), function)(**job["kwargs"])
        Path(job["result"]).write_text(json.dumps(value))
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
    finally:
        Path(job["kernels"]).write_text(json.dumps(install.kernel_counts()))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
