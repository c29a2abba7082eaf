"""How much memory this process holds, in MB of 2**20 bytes."""

from __future__ import annotations

import os
import resource
import sys

import psutil

MB = 2**20


def process_memory_mb() -> float:
    """Resident memory of this process now."""
    return psutil.Process(os.getpid()).memory_info().rss / MB


def peak_process_memory_mb() -> float:
    """The most resident memory that this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MB if sys.platform == "darwin" else peak * 1024 / MB


def memory_metrics(*roles: str) -> dict[str, float]:
    """`memory/<role>_gpu_mem_mb` of the roles on this rank, which share its memory, and the process's resident memory.

    On CUDA the first is the peak that torch's allocator held on the current device since the last call, which
    resets that peak. Without CUDA there is no device memory of its own: it is the resident memory, so that
    the curve exists and means something on every platform. torch is used only where it is loaded already.
    """
    resident = process_memory_mb()
    metrics = {
        **{f"memory/{role}_gpu_mem_mb": resident for role in roles},
        "memory/process_rss_mb": resident,
        "memory/process_peak_rss_mb": max(resident, peak_process_memory_mb()),  # the system counts that one later
    }
    torch = sys.modules.get("torch")
    # is_initialized: asking a device's statistics must not be what creates a CUDA context.
    if torch is not None and torch.version.cuda is not None and torch.cuda.is_initialized():
        for role in roles:
            metrics[f"memory/{role}_gpu_mem_mb"] = torch.cuda.max_memory_allocated() / MB
            metrics[f"memory/{role}_gpu_reserved_mb"] = torch.cuda.memory_reserved() / MB
        torch.cuda.reset_peak_memory_stats()
    return metrics
