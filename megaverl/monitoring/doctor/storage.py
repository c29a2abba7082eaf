"""Checks of storage and process limits: disks, shared memory, open files, processes and locked memory."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from megaverl.monitoring.doctor import Finding
from megaverl.platform import platform
from megaverl.temporary import SHARED_MEMORY, base_folder

GB = 2**30
OPEN_FILES = 4096
PROCESSES = 4096


def storage(run_dir: Path) -> Iterator[Finding]:
    """Yield findings about the folders that a run writes to, and about process limits.

    Args:
        run_dir: `run.dir`, or a folder that could become it.
    """
    cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    places = {"runs": run_dir, "temporary files": base_folder(), "hub cache": cache}
    for name, path in places.items():
        yield _disk(name, path)
    yield _shared_memory()
    yield _open_files()
    yield _processes()
    yield _locked_memory()


def _disk(name: str, path: Path) -> Finding:
    existing = next(
        parent for parent in (path, *path.absolute().parents) if parent.exists()
    )
    free = shutil.disk_usage(existing).free
    text = f"{path}: {free / GB:.1f} GiB free"
    if not os.access(existing, os.W_OK):
        return Finding(
            "storage", name, "fail", f"{text}, and cannot be written", _another(name)
        )
    if free < 0.1 * GB:
        return Finding(
            "storage", name, "fail", text, f"free some space there. {_another(name)}"
        )
    if free < 5 * GB:
        fix = f"a checkpoint takes 14 to 18 bytes a parameter (7B: about 120 GB). {_another(name)}"
        return Finding("storage", name, "warn", text, fix)
    return Finding("storage", name, "ok", text)


def _another(name: str) -> str:
    key = {"runs": "run.dir", "temporary files": "TMPDIR", "hub cache": "HF_HOME"}[name]
    return f"Name another folder with {key}."


def _shared_memory() -> Finding:
    if not SHARED_MEMORY.is_dir():
        return Finding(
            "storage",
            "shared memory",
            "warn",
            f"no {SHARED_MEMORY}",
            f"mount a tmpfs at {SHARED_MEMORY}",
        )
    total, _, free = shutil.disk_usage(SHARED_MEMORY)
    text = f"{SHARED_MEMORY}: {free / GB:.1f} of {total / GB:.1f} GiB free"
    ranks = max(1, torch.cuda.device_count()) if platform.is_cuda else 1
    if free < ranks * GB:
        fix = "docker run --ipc=host, or --shm-size=16g; or remove what a killed job left there"
        return Finding(
            "storage",
            "shared memory",
            "warn",
            f"{text}: NCCL and vLLM need about 1 GiB a rank",
            fix,
        )
    return Finding("storage", "shared memory", "ok", text)


def _open_files() -> Finding:
    # Ranks raise the soft limit to the hard one.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= OPEN_FILES:
        return Finding(
            "storage", "open files", "ok", f"hard limit {hard if hard >= 0 else 'none'}"
        )
    fix = "many ranks hold many sockets: nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
    return Finding(
        "storage",
        "open files",
        "warn" if hard < 1024 else "note",
        f"hard limit {hard}",
        fix,
    )


def _processes() -> Finding:
    """Check the limit of processes per user. Threads count too, and a rank has over a hundred."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or soft >= PROCESSES:
        return Finding(
            "storage", "processes", "ok", f"limit {soft if soft >= 0 else 'none'}"
        )
    fix = "ulimit -u unlimited; nproc in /etc/security/limits.conf, or docker run --ulimit nproc=-1 (--pids-limit -1)"
    return Finding(
        "storage", "processes", "warn", f"limit {soft}, threads included", fix
    )


def _locked_memory() -> Finding:
    """Check the limit of locked memory: memory that InfiniBand registers counts as locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("storage", "locked memory", "ok", "no limit")
    text = f"limit {soft / 2**20:.0f} MiB"
    if platform.is_cuda and Path("/sys/class/infiniband").is_dir():
        return Finding(
            "storage",
            "locked memory",
            "warn",
            f"{text}: too little for RDMA",
            "ulimit -l unlimited",
        )
    return Finding(
        "storage", "locked memory", "note", f"{text} (matters for InfiniBand only)"
    )
