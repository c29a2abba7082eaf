"""Manifests of checkpoints, the names of checkpoint folders, and the search for a folder that can be read.

A folder is a checkpoint if it has a manifest, which is written last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megaverl.checkpoint.checksummed_files import (
    USE_ANOTHER,
    crc32_of,
    crc32_of_json,
    write_json,
)
from megaverl.errors import CheckpointError, DamagedCheckpoint
from megaverl.outside import read_json_file

FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"
PREFIX = "step_"
TENSORS_SUFFIX = "_0.distcp"
OBJECTS_SUFFIX = "_1.distcp"
PARTIAL_SUFFIX = ".tmp"
# Suffix of a checkpoint that was taken in the middle of the next step.
INSIDE_SUFFIX = "_inside"


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    Attributes:
        serial: number of the checkpoint in its run folder; the highest is the newest, whatever its step.
        job: the torchrun job that wrote it, equal over restarts; empty outside of one.
        roles: role -> its `model` (dimensions), `value_head`, `grid` (sizes) and `lora` (if it trains adapters, with a
            digest of the base model's weights).
        files: every other file of the folder -> [bytes, CRC-32 as eight hex digits].
    """

    format: int
    serial: int
    step: int
    world_size: int
    job: str
    roles: dict[str, dict[str, Any]]
    versions: dict[str, str]
    files: dict[str, list[Any]]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read `folder/manifest.json`.

        Raises:
            CheckpointError: the file is missing, is not a manifest, was changed after it was written, or has another
                format.
        """
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{folder}: not a whole checkpoint: it has no {MANIFEST_FILE}. {USE_ANOTHER}"
            )
        try:
            content = read_json_file(path, not_finite=True)
            version = int(content["format"])
            if version == FORMAT_VERSION:
                # The checksum was computed without itself.
                if content.pop("crc32") != crc32_of_json(content):
                    raise ValueError("its checksum does not match its contents")
                return cls(**{field.name: content[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: damaged ({type(error).__name__}: {error}). {USE_ANOTHER}"
            ) from error
        age = "a newer" if version > FORMAT_VERSION else "an older"
        raise CheckpointError(
            f"{path}: format {version}, written by {age} megaverl; this one reads format {FORMAT_VERSION}. "
            f"Install the version that `versions` in it names{', or a later one' if version > FORMAT_VERSION else ''}."
        )

    def write(self, folder: Path) -> None:
        """Write the manifest to `folder`. It is on the disk when this returns."""
        content = asdict(self)
        write_json(folder / MANIFEST_FILE, {**content, "crc32": crc32_of_json(content)})

    def wrong_sizes(self, folder: Path) -> list[str]:
        """List every file that is missing or has another size, in words. No file is read."""
        wrong = []
        for name, (size, _) in self.files.items():
            path = folder / name
            if not path.is_file():
                wrong.append(f"{name} is missing")
            elif path.stat().st_size != size:
                wrong.append(
                    f"{name} has {path.stat().st_size} bytes instead of {size}"
                )
        return wrong

    def check_files(self, folder: Path) -> None:
        """Raise a CheckpointError that lists every file that is missing or has another size; no file is read."""
        if wrong := self.wrong_sizes(folder):
            raise damaged(folder, wrong)

    def wrong_bytes(
        self, folder: Path, share: int = 0, shares: int = 1, *, tensors: bool = True
    ) -> list[str]:
        """Describe every file in one of `shares` shares whose checksum differs from the recorded one.

        Shares have about the same number of bytes, so that several ranks can check a
        checkpoint together.

        Args:
            tensors: whether to check files of tensors, which are nearly everything. Loading checks the tensors that it
                reads.
        """
        names = [
            name for name in self.files if tensors or not name.endswith(TENSORS_SUFFIX)
        ]
        # Every rank sorts alike, without communication. Dealing out the largest first
        # balances the shares.
        by_size = sorted(names, key=lambda name: (-int(self.files[name][0]), name))
        wrong = []
        for name in by_size[share::shares]:
            expected = self.files[name][1]
            try:
                checksum = crc32_of(folder / name)
            except OSError as error:
                wrong.append(f"{name} cannot be read ({error})")
                continue
            if checksum != expected:
                wrong.append(
                    f"{name} has the checksum {checksum} instead of {expected}: its bytes were changed"
                )
        return wrong

    def check_roles(self, folder: Path, wanted: dict[str, dict[str, Any]]) -> None:
        """Raise a CheckpointError that lists what a run with the roles `wanted` cannot load.

        Grids may differ, and extra roles in the checkpoint do not matter.
        """
        wrong = []
        for role, description in wanted.items():
            if role not in self.roles:
                wrong.append(
                    f"it holds {' and '.join(self.roles) or 'nothing'}, but no {role}"
                )
                continue
            saved = self.roles[role]
            # `grid` may differ: shards are cut anew when they are loaded.
            for key in ("model", "value_head", "lora"):
                name = role if key == "model" else f"{role}.{key}"
                wrong += _differences(name, saved.get(key), description.get(key))
        if wrong:
            raise CheckpointError(
                f"{folder}: was saved with another model or algorithm: {'; '.join(wrong)}. {USE_ANOTHER}"
            )


def _differences(name: str, saved: Any, wanted: Any) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(wanted, dict):
        # Only keys that both have: another version of megaverl may record more of them.
        for key in saved.keys() & wanted.keys():
            yield from _differences(f"{name}.{key}", saved[key], wanted[key])
    elif saved != wanted:
        yield f"{name} is {saved}, this run has {wanted}"


def damaged(folder: Path, wrong: Sequence[str]) -> DamagedCheckpoint:
    """Return the error that lists problems with the files of a checkpoint."""
    return DamagedCheckpoint(f"{folder}: damaged: {'; '.join(wrong)}. {USE_ANOTHER}")


def folder_of(root: Path, step: int, *, inside: bool = False) -> Path:
    """Return the folder of the checkpoint of `step`.

    Args:
        inside: whether it was taken in the middle of the next step, which gives it a name of its own.
    """
    return root / f"{PREFIX}{step:08d}{INSIDE_SUFFIX if inside else ''}"


def partial_name(folder: Path) -> Path:
    """Return the name of a checkpoint folder while it is being written or removed."""
    return folder.with_name(folder.name + PARTIAL_SUFFIX)


def checkpoint_folders(root: Path) -> list[Path]:
    """List the folders in `root` that have a checkpoint's name, without partial ones."""
    if not root.is_dir():
        return []
    return sorted(
        p for p in root.glob(PREFIX + "*") if p.is_dir() and p.suffix != PARTIAL_SUFFIX
    )


