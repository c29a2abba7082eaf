"""Choose the checkpoint that `checkpoint.resume` names, from files alone: without a process group and without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megaverl.checkpoint import MANIFEST_FILE, PREFIX, newest_first, read_json
from megaverl.config.run import RESUME_WORDS
from megaverl.errors import CheckpointError

STATE_FILE = "state.json"
CONFIG_FILE = "config.yaml"


def kind_of(path: Path) -> str:
    """Return the kind of a folder that `checkpoint.resume` names: checkpoint, run, or root (a folder of checkpoints).

    Raises:
        CheckpointError: the folder does not exist.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint.resume={path}: {'a file, not a folder' if path.exists() else 'no such folder'}. "
            f"Give {', '.join(RESUME_WORDS)}, or the folder of a checkpoint."
        )
    if (path / MANIFEST_FILE).is_file() or path.name.startswith(PREFIX):
        return "checkpoint"
    return "run" if (path / "checkpoints").is_dir() else "root"


def is_finished(folder: Path) -> bool:
    """Return whether the run that wrote a checkpoint had taken all its steps.

    A checkpoint without the run's number of steps counts as finished.
    """
    state = read_json(folder / STATE_FILE)
    return int(state["next_step"]) >= int(state.get("steps", 0))


def saved_config(folder: Path) -> dict[str, Any] | None:
    """Return the configuration that a checkpoint was written with, or None if the checkpoint lacks it."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from error
    return values if isinstance(values, dict) else None


def likely_source(resume: str, run_dir: Path) -> Path | None:
    """Return the checkpoint that a run will most likely resume from, or None if it starts anew.

    Checksums are not compared, so the run itself may find this checkpoint damaged and
    take an older one.

    Args:
        resume: `checkpoint.resume`.
    """
    if resume == "never":
        return None
    if resume in RESUME_WORDS:
        root = run_dir / "checkpoints"
    else:
        path = Path(resume)
        kind = kind_of(path)
        if kind == "checkpoint":
            return path
        root = path / "checkpoints" if kind == "run" else path
    whole, _ = newest_first(root)
    if not whole or (resume == "unfinished" and is_finished(whole[0])):
        return None
    return whole[0]
