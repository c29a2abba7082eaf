"""Facts about the GPUs of this machine, without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

DEVICES = Path("/dev")
# Each of their wheels is built for one torch. vLLM's dependencies may install a CUDA
# build beside a CPU torch.
BUILT_FOR_TORCH = ("torchvision", "torchaudio", "torchcodec")
DRIVER = "libcuda.so.1"
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
# The first driver of each CUDA version (CUDA's release notes, "CUDA Toolkit and Minimum
# Required Driver Version").
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}


def count_gpus() -> int:
    """Return the number of GPUs that CUDA would show."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len(
            [
                device
                for device in visible.split(",")
                if device.strip() not in ("", "-1")
            ]
        )
    return _count_listed()


def _count_listed() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, check=False
    )
    return (
        sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
        if listing.returncode == 0
        else 0
    )


class GPU(NamedTuple):
    """A GPU as nvidia-smi lists it.

    Attributes:
        capability: compute capability, such as (9, 0).
        bus: its address in /sys/bus/pci/devices, such as "0000:1b:00.0".
    """

    number: int
    capability: tuple[int, int]
    bus: str


def visible_gpus() -> list[GPU]:
    """Return the GPUs that CUDA would show, in its order; empty if nvidia-smi lists none.

    If CUDA_VISIBLE_DEVICES names GPUs by UUID, all GPUs are returned in nvidia-smi's
    order.
    """
    if count_gpus() == 0 or shutil.which("nvidia-smi") is None:
        return []
    query = [
        "nvidia-smi",
        "--query-gpu=index,compute_cap,pci.bus_id",
        "--format=csv,noheader",
    ]
    listing = subprocess.run(query, capture_output=True, text=True, check=False)
    rows = re.findall(
        r"^(\d+), (\d+)\.(\d+), ([0-9A-Fa-f:.]+)$", listing.stdout, flags=re.MULTILINE
    )
    by_index = {}
    for index, major, minor, bus in rows:
        by_index[index] = GPU(int(index), (int(major), int(minor)), _pci_address(bus))
    visible = [
        device.strip()
        for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    ]
    return [by_index[index] for index in visible if index in by_index] or list(
        by_index.values()
    )


def _pci_address(bus: str) -> str:
    """Convert nvidia-smi's "00000000:1B:00.0" to "0000:1b:00.0": Linux writes a PCI domain with four digits."""
    domain, _, rest = bus.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def gpu_name() -> str | None:
    """Return the name of the first GPU that nvidia-smi lists, or None."""
    if count_gpus() == 0 or shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listing = subprocess.run(query, capture_output=True, text=True, check=False)
    return (
        (listing.stdout.splitlines() or [""])[0].strip() or None
        if listing.returncode == 0
        else None
    )


def gpu_memory() -> list[tuple[int, int]]:
    """Return (free, total) MiB of each visible GPU, as nvidia-smi reports them; empty if it reports none."""
    if count_gpus() == 0 or shutil.which("nvidia-smi") is None:
        return []
    query = [
        "nvidia-smi",
        "--query-gpu=index,memory.free,memory.total",
        "--format=csv,noheader,nounits",
    ]
    listing = subprocess.run(query, capture_output=True, text=True, check=False)
    rows = re.findall(r"^(\d+), (\d+), (\d+)$", listing.stdout, flags=re.MULTILINE)
    visible = [
        device.strip()
        for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    ]
    chosen = [row for row in rows if row[0] in visible] or rows
    return [(int(free), int(total)) for _, free, total in chosen]


def is_processor_meant() -> bool:
    """Return whether the environment hides all GPUs on purpose: `CUDA_VISIBLE_DEVICES=` (empty, or -1)."""
    return "CUDA_VISIBLE_DEVICES" in os.environ and count_gpus() == 0


def has_usable_gpu() -> bool:
    """Return whether a GPU is visible and this environment's torch can use it, without importing torch."""
    return (
        count_gpus() > 0 and _cpu_torch() is None and driver_older_than_torch() is None
    )


