"""What the ranks do in tests/platform/test_vllm_cpu.py."""

from __future__ import annotations

import sys
from typing import Any

import torch

from megaverl.platform import Platform
from megaverl.platform.vllm_cpu import ADAPTATIONS, shared_memory_name


def apply_twice() -> list[dict[str, Any]]:
    """What the adaptations change: before them, after them, and after them again."""
    import vllm.v1.worker.cpu_worker as cpu_worker
    from vllm.model_executor.layers import utils

    def state() -> dict[str, Any]:
        layer = torch.nn.Linear(64, 64, bias=False)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        wrapped = (utils.dispatch_cpu_unquantized_gemm, cpu_worker.init_worker_distributed_environment)
        return {"weight_kept": layer.weight.numel() == 64 * 64, "wrapped": [times_wrapped(f) for f in wrapped]}

    found = [state()]
    for _ in range(2):
        for adaptation in ADAPTATIONS:
            adaptation.apply()
        found.append(state() | {"sgl": utils.check_cpu_sgl_kernel(8, 64, torch.bfloat16)})
    return found


def times_wrapped(function: Any) -> int:
    return 1 + times_wrapped(function.__wrapped__) if hasattr(function, "__wrapped__") else 0


def adapt_cuda() -> list[str]:
    """The modules of vLLM that are loaded after adapting it to a machine with CUDA."""
    Platform(is_cuda=True).adapt_vllm()
    return [name for name in sys.modules if name.split(".")[0] == "vllm"]


def shared_memory_names() -> list[str]:
    return [shared_memory_name(), shared_memory_name()]
