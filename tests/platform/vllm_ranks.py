"""What the ranks do in tests/platform/test_vllm_cpu.py."""

from __future__ import annotations

import sys
from typing import Any

import torch

from megaverl.platform import Platform
from megaverl.platform.vllm_cpu import ADAPTATIONS, shared_memory_name


def apply_twice() -> list[dict[str, Any]]:
    """What the adaptations change: before them, after them, and after them again."""
    import vllm._custom_ops as ops
    import vllm.v1.worker.cpu_worker as cpu_worker

    def depth() -> int:
        found, function = 0, cpu_worker.init_worker_distributed_environment
        while hasattr(function, "__wrapped__"):
            found, function = found + 1, function.__wrapped__
        return found

    found: list[dict[str, Any]] = [{"onednn": ops._supports_onednn, "shared_memory_wrapped": depth()}]
    for _ in range(2):
        for adaptation in ADAPTATIONS:
            adaptation.apply()
        from vllm.model_executor.layers import utils

        sgl = utils.check_cpu_sgl_kernel(8, 64, torch.bfloat16)
        found.append({"onednn": ops._supports_onednn, "sgl": sgl, "shared_memory_wrapped": depth()})
    return found


def adapt_cuda() -> list[str]:
    """The modules of vLLM that are loaded after adapting it to a machine with CUDA."""
    Platform(is_cuda=True).adapt_vllm()
    return [name for name in sys.modules if name.split(".")[0] == "vllm"]


def shared_memory_names() -> list[str]:
    return [shared_memory_name(), shared_memory_name()]