def cpu_torch_beside_gpus() -> str | None:
    """Return the problem if GPUs are visible but this environment's torch is built without CUDA; else None.

    `CUDA_VISIBLE_DEVICES=` (empty, or -1) tells that the user wants the CPU.
    """
    if is_processor_meant():
        return None
    if (
        not (any(DEVICES.glob("nvidia[0-9]*")) or _count_listed())
        or (version := _cpu_torch()) is None
    ):
        return None
    return (
        f"This machine has a GPU, but torch {version} here is built without CUDA: everything would compute on the "
        "processor.\n  For the GPU: ./launch/bootstrap.sh --gpu (or docker/Dockerfile, or MEGAVERL_PYTHON with the "
        "interpreter of an environment that has CUDA).\n  If the processor is meant: CUDA_VISIBLE_DEVICES= megaverl ..."
    )


def driver_cuda_version(library: str = DRIVER) -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports, such as (13, 0), or None without a driver.

    The driver's own library answers, so a `cuda-compat` package on LD_LIBRARY_PATH
    counts. No GPU is initialised.
    """
    try:
        driver = ctypes.CDLL(library)
        version = ctypes.c_int(0)
        failed = driver.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    if failed or version.value <= 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def driver_older_than_torch() -> str | None:
    """Return the problem if the driver is too old for the CUDA that torch is built for; else None.

    torch would then start without GPUs (`torch.cuda.is_available()` is False), and a
    run would compute on the CPU. A driver supports every CUDA version with its own
    major number.
    """
    if is_processor_meant():
        return None
    facts = _torch_facts()
    wanted = re.match(r"'(\d+)\.(\d+)", facts.get("cuda", ""))
    served = driver_cuda_version()
    if wanted is None or served is None or served[0] >= int(wanted[1]):
        return None
    oldest = OLDEST_DRIVERS.get(int(wanted[1]))
    newer = f"{oldest} or newer" if oldest else f"one for CUDA {wanted[1]}"
    return (
        f"The NVIDIA driver{_driver_number()} serves CUDA up to {served[0]}.{served[1]}, and torch here is built for "
        f"CUDA {wanted[1]}.{wanted[2]}: no GPU can be used.\n  Update the driver to {newer}, or put cuda-compat-"
        f"{wanted[1]} on LD_LIBRARY_PATH (data-centre GPUs only).\n  If the processor is meant: "
        "CUDA_VISIBLE_DEVICES= megaverl ..."
    )


def _driver_number() -> str:
    """Return " 570.86.15", the kernel module's version, or "" if it cannot be read."""
    text = DRIVER_VERSION.read_text(encoding="utf-8") if DRIVER_VERSION.exists() else ""
    number = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return f" {number[1]}" if number else ""


def unusable_gpus() -> str | None:
    """Return why the installed torch cannot use this machine's GPUs, with the fix; None if it can."""
    return driver_older_than_torch() or cpu_torch_beside_gpus()


def cuda_builds_beside_cpu_torch() -> list[str]:
    """List the CUDA builds of packages beside a CPU torch, with versions. With them,
    importing transformers' models fails.
    """
    versions = {name: _installed(name) for name in ("torch", *BUILT_FOR_TORCH)}
    if not versions.pop("torch").endswith("+cpu"):
        return []
    return [
        f"{name} {version}"
        for name, version in versions.items()
        if version and not version.endswith("+cpu")
    ]


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_torch() -> str | None:
    """Return the version of a torch without CUDA and ROCm; None for any other torch, or without torch."""
    facts = _torch_facts()
    if not facts or facts.get("cuda") != "None" or facts.get("hip", "None") != "None":
        return None
    return facts.get("__version__", "(of an unknown version)").strip("'\"")


def _torch_facts() -> dict[str, str]:
    """Return the assignments of the installed torch's version file as text; empty without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return dict(re.findall(r"^(\w+)(?::[^=\n]*)? = (.+)$", text, flags=re.MULTILINE))
