"""Whole runs that are made on the software device and on the CPU, to be compared to the bit.

The device's kernels are PyTorch's for CPUs, so the same operators give the same bits.
Four things differ by design between megaverl's branches for CUDA and for CPUs, and are
made equal here:

- Options of megatron-core that choose fused kernels (`PLAIN`), which other hardware has.
- What megaverl computes in fewer passes on a CPU (`plain_command`): RMS norm, gated MLPs, and Adam. The CPU's run
  computes them as PyTorch and megatron-core do. The CUDA branch runs as it is.
- PyTorch's kernel for attention on CPUs, which has no counterpart on the device: both sides take the operators that it
  is made of.
- Linear layers of vLLM's CPU build, which it packs for oneDNN: both sides take PyTorch's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megaverl.models.options import CPU_OPTIONS
from tests.faults.runs import metrics

PLAIN = json.dumps(CPU_OPTIONS)


def plain_command(arguments: list[str]) -> Any:
    """Run `megaverl ARGUMENTS` on the CPU with the operators that the device has."""
    from megaverl.models import layers
    from megaverl.platform import device, megatron_cpu, platform
    from tests.faults.rank import command

    assert not platform.is_cuda
    torch.backends.cuda.enable_flash_sdp(False)  # for CPUs too
    megatron_cpu._gates_plainly = lambda config: False
    megatron_cpu._fuse = lambda optimizer, *_: None

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if weight.dtype != x.dtype:  # of a zero-centred norm
            return torch.nn.functional.rms_norm(
                x.float(), weight.shape, weight, eps
            ).to(x.dtype)
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    layers.rms_norm = rms_norm
    adapt_vllm = device.Platform.adapt_vllm

    def adapt_without_packing(self: device.Platform) -> None:
        adapt_vllm(self)
        from vllm.model_executor.layers import utils

        def keep_weight(layer: Any, remove_weight: bool) -> None:
            layer.cpu_linear = torch.nn.functional.linear

        utils.dispatch_cpu_unquantized_gemm = keep_weight

    device.Platform.adapt_vllm = adapt_without_packing  # type: ignore[method-assign]
    return command(arguments)


def numbers(run: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without what the clock, the machine or the device says."""
    return [
        {name: value for name, value in record.items() if not name.startswith("gpu")}
        for record in metrics(run)
    ]


def differences(device: Path, cpu: Path, without: str = "") -> list[str]:
    """Return which metrics, samples and exported weights of two runs are not equal to the bit.

    Args:
        without: beginning of the names of metrics that may differ; empty: none may.
    """
    found = []
    on_device, on_cpu = numbers(device), numbers(cpu)
    if len(on_device) != len(on_cpu):
        return [f"{len(on_device)} records, {len(on_cpu)} on the CPU"]
    for step, (ours, theirs) in enumerate(zip(on_device, on_cpu, strict=True)):
        for name in sorted(ours.keys() | theirs.keys()):
            may_differ = bool(without) and name.startswith(without)
            if ours.get(name) != theirs.get(name) and not may_differ:
                found.append(
                    f"record {step}: {name} {ours.get(name)}, on the CPU {theirs.get(name)}"
                )
    for file in sorted(path.name for path in (cpu / "hf").glob("*.safetensors")):
        if (device / "hf" / file).read_bytes() != (cpu / "hf" / file).read_bytes():
            found.append(f"hf/{file}")
    if (device / "samples.jsonl").read_text() != (cpu / "samples.jsonl").read_text():
        found.append("samples.jsonl")
    return found
