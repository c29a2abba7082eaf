"""Checkpoint folders and their manifests: pure file handling, without torch.

A folder is a checkpoint if it has a manifest, which is written last. CRC-32 checksums are computed while files are
written, and again while they are read.

checkpoints/
    step_00000010/          a complete checkpoint: it gets this name only after all of it was on the disk
        manifest.json       step, roles and their grids, versions, every file with its size and checksum
        state.json          the trainer's own state
        rollouts.safetensors    responses that were not trained on yet, if the run stopped in the middle of a step
        random_00000.json   one per rank: its random generators
        __0_0.distcp        one per rank: its tensors; compared with their checksums as they are loaded
        __0_1.distcp        its objects, if it has any
        .metadata, common.pt, metadata.json     the rest of megatron-core's `torch_dist` format
    step_00000020.tmp/      a partial one: ignored, and removed by the next save
    best.json               the name of the best one
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

# CRC-32 with zlib's polynomial and the processor's own instructions: five times as fast as zlib, and as fast as memory.
from isal.isal_zlib import crc32, crc32_combine

from megaverl.errors import CheckpointError, DamagedCheckpoint
from megaverl.outside import read_json_file

PIECE_BYTES = 1 << 24


class ChecksummedFile(io.FileIO):
    """A new file that counts its bytes and computes their CRC-32 as they are written in order."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "wb")
        self.num_bytes, self.crc32 = 0, 0

    def write(self, data: Any, known_crc32: int | None = None) -> int:
        """Append bytes and update the checksum.

        Args:
            known_crc32: the CRC-32 of `data`, if the caller knows it.
        """
        view = memoryview(data).cast("B")
        done = 0
        # A write may be partial.
        while done < len(view):
            done += super().write(view[done:]) or 0
        self.num_bytes += len(view)
        own = crc32(view) if known_crc32 is None else known_crc32
        self.crc32 = crc32_combine(self.crc32, own, len(view))
        return len(view)

    @property
    def record(self) -> list[Any]:
        """[bytes, CRC-32] of everything written."""
        return [self.num_bytes, f"{self.crc32:08x}"]


def write_bytes(path: Path, data: bytes) -> list[Any]:
    """Write a file that is on the disk when this returns; return its [bytes, CRC-32]."""
    with ChecksummedFile(path) as file:
        file.write(data)
        os.fsync(file.fileno())
    return file.record


