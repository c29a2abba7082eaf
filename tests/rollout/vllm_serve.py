"""`megaverl serve rollout MODEL` at several ports, and `megaverl serve reward`, without the process that watches:

    python -m tests.rollout.vllm_serve FOLDER PORT,PORT:TP MODEL ARGUMENTS

An interpreter imports vLLM once, and each server is a copy of it that leads a process
group of its own, named in FOLDER/PORT.pid.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from megaverl.cli.serve import COMMANDS, server_command
from megaverl.processes import end_with_parent
from megaverl.rollout import serving


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
