"""Checkpoints: what makes a folder one is its manifest, written last, and what the manifest says; CRC-32 of files,
found while they are written and again while they are read. Here are pure files, no torch.

checkpoints/
    step_00000010/          a whole checkpoint: named so only after everything in it was on the disk
        manifest.json       step, roles and their grids, versions, every file with its size and checksum
        state.json          the trainer's own state
        rollouts.safetensors    responses that were not trained on yet, where a run left in the middle of a step
        random_00000.json   one per rank: its random generators
        __0_0.distcp        one per rank: its tensors; compared with their checksums as they are loaded
        __0_1.distcp        its objects, if it has any
        .metadata, common.pt, metadata.json     the rest of megatron-core's `torch_dist` format
    step_00000020.tmp/      a partial one: ignored, and removed by the next save
    best.json               the best one's name
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

# zlib's polynomial with the processor's own instruction: five times as fast as zlib, and as fast as memory.
from isal.isal_zlib import crc32, crc32_combine

from megaverl.errors import CheckpointError, DamagedCheckpoint
from megaverl.outside import read_json_file

PIECE_BYTES = 1 << 24


class ChecksummedFile(io.FileIO):
    """A new file that counts and sums up what is written to it, front to back."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "wb")
        self.num_bytes, self.crc32 = 0, 0

    def write(self, data: Any, known_crc32: int | None = None) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):  # the system may take less than it is given
            done += super().write(view[done:]) or 0
        self.num_bytes += len(view)
        own = crc32(view) if known_crc32 is None else known_crc32
        self.crc32 = crc32_combine(self.crc32, own, len(view))
        return len(view)

    @property
    def record(self) -> list[Any]:
        """[bytes, CRC-32] of what was written."""
        return [self.num_bytes, f"{self.crc32:08x}"]


def write_bytes(path: Path, data: bytes) -> list[Any]:
    """Write a file that is on the disk when this returns; its [bytes, CRC-32]."""
    with ChecksummedFile(path) as file:
        file.write(data)
        os.fsync(file.fileno())
    return file.record


def synced_record(path: Path) -> list[Any]:
    """Put a file that something else wrote on the disk; its [bytes, CRC-32]."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return [path.stat().st_size, crc32_of(path)]


def crc32_of(path: Path) -> str:
    """The CRC-32 of a file, as eight hex digits."""
    value = 0
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # Linux then reads twice as far ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        block = bytearray(1 << 22)
        view = memoryview(block)
        while count := file.readinto(block):
            value = crc32(view[:count], value)
    return f"{value:08x}"


def read_into(file: io.FileIO, view: memoryview, offset: int, *, keep_cached: bool = True) -> int:
    """Fill `view` from `offset` on, and return its CRC-32.

    Args:
        keep_cached: False: nobody reads these bytes again, so the system need not find memory to keep them in.

    Raises:
        EOFError: the file ends before.
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
INSIDE_SUFFIX = "_inside"  # of the name of one that was taken in the middle of the next step
FIX = "Look at the folder's free space and rights, or point run.dir elsewhere. The checkpoints before it are untouched."
USE_ANOTHER = "Take another checkpoint (checkpoint.resume=FOLDER), or start anew (checkpoint.resume=never)."


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        serial: counts the checkpoints of a run folder; the highest is the newest, whatever its step.
        job: of the torchrun job that wrote it, the same over its restarts; empty outside of one.
        roles: role -> its `model` (dimensions), `value_head`, `grid` (sizes) and `lora` (if it trains adapters: of
            which base model, by its weights).
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
            CheckpointError: no such file, not a manifest, changed after it was written, or of another format.
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
        """Write it to `folder`, on the disk when this returns."""
        content = asdict(self)
        write_json(folder / MANIFEST_FILE, {**content, "crc32": _crc32_of_json(content)})

    def wrong_sizes(self, folder: Path) -> list[str]:
        """Every file that is missing or has another size, in words; no file is read."""
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
        """Every file of this share (of so many) whose bytes are not those that were written, in words.

        Shares are of about the same number of bytes, so that several ranks read a checkpoint together.

        Args:
            tensors: those of the tensors too, which are nearly all of it; loading compares what it reads itself.
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
        """Raise a CheckpointError that lists what a run with the roles `wanted` cannot take from here.

        The grids may differ, and roles that are not wanted do not matter.
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
    """The error that lists what is wrong with the files of a checkpoint."""
    return DamagedCheckpoint(f"{folder}: damaged: {'; '.join(wrong)}. {USE_ANOTHER}")


def folder_of(root: Path, step: int, *, inside: bool = False) -> Path:
    """Where the checkpoint of `step` lies; `inside` the next step it has a name of its own."""
    return root / f"{PREFIX}{step:08d}{INSIDE_SUFFIX if inside else ''}"


def partial_name(folder: Path) -> Path:
    """The name of a checkpoint folder while it is being written or removed."""
    return folder.with_name(folder.name + PARTIAL_SUFFIX)


def checkpoint_folders(root: Path) -> list[Path]:
    """Folders under `root` that have a checkpoint's name, partial ones not among them."""
    if not root.is_dir():
        return []
    return sorted(p for p in root.glob(PREFIX + "*") if p.is_dir() and p.suffix != PARTIAL_SUFFIX)


def readable(root: Path) -> list[tuple[Path, Manifest]]:
    """The checkpoints whose manifest can be read, oldest first."""
    found = []
    for folder in checkpoint_folders(root):
        try:
            found.append((folder, Manifest.read(folder)))
        except CheckpointError:  # `newest_whole` says why; here it only means that it is not one
            continue
    return sorted(found, key=lambda entry: entry[1].serial)


def newest_first(root: Path, job: str = "") -> tuple[list[Path], list[str]]:
    """The checkpoints all of whose files are there, newest first, and what is wrong with the others.

    Args:
        job: only those that this job wrote.
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
    """The newest checkpoint all of whose files are there, and what is wrong with others; their bytes are not read.

    (None, []) where there is none yet.

    Raises:
        CheckpointError: there are checkpoints, and every one is damaged.
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
    """Read JSON; CheckpointError if it is missing or damaged."""
    try:
        return read_json_file(path, not_finite=True)
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
        raise CheckpointError(f"{folder}: the checkpoint was not written: {error}. {FIX}") from error
