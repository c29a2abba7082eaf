"""Python processes that start in a moment: copies of one, the zygote, that has imported everything.

    process = start("tests.world_worker", environment, stdin=read_end, output=log, further=write_end)

torch, megatron-core, transformers and vLLM, adapted to a CPU, take an interpreter some fifteen seconds; a copy has
them at once. A GPU's driver does not outlive a copy: where there is one, and for tests of what an import itself does
(`bare`), a new interpreter is started as ever.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from megaverl.processes import end_with_parent, ending_with_parent
from megaverl.trainer.launcher import count_gpus

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = (
    "megaverl.cli.train",
    "megaverl.trainer.run",
    "megaverl.trainer.rl",
    "megaverl.rollout.hf_engine",
    "megaverl.rollout.vllm_engine",
    "transformers.models.qwen3.modeling_qwen3",
    "torch.distributed.checkpoint",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
)
MESSAGE_BYTES = 1 << 20


class Process(Protocol):
    """What `start` started: the leader of a process group of its own."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def send_signal(self, number: int) -> None: ...


def start(
    module: str,
    environment: Mapping[str, str],
    *,
    stdin: int,
    output: int,
    errors: int | None = None,
    further: int | None = None,
    bare: bool = False,
) -> Process:
    """Run `python -m MODULE` at the top of the repository.

    Args:
        stdin, output, errors: its standard files, of this process's numbers; errors go to the output without another.
        further: a file that it gets besides; the number that it has there is the module's argument.
        bare: in an interpreter that has imported nothing.
    """
    errors = output if errors is None else errors
    if bare or count_gpus() > 0:
        arguments, passed = ([], ()) if further is None else ([str(further)], (further,))
        return subprocess.Popen(
            ending_with_parent([sys.executable, "-m", module, *arguments]),
            cwd=ROOT,
            env=dict(environment),
            stdin=stdin,
            stdout=output,
            stderr=errors,
            pass_fds=passed,
            start_new_session=True,
        )
    files = [stdin, output, errors] if further is None else [stdin, output, errors, further]
    zygote = _zygote()
    return Copy(zygote, zygote.ask({"start": module, "environment": dict(environment)}, files)["pid"])


class Copy:
    """A copy of the zygote."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote, self.pid = zygote, pid
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._ended_within(0.0)

    def wait(self, timeout: float) -> int:
        """The exit code; negative: the signal.

        Raises:
            TimeoutError: it goes on.
        """
        code = self._ended_within(timeout)
        if code is None:
            raise TimeoutError(f"process {self.pid} goes on after {timeout:g} s")
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _ended_within(self, seconds: float) -> int | None:
        if self._code is None:
            self._code = self._zygote.ask({"wait": self.pid, "seconds": seconds})["code"]
        return self._code


class Zygote:
    """The process that copies are made of, and the socket to it.

    Args:
        options: `--empty`: it imports nothing.
    """

    def __init__(self, *options: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                ending_with_parent([sys.executable, "-m", "tests.zygote", str(theirs.fileno()), *options]),
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def ask(self, request: dict[str, Any], files: list[int] | None = None) -> dict[str, Any]:
        socket.send_fds(self._socket, [json.dumps(request).encode()], files or [])
        answer = self._socket.recv(MESSAGE_BYTES)
        assert answer, "the zygote has ended"
        return dict(json.loads(answer))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(timeout=30)


@functools.cache
def _zygote() -> Zygote:
    zygote = Zygote()
    atexit.register(zygote.close)
    return zygote


def main() -> None:
    """Be the zygote, until the other end of the socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    if "--empty" not in sys.argv:
        _import_everything()
    while True:
        message, files, _, _ = socket.recv_fds(control, MESSAGE_BYTES, maxfds=4)
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            answer = {"code": _wait(request["wait"], request["seconds"])}
        else:
            zygote, pid = os.getpid(), os.fork()
            if pid == 0:
                end_with_parent(zygote)
                control.close()
                _be_a_copy(request["start"], request["environment"], files)
            for file in files:
                os.close(file)
            answer = {"pid": pid}
        control.send(json.dumps(answer).encode())


def _import_everything() -> None:
    from megaverl.platform import platform
    from megaverl.rollout.vllm_engine import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    usual = gc.get_threshold()
    gc.set_threshold(100_000)
    platform.adapt_megatron()
    platform.adapt_vllm()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # copies share these pages, and need not look through them for garbage
    gc.set_threshold(*usual)


def _wait(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)


def _be_a_copy(module: str, environment: dict[str, str], files: list[int]) -> NoReturn:
    def body() -> int:
        os.setsid()
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [module, *map(str, files[3:])]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0

    end_with(body)


def end_with(body: Callable[[], int]) -> NoReturn:
    """End this copy with the exit code that `body` returns, or leaves with, and without what ends an interpreter."""
    code = 1
    try:
        code = body()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
