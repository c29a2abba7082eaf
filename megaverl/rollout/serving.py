"""vLLM's server as a process that megaverl starts, watches and ends: `megaverl serve`.

The command starts `python -m megaverl.rollout.serving ARGUMENTS` as a child that leads
a process group. Without a GPU, the child adapts vLLM to the CPU. Then it runs vLLM's
own command. The child ends at once after an error, and the command ends the whole
group, so that no engine outlives its server.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from megaverl.errors import FAILED, INTERRUPTED, MegaverlError
from megaverl.gpus import count_gpus, gpu_memory
from megaverl.outside import read_json_file
from megaverl.processes import end_with_parent, ending_with_parent
from megaverl.signal_handlers import handling

MODULE = "megaverl.rollout.serving"
GIB = 2**30
MAX_CACHE_BYTES = 2 * GIB  # keys and values on a CPU
MIN_CACHE_BYTES = GIB // 16
# Memory of server and engine processes beside weights and cache.
PROCESS_BYTES = 2 * GIB
GPU_SHARE = 0.9  # fraction of a GPU's memory, if that much is free
FREE_SHARE = 0.95  # fraction of a GPU's free memory
GRACE_SECONDS = 30.0  # from SIGTERM to SIGKILL
TRACKER_SECONDS = 60.0  # time for multiprocessing's tracker to remove shared memory
TRACKER_POLL_SECONDS = 0.01
POLL_SECONDS = 0.2
# Interval of health checks of a server that answers, which logs each of them.
HEALTH_SECONDS = 5.0
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Without it, helper functions are compiled at the first requests, which needs a C++
    # compiler.
    "TORCHDYNAMO_DISABLE": "1",
}
# Adaptations that a server needs too. The others are for an engine inside a training
# process.
CPU_ADAPTATIONS = (
    "kernels in vLLM's modules alone",
    "no sgl kernels",
    "sigmoid or biased scores in one group of experts",
    "rotary embeddings of all heads",
    "images without torchvision",
    "shared memory by job",
)
# The last line of a traceback in a log of vLLM's processes, such as
# "(EngineCore pid=7) ERROR 11-26 01:21:09 [core.py:9] ValueError: ..."
RAISED = re.compile(
    r"^(?:\((?P<process>[A-Za-z]+)[^)]*\) )?(?:ERROR [^\]]*\] )?(?P<error>[A-Za-z_][\w.]*(?:Error|Exception): .+)$"
)
# An argument that vLLM's command does not know.
MISUSED = re.compile(r"^vllm[\w ]*: error: (.+)$")
# An error of a worker causes one in the engine, which causes one in the server.
DEEPEST_FIRST = ("VllmWorker", "Worker", "EngineCore", "APIServer", "")


# --- what fits this machine -----------------------------------------------------------------------------------------


def default_arguments(model: str, words: Sequence[str]) -> list[str]:
    """Return arguments of `vllm serve` that suit this machine, except for those that `words` sets.

    On a CPU: eager mode, float32, and a KV cache that fits into the free memory. By
    default vLLM reserves 92 % of the machine's memory, and fails if other programs use
    more than the rest. On GPUs: a fraction of the free memory.
    """
    named = {word.partition("=")[0] for word in words if word.startswith("--")}

    def unless(options: Sequence[str], *value: str) -> list[str]:
        return [] if named & set(options) else [options[0], *value]

    arguments = []
    if scaling := _query_scaling(model):
        arguments += unless(["--override-generation-config"], scaling)
    memory_options = ["--gpu-memory-utilization", "--kv-cache-memory-bytes"]
    if count_gpus():
        share = gpu_share(memory) if (memory := gpu_memory()) else GPU_SHARE
        return [*unless(memory_options, f"{share:.2f}"), *arguments]
    # Compiled models on a CPU would need a compiler on the machine.
    arguments += [
        *unless(["--enforce-eager", "--no-enforce-eager"]),
        *unless(["--dtype"], "float32"),
    ]
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        cache = cache_bytes(free_host_memory(), weight_bytes(model))
        arguments += unless(memory_options[::-1], str(cache))
    return arguments


def _query_scaling(model: str) -> str:
    """Return the generation config by which vLLM scales queries as a Llama 4 folder says; empty for other models.

    By default vLLM (0.32, `llama4.py`) scales them only in engines for more than 32,768
    tokens.
    """
    path = Path(model, "config.json")
    config = read_json_file(path) if path.is_file() else {}
    # The key has a default.
    if config.get("model_type") != "llama4_text":
        return ""
    is_scaled = bool(config.get("attn_temperature_tuning", True))
    return json.dumps({"attn_temperature_tuning": is_scaled})


def cache_bytes(free: int, weights: int) -> int:
    """Return the bytes for keys and values on a CPU: half of the free memory after
    weights and processes, at most 2 GiB.
    """
    left = free - weights - PROCESS_BYTES
    return max(MIN_CACHE_BYTES, min(MAX_CACHE_BYTES, left // 2))


def gpu_share(memory: Sequence[tuple[int, int]]) -> float:
    """Return the share of a GPU's memory that vLLM may reserve, from (free, total) of each GPU."""
    return max(
        0.01, min(GPU_SHARE, *(FREE_SHARE * free / total for free, total in memory))
    )


