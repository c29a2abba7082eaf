"""`megaverl serve rollout MODEL` at several ports, and `megaverl serve reward`, without the process that watches:

    python -m tests.rollout.vllm_serve FOLDER PORT,PORT:TP MODEL ARGUMENTS

An interpreter imports vLLM once, and each server is a copy of it that leads a process
group of its own, named in FOLDER/PORT.pid. `vllm_servers` starts it from a test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from types import MappingProxyType

from megaverl.cli.serve import COMMANDS, server_command
from megaverl.processes import end_with_parent, ending_with_parent
from megaverl.rollout import serving
from megaverl.temporary import folder_for_processes

ROOT = Path(__file__).parents[2]
SERVE = "--kv-cache-memory-bytes 20000000 --block-size 32 --max-model-len 64 --disable-log-stats --max-num-seqs 32"
SERVE += " --max-num-batched-tokens 2048"
# On a machine that runs other tests too.
START_SECONDS = 300.0


@contextmanager
def vllm_servers(
    folder: Path,
    model: Path,
    ports: Sequence[str],
    *,
    token_env: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
    others: Sequence[str] = (),
    arguments: str = SERVE,
) -> Iterator[None]:
    """Start servers of a model and wait until they answer; end them, and what is left of them, afterwards.

    Args:
        folder: for their log and the numbers of their process groups.
        ports: PORT, or PORT:TP.
        token_env: variable of `environment` with their token. "": they have none.
        others: ports of further servers that `environment` asks for.
        arguments: of `vllm serve`.
    """
    command = [sys.executable, "-m", "tests.rollout.vllm_serve", str(folder)]
    command += [",".join(ports), str(model)]
    command += ["--token-env", token_env] if token_env else []
    with folder_for_processes() as variables:
        with (folder / "servers.log").open("w") as log:
            servers = subprocess.Popen(
                ending_with_parent([*command, f"--vllm={arguments}"]),
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **variables, **environment},
            )
        end = time.monotonic() + START_SECONDS
        try:
            for port in (*(port.partition(":")[0] for port in ports), *others):
                while not _answers(port):
                    with suppress(subprocess.TimeoutExpired):
                        servers.wait(0.2)
                    is_late = time.monotonic() > end
                    if servers.poll() is not None or is_late:
                        raise RuntimeError((folder / "servers.log").read_text())
            yield
        finally:
            for file in folder.glob("*.pid"):
                serving.end_group(int(file.read_text()))
            servers.kill()
            servers.wait()


def _answers(port: str) -> bool:
    connection = HTTPConnection("127.0.0.1", int(port), timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def serve(*given: str) -> None:
    """Become the server that `megaverl serve` starts with these arguments."""
    parser = argparse.ArgumentParser()
    COMMANDS["serve"].add_options(parser)
    command, more = server_command(parser.parse_args(given), os.environ)
    os.environ.update(more)
    serving.run_vllm(command)


def main(folder: str, ports: str, model: str, *arguments: str) -> None:
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **serving.ENVIRONMENT,
        **serving.CPU_ENVIRONMENT,
    }
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.v1.worker.cpu_worker  # noqa: F401

    parent, children = os.getpid(), []
    servers = {}
    for described in ports.split(","):
        port, _, tp = described.partition(":")
        tensor_parallel = (
            [f"{arguments[-1]} --tensor-parallel-size {tp}"] if tp else arguments[-1:]
        )
        servers[port] = [
            "rollout",
            model,
            "--port",
            port,
            *arguments[:-1],
            *tensor_parallel,
        ]
    if reward := os.environ.get("TEST_REWARD_SERVER"):
        servers["reward"] = ["reward", *json.loads(reward)]
    for name, given in servers.items():
        if (child := os.fork()) == 0:
            end_with_parent(parent)
            os.setsid()
            serve(*given)
        children.append(child)
        (Path(folder) / f"{name}.pid").write_text(str(child))
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
