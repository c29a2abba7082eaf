"""Checkpoints that clients save, as folders of the run under tinker:// names.

    tinker://MODEL/weights/NAME          RUN/tinker/MODEL/weights/NAME
      step_NNNNNNNN                        adapters and optimizer state, in megaverl's format
      adapter                              the adapters in peft's format
      saved.json                           who saved what, and until when it is kept
    tinker://MODEL/sampler_weights/NAME  RUN/tinker/MODEL/sampler_weights/NAME
      adapter, saved.json                  as above

A folder gets its name when it is complete, so a killed server leaves no half of a
checkpoint under a name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megaverl.outside import read_json_file
from megaverl.trainer.tinker.promises import RequestFailed

SCHEME = "tinker://"
Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")
# Names of the kinds in the client's lists of checkpoints.
TYPES: Mapping[Kind, str] = {"weights": "training", "sampler_weights": "sampler"}
INFO_FILE = "saved.json"
# No separators and no leading dot, so a name never leaves its folder.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")


class SavedPath(NamedTuple):
    """Parts of a checkpoint's name."""

    model: str
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's name among those of its model."""
        return f"{self.kind}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> SavedPath:
        """Read a name such as tinker://MODEL/weights/NAME.

        Raises:
            RequestFailed: it is no such name.
        """
        parts = text.removeprefix(SCHEME).split("/")
        if (
            not text.startswith(SCHEME)
            or len(parts) != 3
            or parts[1] not in KINDS
            or not all(NAME.fullmatch(part) for part in (parts[0], parts[2]))
        ):
            raise RequestFailed(
                f"{text!r:.200} names no checkpoint. Expected tinker://MODEL/weights/NAME, or sampler_weights."
            )
        kind: Kind = "weights" if parts[1] == "weights" else "sampler_weights"
        return cls(parts[0], kind, parts[2])


@dataclass(frozen=True)
class Saved:
    """Description of a checkpoint, stored beside it.

    Attributes:
        created: seconds since 1970.
        expires: the same, or None if it is kept for ever.
        user_metadata: what the client attached to the checkpoint.
        model_metadata: what the client attached to the model.
        is_ephemeral: it serves one sampling client, and is in no list.
    """

    base_model: str
    lora_rank: int
    created: float
    expires: float | None = None
    user_metadata: dict[str, str] | None = None
    model_metadata: dict[str, Any] | None = None
    is_ephemeral: bool = False

    @property
    def is_expired(self) -> bool:
        """Return whether the time has come to delete the checkpoint."""
        return self.expires is not None and time.time() > self.expires


class SavedCheckpoints:
    """All checkpoints of a run. Only the coordinator's rank uses it.

    Args:
        root: folder of all models, on a file system that all ranks share.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        # Left by a server that was killed while it saved.
        for partial in root.glob("*/*/.*"):
            shutil.rmtree(partial, ignore_errors=True)

    def folder(self, path: SavedPath) -> Path:
        """Return the folder of a checkpoint, which need not exist."""
        return self._root / path.model / path.kind / path.name

    def begin(self, path: SavedPath, *, overwrite: bool) -> Path:
        """Return the folder to write a checkpoint to, under a temporary name.

        Raises:
            RequestFailed: the name is wrong or taken.
        """
        if not NAME.fullmatch(path.name):
            raise RequestFailed(
                f"{path.name!r:.200} cannot name a checkpoint. Use letters, digits, '_', '.', ':' and '-', at most 128."
            )
        folder = self.folder(path)
        if folder.exists() and not overwrite:
            raise RequestFailed(
                f"{path} exists. Choose another name, or save with overwrite=True."
            )
        partial = folder.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, path: SavedPath, partial: Path, saved: Saved) -> None:
        """Give a complete checkpoint its name."""
        (partial / INFO_FILE).write_text(json.dumps(asdict(saved)), encoding="utf-8")
        folder = self.folder(path)
        outdated = folder.with_name(f".{path.name}.outdated")
        if folder.exists():
            shutil.rmtree(outdated, ignore_errors=True)
            os.replace(folder, outdated)
        os.replace(partial, folder)
        shutil.rmtree(outdated, ignore_errors=True)

    def find(self, path: SavedPath) -> Saved:
        """Return the description of a checkpoint.

        Raises:
            RequestFailed: there is no such checkpoint, or it has expired.
        """
        saved = self._read(self.folder(path))
        if saved is None or saved.is_expired:
            raise RequestFailed(f"{path} does not exist, or has expired.")
        return saved

    def delete(self, path: SavedPath) -> None:
        """Delete a checkpoint.

        Raises:
            RequestFailed: there is no such checkpoint.
        """
        self.find(path)
        shutil.rmtree(self.folder(path), ignore_errors=True)

    def delete_ephemeral(self, model: str, *, keep: int) -> None:
        """Delete the checkpoints of a model that served sampling clients, except for the newest `keep`."""
        ephemeral = sorted(
            (
                (saved.created, path)
                for path, saved in self._of(model)
                if saved.is_ephemeral
            ),
        )
        for _, path in ephemeral[: max(0, len(ephemeral) - keep)]:
            shutil.rmtree(self.folder(path), ignore_errors=True)

    def delete_expired(self) -> None:
        """Delete all checkpoints whose time has come."""
        for model in self.models():
            for path, saved in self._of(model):
                if saved.is_expired:
                    shutil.rmtree(self.folder(path), ignore_errors=True)

    def models(self) -> list[str]:
        """Return the models that have checkpoints."""
        return sorted(path.name for path in self._root.glob("*") if path.is_dir())

    def describe(self, model: str) -> list[dict[str, Any]]:
        """Return the checkpoints of a model for the client's lists, oldest first."""
        listed = [
            (saved.created, _described(path, saved))
            for path, saved in self._of(model)
            if not saved.is_ephemeral and not saved.is_expired
        ]
        return [entry for _, entry in sorted(listed, key=lambda item: item[0])]

    def newest(self, model: str) -> Saved | None:
        """Return the description of the newest checkpoint of a model."""
        saved = [saved for _, saved in self._of(model)]
        return max(saved, key=lambda entry: entry.created, default=None)

    def _of(self, model: str) -> Iterator[tuple[SavedPath, Saved]]:
        for kind in KINDS:
            for folder in (self._root / model / kind).glob("[!.]*"):
                if (saved := self._read(folder)) is not None:
                    yield SavedPath(model, kind, folder.name), saved

    def _read(self, folder: Path) -> Saved | None:
        try:
            return Saved(**read_json_file(folder / INFO_FILE))
        except (OSError, ValueError, TypeError):
            return None


def _described(path: SavedPath, saved: Saved) -> dict[str, Any]:
    return {
        "checkpoint_id": path.checkpoint_id,
        "checkpoint_type": TYPES[path.kind],
        "time": _iso(saved.created),
        "tinker_path": str(path),
        "public": False,
        "user_metadata": saved.user_metadata,
        "expires_at": None if saved.expires is None else _iso(saved.expires),
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
