"""What makes a folder a checkpoint: its manifest, written last, and what the manifest says. Pure files, no torch.

checkpoints/
    step_00000010/          a whole checkpoint: named so only after everything in it was on the disk
        manifest.json       step, roles and their grids, versions, every file with its size
        state.json          the trainer's own state
        random_00000.json   one per rank: its random generators
        .metadata, *.distcp, common.pt, metadata.json      megatron-core's `torch_dist` format
    step_00000020.tmp/      a torn one: ignored, and removed by the next save
    best.json               the best one's name
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megaverl.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
PREFIX = "step_"
TORN_SUFFIX = ".tmp"
USE_ANOTHER = "Take another checkpoint (checkpoint.resume=FOLDER), or start anew (checkpoint.resume=never)."


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        serial: counts the checkpoints of a run folder; the highest is the newest, whatever its step.
        roles: role -> its `model` (dimensions), `value_head` and `grid` (sizes).
        files: every other file of the folder -> bytes.
    """

    format: int
    serial: int
    step: int
    world_size: int
    roles: dict[str, dict[str, Any]]
    versions: dict[str, str]
    files: dict[str, int]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read `folder/manifest.json`.

        Raises:
            CheckpointError: no such file, not a manifest, or a newer format than this one.
        """
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise CheckpointError(f"{folder}: not a whole checkpoint: it has no {MANIFEST_FILE}. {USE_ANOTHER}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["format"]
            if version <= FORMAT_VERSION:
                return cls(**{field.name: content[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: damaged ({type(error).__name__}: {error}). {USE_ANOTHER}") from error
        raise CheckpointError(
            f"{path}: format {version}, written by a newer megaverl; this one reads up to {FORMAT_VERSION}. "
            "Install the version that `versions` in it names, or a later one."
        )

    def write(self, folder: Path) -> None:
        """Write it to `folder`, on the disk when this returns."""
        write_json(folder / MANIFEST_FILE, asdict(self))

    def check_files(self, folder: Path) -> None:
        """Raise a CheckpointError that lists every file that is missing or has another size."""
        wrong = []
        for name, size in self.files.items():
            path = folder / name
            if not path.is_file():
                wrong.append(f"{name} is missing")
            elif path.stat().st_size != size:
                wrong.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        if wrong:
            raise CheckpointError(f"{folder}: damaged: {'; '.join(wrong)}. {USE_ANOTHER}")

    def check_roles(self, folder: Path, wanted: dict[str, dict[str, Any]]) -> None:
        """Raise a CheckpointError that lists what a run with the roles `wanted` cannot take from here.

        The grids may differ, and roles that are not wanted do not matter.
        """
        wrong = []
        for role, description in wanted.items():
            if role not in self.roles:
                wrong.append(f"it holds {' and '.join(self.roles) or 'nothing'}, but no {role}")
                continue
            saved = self.roles[role]
            for key in ("model", "value_head"):
                wrong += _differences(role if key == "model" else f"{role}.{key}", saved[key], description[key])
        if wrong:
            raise CheckpointError(f"{folder}: of another model or algorithm: {'; '.join(wrong)}. {USE_ANOTHER}")


def _differences(name: str, saved: Any, wanted: Any) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(wanted, dict):
        for key in saved.keys() & wanted.keys():
            yield from _differences(f"{name}.{key}", saved[key], wanted[key])
    elif saved != wanted:
        yield f"{name} is {saved}, this run has {wanted}"


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return root / f"{PREFIX}{step:08d}"


def torn_name(folder: Path) -> Path:
    """The name of a checkpoint folder while it is being written or removed."""
    return folder.with_name(folder.name + TORN_SUFFIX)


def checkpoint_folders(root: Path) -> list[Path]:
    """Folders under `root` that have a checkpoint's name, torn ones not among them."""
    if not root.is_dir():
        return []
    return sorted(p for p in root.glob(PREFIX + "*") if p.is_dir() and p.suffix != TORN_SUFFIX)


def readable(root: Path) -> list[tuple[Path, Manifest]]:
    """The checkpoints whose manifest can be read, oldest first."""
    found = []
    for folder in checkpoint_folders(root):
        try:
            found.append((folder, Manifest.read(folder)))
        except CheckpointError:  # `newest_whole` says why; here it only means that it is not one
            continue
    return sorted(found, key=lambda entry: entry[1].serial)


def newest_whole(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint all of whose files are there, and what is wrong with those passed over.

    (None, []) where there is none yet.

    Raises:
        CheckpointError: there are checkpoints, and every one is damaged.
    """
    problems: list[str] = []
    whole: list[tuple[int, Path]] = []
    for folder in checkpoint_folders(root):
        try:
            manifest = Manifest.read(folder)
            manifest.check_files(folder)
            whole.append((manifest.serial, folder))
        except CheckpointError as error:
            problems.append(str(error))
    if not whole and problems:
        raise CheckpointError("\n".join([f"{root}: no checkpoint is whole.", *problems]))
    return max(whole)[1] if whole else None, problems


def list_files(folder: Path) -> dict[str, int]:
    """Every file under `folder`, by its relative path, with its bytes; the manifest left out."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST_FILE)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def write_json(path: Path, content: Any) -> None:
    """Write JSON that is on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """Read JSON; CheckpointError if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). {USE_ANOTHER}") from error


def sync_folder(folder: Path) -> None:
    """Put the folder's entries (new names, renames) on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError of the body into a CheckpointError that says where and what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the checkpoint was not written: {error}. Look at the folder's free space and rights, or "
            "point run.dir elsewhere. The checkpoints before it are untouched."
        ) from error
