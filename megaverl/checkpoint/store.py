"""Save and resume: all ranks write, the first commits by one rename, and only whole checkpoints are loaded."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaverl.checkpoint.dist_files import check_pickles, read_shards, write_shards
from megaverl.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    PREFIX,
    TORN_SUFFIX,
    Manifest,
    folder_of,
    list_files,
    newest_whole,
    read_json,
    readable,
    sync_folder,
    torn_name,
    write_json,
    writing,
)
from megaverl.checkpoint.megatron_state import apply_state, local_bytes, sharded_state
from megaverl.checkpoint.random_state import capture_random_state, restore_random_state
from megaverl.errors import CheckpointError
from megaverl.metrics.versions import collect_versions
from megaverl.parallel.collectives import gather_json, on_first_rank, together
from megaverl.roles.trainable import TrainableModel

STATE_FILE = "state.json"
BEST_FILE = "best.json"

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run folder. Every rank makes one, and all ranks call its methods together.

    Args:
        root: the folder, on a file system that all ranks share; made by the first save.
        keep_last: how many of the newest are kept.
        keep_best: keep the best one besides.
    """

    def __init__(self, root: str | Path, *, keep_last: int = 3, keep_best: bool = True) -> None:
        if keep_last < 1:
            raise CheckpointError(f"checkpoint.keep_last={keep_last}: at least 1, for the newest is always kept.")
        self.root, self.keep_last, self.keep_best = Path(root), keep_last, keep_best

    def save(
        self, step: int, roles: Mapping[str, TrainableModel], state: Mapping[str, Any], *, best: bool = False
    ) -> Path:
        """Write the checkpoint of `step`; when this returns, it is on the disk and whole.

        Args:
            roles: models, optimizers and schedulers, by role.
            state: the trainer's own state, JSON, the same on every rank.
            best: remember it as the best so far.

        Raises:
            CheckpointError: on every rank. The earlier checkpoints are untouched, the new one is not there.
        """
        folder = folder_of(self.root, step)
        torn = torn_name(folder)
        shards = sharded_state(roles)
        num_bytes = sum(gather_json(local_bytes(shards)))
        on_first_rank(lambda: self._prepare(torn, num_bytes))
        write_shards(shards, torn)
        del shards
        with together(), writing(torn):
            write_json(torn / _random_file(dist.get_rank()), capture_random_state())
        on_first_rank(lambda: self._commit(folder, step, _describe(roles), state, best))
        return folder

    def load(self, folder: str | Path, roles: Mapping[str, TrainableModel]) -> dict[str, Any]:
        """Restore `roles` in place, on any grid, and the random generators; returns the trainer's state.

        With another number of ranks the random generators stay as they are.

        Raises:
            CheckpointError: on every rank: damaged, of another model, or it lacks a role.
        """
        folder = Path(folder)
        world_size, state = on_first_rank(lambda: _open(folder, _describe(roles)))
        apply_state(roles, read_shards(sharded_state(roles, loading=True), folder))
        if world_size == dist.get_world_size():
            with together():
                restore_random_state(read_json(folder / _random_file(dist.get_rank())))
        return dict(state)

    def latest(self) -> Path | None:
        """The newest whole checkpoint, None where there is none yet; damaged ones are passed over with a warning.

        Raises:
            CheckpointError: every one is damaged.
        """
        return _latest(self.root)

    def best(self) -> Path | None:
        """The best checkpoint, if one was marked so and is still there."""
        name = on_first_rank(lambda: _best_name(self.root))
        return self.root / name if name else None

    def resolve(self, resume: str) -> Path | None:
        """What to resume from: `auto` (the newest here, if any), `never`, or a folder.

        The folder may be a checkpoint, a `checkpoints` folder or a run folder; of those, the newest is taken.

        Raises:
            CheckpointError: on every rank: no such folder, or no whole checkpoint in it.
        """
        if resume == "never":
            return None
        if resume == "auto":
            return self.latest()
        path = Path(resume)
        kind = on_first_rank(lambda: _kind_of(path))
        if kind == "checkpoint":
            return path
        root = path / "checkpoints" if kind == "run" else path
        latest = _latest(root)
        if latest is None:
            raise CheckpointError(f"checkpoint.resume={resume}: {root} holds no checkpoint ({PREFIX}NNNNNNNN folders).")
        return latest

    def _prepare(self, torn: Path, num_bytes: int) -> None:
        """Remove what earlier attempts left, and make the folder to write to."""
        with writing(torn):
            self.root.mkdir(parents=True, exist_ok=True)
            for rest in self.root.glob(f"{PREFIX}*{TORN_SUFFIX}"):
                shutil.rmtree(rest)
            free = shutil.disk_usage(self.root).free
            if free < num_bytes:
                raise CheckpointError(
                    f"{torn}: the checkpoint needs {num_bytes / 1e9:.2f} GB and {free / 1e9:.2f} GB are free. "
                    "Free some, lower checkpoint.keep_last, or point run.dir elsewhere."
                )
            torn.mkdir()

    def _commit(
        self, folder: Path, step: int, roles: dict[str, dict[str, Any]], state: Mapping[str, Any], best: bool
    ) -> None:
        """Write the manifest, give the folder its name, and let go of old ones. One rank, after all have written."""
        torn = torn_name(folder)
        with writing(torn):
            write_json(torn / STATE_FILE, dict(state))
            Manifest(
                format=FORMAT_VERSION,
                serial=max((manifest.serial for _, manifest in readable(self.root)), default=0) + 1,
                step=step,
                world_size=dist.get_world_size(),
                roles=roles,
                versions=collect_versions(),
                files=list_files(torn),
            ).write(torn)
            sync_folder(torn)
            replaced = _set_aside(folder) if folder.exists() else None
            torn.rename(folder)
            sync_folder(self.root)
            if best:
                _write_best(self.root, folder.name)
            if replaced:  # the run went back to an earlier checkpoint and came here again
                shutil.rmtree(replaced)
                if not best and _best_name(self.root) == folder.name:
                    (self.root / BEST_FILE).unlink()
        self._prune()

    def _prune(self) -> None:
        """Remove all but the newest and the best. A folder without a good manifest is left for a person to see."""
        best = _best_name(self.root) if self.keep_best else None
        for folder, _ in readable(self.root)[: -self.keep_last]:
            if folder.name == best:
                continue
            try:
                shutil.rmtree(_set_aside(folder))
            except OSError as error:  # the new checkpoint is whole: too many are better than none
                logger.warning("%s: an old checkpoint could not be removed: %s", folder, error)


