"""Device of this process, CUDA or CPU, chosen by what exists."""

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
    """The kind of device, with everything that depends on it.

    Attributes:
        is_cuda: whether a usable CUDA device exists.
    """

    is_cuda: bool

    @property
    def backend(self) -> str:
        """The torch.distributed backend: `nccl` or `gloo`."""
        return "nccl" if self.is_cuda else "gloo"

    @property
    def device(self) -> torch.device:
        """This process's device: `cuda:LOCAL_RANK`, or `cpu`."""
        return (
            torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            if self.is_cuda
            else torch.device("cpu")
        )

    @property
    def default_dtype(self) -> torch.dtype:
        """Meaning of `dtype: auto`: bfloat16 if CUDA supports it, otherwise float32 (the reference)."""
        return (
            torch.bfloat16
            if self.is_cuda and torch.cuda.is_bf16_supported()
            else torch.float32
        )

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `model.dtype` names; "auto" is `default_dtype`."""
        return self.default_dtype if name == "auto" else getattr(torch, name)

    def start(self) -> None:
        """Make `device` the current one, raise the limit of open files, and use one temporary folder."""
        raise_open_files()
        use_temporary_folder()
        if self.is_cuda:
            torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        """Wait for the device's outstanding work, so that timings are right."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def free_memory(self) -> int:
        """Return the bytes that this process may still allocate on its device; on a
        CPU, an equal share for each of its ranks.
        """
        if self.is_cuda:
            held = torch.cuda.memory_reserved(
                self.device
            ) - torch.cuda.memory_allocated(self.device)
            return int(torch.cuda.mem_get_info(self.device)[0]) + held
        return int(psutil.virtual_memory().available) // int(
            os.environ.get("LOCAL_WORLD_SIZE", 1)
        )

    def adapt_megatron(self) -> None:
        """Adapt megatron-core to this machine. To be called before importing `megatron.core`."""
        hide_from_megatron()
        leave_out_expected_warnings()
        if self.is_cuda and importlib.util.find_spec("transformer_engine") is not None:
            return
        from megaverl.platform.megatron_cpu import (
            ADAPTATIONS,
            WITHOUT_TRANSFORMER_ENGINE,
        )

        for adaptation in ADAPTATIONS:
            if not self.is_cuda or adaptation.name in WITHOUT_TRANSFORMER_ENGINE:
                adaptation.apply()

    def adapt_vllm(self) -> None:
        """Adapt vLLM to this machine. To be called before importing `vllm`."""
        leave_out_expected_warnings()
        if not self.is_cuda:
            from megaverl.platform import vllm_batch_invariant, vllm_cpu

            for adaptation in (
                *vllm_cpu.ADAPTATIONS,
                *vllm_batch_invariant.ADAPTATIONS,
            ):
                adaptation.apply()


def page_locked(values: torch.Tensor) -> torch.Tensor:
    """Return a host tensor in page-locked memory, from which a GPU copies
    asynchronously. Without a GPU, return it unchanged.
    """
    return (
        values.pin_memory()
        if platform.is_cuda and values.device.type == "cpu"
        else values
    )


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `values` to a device. A copy from the host to a GPU does not wait for work on the GPU."""
    return page_locked(values).to(device, non_blocking=device.type == "cuda")


platform = Platform(is_cuda=torch.cuda.is_available())