def readable(root: Path) -> list[tuple[Path, Manifest]]:
    """List the checkpoints whose manifest can be read, oldest first."""
    checkpoints = []
    for folder in checkpoint_folders(root):
        try:
            checkpoints.append((folder, Manifest.read(folder)))
        except CheckpointError:
            # `newest_whole` reports the reason. Here the folder just does not count.
            continue
    return sorted(checkpoints, key=lambda entry: entry[1].serial)


def newest_first(root: Path, job: str = "") -> tuple[list[Path], list[str]]:
    """Return the checkpoints with all their files, newest first, and the problems of the others.

    Args:
        job: only checkpoints of this job.
    """
    problems: list[str] = []
    whole: list[tuple[int, Path]] = []
    for folder in checkpoint_folders(root):
        try:
            manifest = Manifest.read(folder)
            manifest.check_files(folder)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            if not job or manifest.job == job:
                whole.append((manifest.serial, folder))
    return [folder for _, folder in sorted(whole, reverse=True)], problems


def newest_whole(root: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint with all its files, and the problems of others; (None, []) if there is none yet.

    The files' contents are not read.

    Raises:
        CheckpointError: there are checkpoints, and all of them are damaged.
    """
    checkpoints, problems = newest_first(root)
    if not checkpoints and problems:
        raise CheckpointError(
            "\n".join([f"{root}: no checkpoint is whole.", *problems])
        )
    return checkpoints[0] if checkpoints else None, problems