def _open(folder: Path, wanted: dict[str, dict[str, Any]]) -> tuple[int, Any]:
    """Check a checkpoint before anything is loaded; returns its world size and the trainer's state."""
    manifest = Manifest.read(folder)
    manifest.check_files(folder)
    manifest.check_roles(folder, wanted)
    check_pickles(folder)
    return manifest.world_size, read_json(folder / STATE_FILE)


def _describe(roles: Mapping[str, TrainableModel]) -> dict[str, dict[str, Any]]:
    """What the manifest says of each role, as JSON gives it back."""
    described = {
        role: {
            "model": asdict(trainable.model.spec),
            "value_head": trainable.model.value_head,
            "grid": asdict(trainable.model.grid.shape),
        }
        for role, trainable in roles.items()
    }
    return dict(json.loads(json.dumps(described)))


def _latest(root: Path) -> Path | None:
    def find() -> list[Any]:
        folder, problems = newest_whole(root)
        return [str(folder) if folder else None, problems]

    found, problems = on_first_rank(find)
    for problem in problems if dist.get_rank() == 0 else []:
        logger.warning("passed over %s", problem)
    return Path(found) if found else None


def _kind_of(path: Path) -> str:
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint.resume={path}: {'a file, not a folder' if path.exists() else 'no such folder'}. "
            "Give auto, never, or the folder of a checkpoint."
        )
    if (path / MANIFEST_FILE).is_file() or path.name.startswith(PREFIX):
        return "checkpoint"
    return "run" if (path / "checkpoints").is_dir() else "root"


def _random_file(rank: int) -> str:
    return f"random_{rank:05d}.json"


def _set_aside(folder: Path) -> Path:
    """Give a checkpoint that goes a torn one's name: until it is gone, nobody takes it for a whole one."""
    return folder.rename(torn_name(folder.with_name(folder.name + ".removed")))


def _best_name(root: Path) -> str | None:
    path = root / BEST_FILE
    name = read_json(path)["folder"] if path.is_file() else None
    return str(name) if name and (root / name / MANIFEST_FILE).is_file() else None


def _write_best(root: Path, name: str) -> None:
    temporary = root / (BEST_FILE + TORN_SUFFIX)
    write_json(temporary, {"folder": name})
    temporary.rename(root / BEST_FILE)
    sync_folder(root)