def synced_record(path: Path) -> list[Any]:
    """Flush a file that other code wrote to the disk; return its [bytes, CRC-32]."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return [path.stat().st_size, crc32_of(path)]


def crc32_of(path: Path) -> str:
    """Return the CRC-32 of a file as eight hex digits."""
    value = 0
    with path.open("rb", buffering=0) as file:
        # With this advice, Linux reads twice as far ahead.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        block = bytearray(1 << 22)
        view = memoryview(block)
        while count := file.readinto(block):
            value = crc32(view[:count], value)
    return f"{value:08x}"


def read_into(file: io.FileIO, view: memoryview, offset: int, *, keep_cached: bool = True) -> int:
    """Fill `view` with the file's bytes from `offset`, and return their CRC-32.

    Args:
        keep_cached: False if nobody reads these bytes again, so that the kernel need not keep them in memory.

    Raises:
        EOFError: the file is too short.
    """
    value = 0
    for start in range(0, len(view), PIECE_BYTES):
        piece, at = view[start : start + PIECE_BYTES], offset + start
        done = 0
        while done < len(piece):
            count = os.preadv(file.fileno(), [piece[done:]], at + done)
            if count == 0:
                raise EOFError(f"it ends at {at + done}")
            done += count
        value = crc32(piece, value)
        if not keep_cached and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), at, len(piece), os.POSIX_FADV_DONTNEED)
    return value


FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"
PREFIX = "step_"
TENSORS_SUFFIX = "_0.distcp"
OBJECTS_SUFFIX = "_1.distcp"
PARTIAL_SUFFIX = ".tmp"
INSIDE_SUFFIX = "_inside"  # suffix of a checkpoint that was taken in the middle of the next step
FIX = "Look at the folder's free space and rights, or point run.dir elsewhere. The checkpoints before it are untouched."
USE_ANOTHER = "Take another checkpoint (checkpoint.resume=FOLDER), or start anew (checkpoint.resume=never)."


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
            raise CheckpointError(f"{folder}: not a whole checkpoint: it has no {MANIFEST_FILE}. {USE_ANOTHER}")
        try:
            content = read_json_file(path, not_finite=True)
            version = int(content["format"])
            if version == FORMAT_VERSION:
                if content.pop("crc32") != _crc32_of_json(content):
                    raise ValueError("its own checksum does not agree with what it says")
                return cls(**{field.name: content[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: damaged ({type(error).__name__}: {error}). {USE_ANOTHER}") from error
        age = "a newer" if version > FORMAT_VERSION else "an older"
        raise CheckpointError(
            f"{path}: format {version}, written by {age} megaverl; this one reads format {FORMAT_VERSION}. "
            f"Install the version that `versions` in it names{', or a later one' if version > FORMAT_VERSION else ''}."
        )

    def write(self, folder: Path) -> None:
        """Write the manifest to `folder`. It is on the disk when this returns."""
        content = asdict(self)
        write_json(folder / MANIFEST_FILE, {**content, "crc32": _crc32_of_json(content)})

    def wrong_sizes(self, folder: Path) -> list[str]:
        """List every file that is missing or has another size, in words. No file is read."""
        wrong = []
        for name, (size, _) in self.files.items():
            path = folder / name
            if not path.is_file():
                wrong.append(f"{name} is missing")
            elif path.stat().st_size != size:
                wrong.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        return wrong

    def check_files(self, folder: Path) -> None:
        """Raise a CheckpointError that lists every file that is missing or has another size; no file is read."""
        if wrong := self.wrong_sizes(folder):
            raise damaged(folder, wrong)

    def wrong_bytes(self, folder: Path, share: int = 0, shares: int = 1, *, tensors: bool = True) -> list[str]:
        """List every file whose checksum differs from the recorded one, in words, in one of `shares` shares.

        Shares have about the same number of bytes, so that several ranks can check a checkpoint together.

        Args:
            tensors: whether to check files of tensors, which are nearly everything. Loading checks the tensors that it
                reads.
        """
        names = [name for name in self.files if tensors or not name.endswith(TENSORS_SUFFIX)]
        by_size = sorted(names, key=lambda name: (-int(self.files[name][0]), name))
        wrong = []
        for name in by_size[share::shares]:
            expected = self.files[name][1]
            try:
                found = crc32_of(folder / name)
            except OSError as error:
                wrong.append(f"{name} cannot be read ({error})")
                continue
            if found != expected:
                wrong.append(f"{name} has the checksum {found} instead of {expected}: its bytes were changed")
        return wrong

    def check_roles(self, folder: Path, wanted: dict[str, dict[str, Any]]) -> None:
        """Raise a CheckpointError that lists what a run with the roles `wanted` cannot load.

        Grids may differ, and extra roles in the checkpoint do not matter.
        """
        wrong = []
        for role, description in wanted.items():
            if role not in self.roles:
                wrong.append(f"it holds {' and '.join(self.roles) or 'nothing'}, but no {role}")
                continue
            saved = self.roles[role]
            for key in ("model", "value_head", "lora"):
                name = role if key == "model" else f"{role}.{key}"
                wrong += _differences(name, saved.get(key), description.get(key))
        if wrong:
            raise CheckpointError(f"{folder}: of another model or algorithm: {'; '.join(wrong)}. {USE_ANOTHER}")


def _differences(name: str, saved: Any, wanted: Any) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(wanted, dict):
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
    return sorted(p for p in root.glob(PREFIX + "*") if p.is_dir() and p.suffix != PARTIAL_SUFFIX)


def readable(root: Path) -> list[tuple[Path, Manifest]]:
    """List the checkpoints whose manifest can be read, oldest first."""
    found = []
    for folder in checkpoint_folders(root):
        try:
            found.append((folder, Manifest.read(folder)))
        except CheckpointError:
            # `newest_whole` reports the reason. Here the folder just does not count.
            continue
    return sorted(found, key=lambda entry: entry[1].serial)


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
    found, problems = newest_first(root)
    if not found and problems:
        raise CheckpointError("\n".join([f"{root}: no checkpoint is whole.", *problems]))
    return found[0] if found else None, problems


def _crc32_of_json(content: dict[str, Any]) -> str:
    return f"{crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def write_json(path: Path, content: Any) -> None:
    """Write JSON that is on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        return read_json_file(path, not_finite=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). {USE_ANOTHER}") from error


def sync_folder(folder: Path) -> None:
    """Flush the folder's entries (new names, renames) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Convert an OSError of the block to a CheckpointError with the folder and advice."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{folder}: the checkpoint was not written: {error}. {FIX}") from error
