"""GPUs of this machine, asked without importing torch."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

DEVICES = Path("/dev")
# Their wheels are built for one torch each, and vLLM's dependencies may bring a CUDA build beside a CPU torch.
BUILT_FOR_TORCH = ("torchvision", "torchaudio", "torchcodec")


def count_gpus() -> int:
    """GPUs that CUDA would show."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return _count_listed()


def _count_listed() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0


def gpu_name() -> str | None:
    """Of the first GPU that nvidia-smi lists; None: there is none."""
    if count_gpus() == 0 or shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listing = subprocess.run(query, capture_output=True, text=True, check=False)
    return (listing.stdout.splitlines() or [""])[0].strip() or None if listing.returncode == 0 else None


def gpu_memory() -> list[tuple[int, int]]:
    """Return (free, total) MiB of each visible GPU, as nvidia-smi reports them; empty where it reports none."""
    if count_gpus() == 0 or shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,memory.free,memory.total", "--format=csv,noheader,nounits"]
    listing = subprocess.run(query, capture_output=True, text=True, check=False)
    rows = re.findall(r"^(\d+), (\d+), (\d+)$", listing.stdout, flags=re.MULTILINE)
    visible = [device.strip() for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    chosen = [row for row in rows if row[0] in visible] or rows
    return [(int(free), int(total)) for _, free, total in chosen]


def cpu_torch_beside_gpus() -> str | None:
    """What is wrong where GPUs are visible and the torch of this environment is built without CUDA; else None.

    `CUDA_VISIBLE_DEVICES=` (empty, or -1) says that the processor is meant.
    """
    if "CUDA_VISIBLE_DEVICES" in os.environ and count_gpus() == 0:
        return None
    if not (any(DEVICES.glob("nvidia[0-9]*")) or _count_listed()) or (version := _cpu_torch()) is None:
        return None
    return (
        f"This machine has a GPU, but torch {version} here is built without CUDA: everything would compute on the "
        "processor.\n  For the GPU: ./launch/bootstrap.sh --gpu (or docker/Dockerfile, or MEGAVERL_PYTHON with the "
        "interpreter of an environment that has CUDA).\n  If the processor is meant: CUDA_VISIBLE_DEVICES= megaverl ..."
    )


def cuda_builds_beside_cpu_torch() -> list[str]:
    """Packages of this environment, with their versions, with which importing transformers' models fails: they are
    built for a torch with CUDA, and torch is one for the processor."""
    versions = {name: _installed(name) for name in ("torch", *BUILT_FOR_TORCH)}
    if not versions.pop("torch").endswith("+cpu"):
        return []
    return [f"{name} {version}" for name, version in versions.items() if version and not version.endswith("+cpu")]


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_torch() -> str | None:
    """The version of a torch that knows neither CUDA nor ROCm, by its version file; None of any other, or of none."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    facts = dict(re.findall(r"^(\w+)(?::[^=\n]*)? = (.+)$", text, flags=re.MULTILINE))
    if facts.get("cuda") != "None" or facts.get("hip", "None") != "None":
        return None
    return facts.get("__version__", "(of an unknown version)").strip("'\"")