def weight_bytes(model: str) -> int:
    """Return the bytes of a model folder's weights in float32; 0 for a model on a hub, whose size is not known yet."""
    folder = Path(model)
    stored = sum(
        file.stat().st_size
        for pattern in ("*.safetensors", "*.bin")
        for file in folder.glob(pattern)
    )
    return 2 * stored  # 16 bits become 32


def free_host_memory() -> int:
    """Return the bytes that this process may still allocate, within the limit of its container (cgroup 2)."""
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):
        # The container's limit may be lower than the machine's free memory.
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return free


# --- the child: vLLM's command --------------------------------------------------------------------------------------


def run_vllm(arguments: Sequence[str]) -> NoReturn:
    """Run `vllm ARGUMENTS` in this process and end the process.

    The process ends without waiting for vLLM's threads: after an error they keep it for
    minutes.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _name_cpu_build()
    if not count_gpus():
        _adapt_to_cpu(arguments)
    from megaverl.sharding.own_configs import register_config

    for architecture in _architectures(arguments):
        register_config(architecture)
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *arguments]
    code = 0
    try:
        main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    # After an error, vLLM's threads would keep the process alive.
    except BaseException:  # KeyboardInterrupt too: vLLM turns SIGTERM into it
        traceback.print_exc()
        code = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _name_cpu_build() -> None:
    """Let vLLM's command find its version: the CPU build is a package of another name."""
    version = importlib.metadata.version

    # The CPU build has another distribution name, by which vLLM looks for its version.
    def known(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{version('vllm-cpu')}+cpu"

    importlib.metadata.version = known


def _adapt_to_cpu(arguments: Sequence[str]) -> None:
    """Let vLLM's CPU build serve weights that change, and start its engine within seconds."""
    import multiprocessing

    for name, value in CPU_ENVIRONMENT.items():
        # A value that the user has set takes precedence.
        os.environ.setdefault(name, value)
    # An idle pool of threads does not survive the fork below. One thread has no pool.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from megaverl.platform.vllm_cpu import ADAPTATIONS

    for adaptation in ADAPTATIONS:
        if adaptation.name in CPU_ADAPTATIONS:
            adaptation.apply()
    import vllm._custom_ops
    import vllm.v1.engine.core
    import vllm.v1.engine.utils
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401 - the engine's process inherits the import

    # oneDNN makes packed copies of linear weights, which an update does not reach.
    vllm._custom_ops._supports_onednn = False
    # vLLM would start the processes of engine and workers as new interpreters, which
    # import everything again.
    forking = multiprocessing.get_context("fork")
    for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
        module.get_mp_context = lambda: forking
    # A forked engine must not outlive its server.
    os.register_at_fork(after_in_child=lambda: end_with_parent(os.getppid()))
    _inspect_model_here(arguments)


def _inspect_model_here(arguments: Sequence[str]) -> None:
    """Let vLLM inspect the model's class in this process instead of starting an interpreter for it."""
    from megaverl.rollout.vllm_tracing import inspect_here

    for architecture in _architectures(arguments):
        inspect_here(architecture)


def _architectures(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the architectures of model folders that the command's arguments name."""
    for word in arguments:
        config = Path(word, "config.json")
        if not word.startswith("-") and config.is_file():
            yield from read_json_file(config).get("architectures") or ()


# --- the command: starts, watches and ends the child ----------------------------------------------------------------


def check_start(model: str, host: str, port: int) -> None:
    """Raise a MegaverlError for mistakes that would let the server fail only after it has imported everything."""
    if importlib.util.find_spec("vllm") is None:
        raise MegaverlError(
            "vLLM is not installed. Run: pip install 'megaverl[vllm]' (without a GPU 'megaverl[cpu]')."
        )
    is_on_hub = (
        model.count("/") == 1
        and not model.startswith((".", "/"))
        and not Path(model).exists()
    )
    if not is_on_hub and not Path(model, "config.json").is_file():
        raise MegaverlError(
            f"{model} is not a model folder: it has no config.json. Give a folder, or org/name on the hub."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # Without this, an address in TIME_WAIT would look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise MegaverlError(
                f"{host}:{port}: {error.strerror}. Choose another --port or --host."
            ) from error


def watch_server(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    host: str,
    port: int,
    on_ready: Callable[[], None],
) -> int:
    """Run a server until it ends or this process is asked to end; return the exit code.

    Nothing of the server's process group is left on return.

    Args:
        command: command line of the server.
        log: file for what the server prints.
        on_ready: called once, when the server answers.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output, _noted_signals() as received:
        server = subprocess.Popen(
            ending_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            # A session of its own, so that the whole group can be ended.
            start_new_session=True,
        )
        try:
            is_ready, next_look = False, 0.0
            while server.poll() is None and not received:
                health = 0
                # Every health check is logged by the server, so there are few of them
                # once it answers.
                if time.monotonic() >= next_look:
                    health = _health(host, port)
                    next_look = time.monotonic() + (
                        HEALTH_SECONDS if is_ready or health == 200 else POLL_SECONDS
                    )
                if health == 200 and not is_ready:
                    is_ready = True
                    on_ready()
                # vLLM's server survives the death of its engine, and then answers 500.
                if is_ready and health >= 500:
                    break
                # Waits for the end, and otherwise until the next look.
                with suppress(subprocess.TimeoutExpired):
                    server.wait(POLL_SECONDS)
            if server.poll() is None and received:
                server.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    server.wait(GRACE_SECONDS)
        finally:
            end_group(server.pid)
            server.wait()
    if received:
        return INTERRUPTED if received[0] == signal.SIGINT else 0
    if server.returncode == 0:
        return 0
    raise MegaverlError(
        f"the server {'ended' if is_ready else 'did not start'}: {why_ended(log)} Its log: {log}"
    )


def end_group(group: int) -> None:
    """Kill a server's process group, and leave its resource trackers the time to remove shared memory.

    vLLM's processes share hundreds of MB in /dev/shm, which no kernel frees.
    multiprocessing's tracker process removes what they have created once all of them
    have ended.
    """
    trackers: list[psutil.Process] = []
    # A process may end while the group is listed.
    for process in _members(group):
        with suppress(psutil.Error):
            if any(
                "multiprocessing.resource_tracker" in word for word in process.cmdline()
            ):
                trackers.append(process)
            else:
                process.kill()
    deadline = time.monotonic() + TRACKER_SECONDS
    while any(map(_runs, trackers)) and time.monotonic() < deadline:
        time.sleep(TRACKER_POLL_SECONDS)
    with suppress(ProcessLookupError):  # those that were started meanwhile
        os.killpg(group, signal.SIGKILL)


def _runs(process: psutil.Process) -> bool:
    """Return whether a process has not exited, which psutil also says of one that nobody has reaped."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _members(group: int) -> list[psutil.Process]:
    """Return the processes of a process group."""
    members = []
    # psutil.process_iter() keeps the objects of earlier calls, even if another process
    # has the number by now. They refuse to kill it.
    for number in psutil.pids():
        with suppress(OSError, psutil.NoSuchProcess):
            if os.getpgid(number) == group:
                members.append(psutil.Process(number))
    return members


def why_ended(log: Path) -> str:
    """Return the cause of failure that a server's log names, as a sentence.

    The first error of a worker counts before one of the engine, and that before one of
    the server: each of the latter only reports that the process below it has failed.
    """
    errors: dict[str, str] = {}
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if match := RAISED.match(line):
            error = match["error"]
            # Pydantic names the field and the reason in the lines below.
            if "ValidationError" in error:
                error = f"{error}: {following.strip()}"
            # The first error of each process is the cause, later ones follow from it.
            errors.setdefault(match["process"] or "", error)
        elif misused := MISUSED.match(line):
            errors.setdefault("", misused[1])
    cause = next(
        (errors[process] for process in DEEPEST_FIRST if process in errors), ""
    )
    if not cause:
        return "It names no error."
    return cause if cause.endswith((".", "!")) else f"{cause}."


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT inside this block in the list that is yielded."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    with handling((signal.SIGTERM, signal.SIGINT), note):
        yield received


def _health(host: str, port: int) -> int:
    """Return the status of the server's /health; 0 if it does not answer."""
    connection = HTTPConnection(host, port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except (OSError, HTTPException):
        return 0
    finally:
        connection.close()


if __name__ == "__main__":
    run_vllm(sys.argv[1:])
