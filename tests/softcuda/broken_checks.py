"""A rank of tools/gpu_check.py with something broken, in place of `python -m tools.gpu_check_parts`.

python -m tests.softcuda.broken_checks NAME FOLDER DEVICE         BROKEN: the name of a break, in the environment
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

VARIABLE = "BROKEN"


class Break(NamedTuple):
    """What is broken, the check that must fail of it, and a part of what it then says."""

    check: str
    says: str
    function: Callable[[], None]


def _adopt_nothing() -> None:
    from megaverl.workers.weight_sync import Adopting

    # The stand-in for vLLM's pool knows only adopted storage for an actor's.
    _never_sleep()
    Adopting.__call__ = lambda self, parameters, layouts: None  # type: ignore[method-assign]


def _never_sleep() -> None:
    from megaverl.rollout.vllm_engine import VLLMEngine

    VLLMEngine._sleep = lambda self, written_anew: None  # type: ignore[method-assign]


def _load_other_weights() -> None:
    import torch

    from megaverl.workers.megatron_model import MegatronModel

    load = MegatronModel.load

    def load_wrongly(self: Any, *given: Any, **named: Any) -> Any:
        loaded = load(self, *given, **named)
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.data.mul_(1.2)
        return loaded

    MegatronModel.load = load_wrongly  # type: ignore[method-assign]


def _pack_wrongly() -> None:
    from megaverl.workers.policy import Policy

    log_probs = Policy.log_probs

    def wrong(self: Policy, batch: Any) -> Any:
        return log_probs(self, batch) + (self.model.pack is not None)

    Policy.log_probs = wrong  # type: ignore[method-assign]


def _learn_nothing() -> None:
    from megaverl.workers.optimizers import MegatronTrainable

    made = MegatronTrainable.__init__

    def without_steps(self: Any, *given: Any, **named: Any) -> None:
        made(self, *given, **{**named, "optimizer": {"lr": 0.0}})

    MegatronTrainable.__init__ = without_steps  # type: ignore[method-assign]


def _fetch_nothing() -> None:
    from megaverl.workers.offload import PinnedMemory, as_bytes

    def fetch(self: Any, storages: Any) -> None:
        for storage in storages:
            as_bytes(storage).zero_()

    PinnedMemory.fetch = fetch  # type: ignore[method-assign]


def _keep_on_device() -> None:
    from megaverl.workers.offload import Offload

    Offload.offload = lambda self: None  # type: ignore[method-assign]


def _copy_nothing() -> None:
    from megaverl.weights.transports import local

    local.copy_local = lambda transfers, source, target, *_: None  # type: ignore[assignment]


def _use_the_host() -> None:
    import torch

    from tools import gpu_check_models, gpu_check_parts

    gpu_check_models.device = gpu_check_parts.device = lambda: torch.device("cpu")
    gpu_check_parts.on_cuda = gpu_check_models.on_cuda


def _add_up_nothing() -> None:
    import torch.distributed as dist

    dist.all_reduce = lambda tensor, *_, **__: None


def _send_zeros() -> None:
    import torch.distributed as dist

    send = dist.P2POp.__new__

    def with_zeros(cls: Any, op: Any, tensor: Any, *given: Any, **named: Any) -> Any:
        return send(
            cls, op, tensor.mul_(0) if op is dist.isend else tensor, *given, **named
        )

    dist.P2POp.__new__ = staticmethod(with_zeros)  # type: ignore[method-assign,assignment]


def _share_nothing() -> None:
    import torch

    def share(self: Any) -> Any:
        raise RuntimeError("CUDA error: invalid argument")

    torch.UntypedStorage._share_cuda_ = share  # type: ignore[method-assign]


def _run_commands_on_the_host() -> None:
    run = subprocess.run

    def run_there(*given: Any, env: dict[str, str], **named: Any) -> Any:
        hidden = {"SOFTCUDA": "", "CUDA_VISIBLE_DEVICES": ""}
        return run(*given, env={**env, **hidden}, **named)

    subprocess.run = run_there  # type: ignore[assignment]


def _resume_with(override: str) -> None:
    """Lay an override over the commands that resume."""
    run = subprocess.run

    def run_changed(command: list[str], **named: Any) -> Any:
        changed = (
            [*command, override] if "checkpoint.resume=latest" in command else command
        )
        return run(changed, **named)

    subprocess.run = run_changed  # type: ignore[assignment]


BREAKS = {
    "the engine adopts nothing": Break("engine", "shares no storage", _adopt_nothing),
    "the engine never sleeps": Break(
        "engine", "gives no memory back asleep", _never_sleep
    ),
    "other weights are loaded": Break("logits", "mean error", _load_other_weights),
    "packed samples are wrong": Break(
        "packing", "largest difference 1.0e+00", _pack_wrongly
    ),
    "the optimizer does nothing": Break("training", "falls by a fifth", _learn_nothing),
    "what was offloaded comes back as zeros": Break(
        "saving_memory", "losses different", _fetch_nothing
    ),
    "nothing is offloaded": Break(
        "saving_memory", "a quarter of the memory", _keep_on_device
    ),
    "boxes are not copied": Break("local_transport", "expected: equal", _copy_nothing),
    "the work is done on the CPU": Break(
        "local_transport", "nothing ran on the GPU of ranks [0]", _use_the_host
    ),
    "runs are on the CPU": Break(
        "saves", "nothing ran on the GPU of ranks [0]", _run_commands_on_the_host
    ),
    "a resume trains otherwise": Break(
        "saves", "apart (step", lambda: _resume_with("actor.optimizer.lr=1.0e-3")
    ),
    "a resume begins anew": Break(
        "saves", "not resumed", lambda: _resume_with("checkpoint.resume=never")
    ),
    "sums are wrong": Break("collectives", "2 ranks, wrong", _add_up_nothing),
    "messages are wrong": Break("point_to_point", "wrong: 1 to 0", _send_zeros),
    "IPC falls back to messages": Break(
        "ipc", "expected: equal fingerprints; no messages with IPC", _share_nothing
    ),
}

if __name__ == "__main__":
    from tools import gpu_check_parts

    BREAKS[os.environ[VARIABLE]].function()
    gpu_check_parts.main()
