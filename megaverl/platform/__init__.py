"""CUDA or CPU: the one place that knows which device this process computes on, chosen by what is there, and the one
place where libraries are adapted to a CPU."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import psutil
import torch

from megaverl.platform.quiet import hide_from_megatron, leave_out_expected_warnings
from megaverl.processes import raise_open_files
from megaverl.temporary import use_temporary_folder


@dataclass(frozen=True)
class Platform:
    """CUDA or CPU, and what follows from it.

    Attributes:
        is_cuda: a CUDA device is there and usable.
        backend: the torch.distributed backend, `nccl` or `gloo`.
    """

    is_cuda: bool

    @property
    def backend(self) -> str:
        return "nccl" if self.is_cuda else "gloo"

    @property
    def device(self) -> torch.device:
        """This process's device: `cuda:LOCAL_RANK`, or `cpu`."""
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if self.is_cuda else torch.device("cpu")

    @property
    def default_dtype(self) -> torch.dtype:
        """What `dtype: auto` means: bfloat16 where CUDA supports it, float32 (the reference) elsewhere."""
        return torch.bfloat16 if self.is_cuda and torch.cuda.is_bf16_supported() else torch.float32

    def start(self) -> None:
        """Make `device` the current one, raise the limit of open files, and use one temporary folder."""
        raise_open_files()
        use_temporary_folder()
        if self.is_cuda:
            torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        """Wait for the device's outstanding work, so that a clock reads true."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def free_memory(self) -> int:
        """Bytes that this process may still allocate on its device; of a CPU's, an equal share for each rank there."""
        if self.is_cuda:
            held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            return int(torch.cuda.mem_get_info(self.device)[0]) + held
        return int(psutil.virtual_memory().available) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def adapt_megatron(self) -> None:
        """Adapt megatron-core to this machine. Call before importing `megatron.core`."""
        hide_from_megatron()
        leave_out_expected_warnings()
        if self.is_cuda and importlib.util.find_spec("transformer_engine") is not None:
            return
        from megaverl.platform.megatron_cpu import ADAPTATIONS, WITHOUT_TRANSFORMER_ENGINE

        for adaptation in ADAPTATIONS:
            if not self.is_cuda or adaptation.name in WITHOUT_TRANSFORMER_ENGINE:
                adaptation.apply()

    def adapt_vllm(self) -> None:
        """Adapt vLLM to this machine. Call before importing `vllm`."""
        leave_out_expected_warnings()
        if not self.is_cuda:
            from megaverl.platform.vllm_cpu import ADAPTATIONS

            for adaptation in ADAPTATIONS:
                adaptation.apply()


def page_locked(values: torch.Tensor) -> torch.Tensor:
    """What lies on the host, where a GPU copies from by itself; torch keeps that memory. Without a GPU, as it is."""
    return values.pin_memory() if platform.is_cuda and values.device.type == "cpu" else values


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` there; on their way from the host to a GPU nobody waits for what runs there."""
    return page_locked(values).to(device, non_blocking=device.type == "cuda")


platform = Platform(is_cuda=torch.cuda.is_available())
