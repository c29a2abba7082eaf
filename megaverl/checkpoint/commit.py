"""Commit a checkpoint: after all ranks have reported, one rank writes the manifest and then renames the folder.

    all ranks           write files into step_N.tmp, sync them, report their records
    committing rank     write manifest.json -> sync -> rename step_N.tmp to step_N -> sync -> remove old checkpoints

A crash before the rename leaves a partial folder that nobody loads; one after it leaves
a complete checkpoint. The `Committer` decides which rank commits: the first rank of a
run with one role group, otherwise the coordinator.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaverl.checkpoint import (
    INSIDE_SUFFIX,
    MANIFEST_FILE,
    PARTIAL_SUFFIX,
    PREFIX,
    Manifest,
    partial_name,
    read_json,
    readable,
    sync_folder,
    write_json,
    writing,
)
from megaverl.distributed.collectives import on_rank, reduce_json
from megaverl.errors import CheckpointError

BEST_FILE = "best.json"
OLD_SUFFIX = ".old"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Committer:
    """Collective operations for a checkpoint. All ranks call its methods at the same time.

    Attributes:
        group: all ranks that take part, if they belong to several role groups; None: they are one role group.
        planner: the rank among them that commits, and plans a save for all.
    """

    group: dist.ProcessGroup | None = None
    planner: int = 0

    @property
    def rank(self) -> int:
        """This rank's index among those that take part."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Number of ranks that take part."""
        return dist.get_world_size(self.group)

    @property
    def decides(self) -> bool:
        """True on the rank that commits."""
        return self.rank == self.planner

    def conclude(self, report: Any, function: Callable[[list[Any]], Any]) -> Any:
        """Call `function` with all ranks' reports, in rank order, on the committing
        rank; return its result on every rank.

        Reports and result are JSON. An error of `function` is raised on every rank.
        Other ranks do not receive the reports.
        """
        return reduce_json(report, function, self.group, self.planner)

    def decide(self, function: Callable[[], Any]) -> Any:
        """Call `function` on the committing rank; return its JSON result, or raise its error, on every rank."""
        return on_rank(function, self.planner, self.group)


@dataclass(frozen=True)
class Retention:
    """Rules for keeping checkpoints.

    Attributes:
        keep_last_k: number of newest checkpoints to keep.
        keep_best: also keep the best one.
        milestone_interval: also keep those of every so many steps; 0: none.
    """

    keep_last_k: int = 3
    keep_best: bool = True
    milestone_interval: int = 0

    def __post_init__(self) -> None:
        if self.keep_last_k < 1:
            raise CheckpointError(
                f"checkpoint.keep_last_k={self.keep_last_k}: at least 1, for the newest is always kept."
            )

    def dispensable(
        self, checkpoints: list[tuple[Path, Manifest]], best: str | None
    ) -> list[Path]:
        """List the folders that may be removed, from (folder, manifest) pairs, oldest first.

        A checkpoint taken inside a step is only useful until the next one.
        """
        # A checkpoint inside a step is useful until a later one exists.
        passed = [
            folder
            for folder, _ in checkpoints[:-1]
            if folder.name.endswith(INSIDE_SUFFIX)
        ]
        between = [entry for entry in checkpoints if entry[0] not in passed]
        for folder, manifest in between[: -self.keep_last_k]:
            every, whole_step = (
                self.milestone_interval,
                folder.name == f"{PREFIX}{manifest.step:08d}",
            )
            # Milestones are whole steps only.
            is_milestone = every and manifest.step % every == 0 and whole_step
            if not is_milestone and not (self.keep_best and folder.name == best):
                passed.append(folder)
        return passed


def prepare_folder(
    root: Path, partial: Path, num_bytes: int, *, was_there: bool = False
) -> None:
    """Remove partial checkpoints, check free space, and create the folder to write to.

    Args:
        was_there: whether `root` existed before. If it has vanished, something is wrong.
    """
    if was_there and not root.is_dir():
        raise CheckpointError(
            f"{partial}: the checkpoint was not written: the folder {root} has vanished, with the checkpoints "
            "that were in it. Is its file system still mounted? Make the folder again to go on there."
        )
    with writing(partial):
        root.mkdir(parents=True, exist_ok=True)
        # They are of saves that were interrupted; no other save is running, as one run
        # has one committing rank.
        # A killed save leaves its folder behind.
        for rest in root.glob(f"{PREFIX}*{PARTIAL_SUFFIX}"):
            shutil.rmtree(rest)
        # Compared before anything is written: a full disk would be noticed only after
        # minutes.
        free = shutil.disk_usage(root).free
        if free < num_bytes:
            raise CheckpointError(
                f"{partial}: the checkpoint needs {num_bytes / 1e9:.2f} GB and {free / 1e9:.2f} GB are free. "
                "Free some, lower checkpoint.keep_last_k, or point run.dir elsewhere. "
                "The checkpoints before it are untouched."
            )
        partial.mkdir()


def commit(
    folder: Path, manifest: Manifest, *, best: bool, phase: Callable[[str], None]
) -> None:
    """Mark a checkpoint complete whose files are all on the disk under its partial name. Called on one rank.

    Args:
        manifest: its serial is filled in here.
        phase: called with the name of each stage before it: checkpoint_manifest, checkpoint_rename, checkpoint_marked.
    """
    root, partial = folder.parent, partial_name(folder)
    with writing(partial):
        phase("checkpoint_manifest")
        # Steps do not order checkpoints: a run that resumed from an older one writes
        # lower steps later.
        newest = max((known.serial for _, known in readable(root)), default=0)
        replace(manifest, serial=newest + 1).write(partial)
        # A rename may reach the disk before the files' contents do, unless these are
        # synced first.
        sync_folder(partial)
        phase("checkpoint_rename")
        # The run has resumed from an earlier step and reached this one again. Move the
        # old checkpoint aside, so that a complete one exists until the new one has its
        # name.
        replaced = (
            _move(folder, folder.with_name(folder.name + OLD_SUFFIX))
            if folder.exists()
            else None
        )
        partial.rename(folder)
        sync_folder(root)
        phase("checkpoint_marked")
        if best:
            _write_best(root, folder.name)
        elif replaced and best_name(root) == folder.name:
            (root / BEST_FILE).unlink()
        if replaced:
            remove(replaced)


def prune(root: Path, retention: Retention) -> None:
    """Remove checkpoints that need not be kept. A folder without a valid manifest is left for the user to inspect."""
    for folder in retention.dispensable(readable(root), best_name(root)):
        try:
            remove(folder)
        except OSError as error:
            # The new checkpoint is complete, so failing to remove an old one must not
            # fail the save.
            logger.warning(
                "%s: an old checkpoint could not be removed: %s", folder, error
            )


def remove(folder: Path) -> None:
    """Remove a checkpoint. It is first renamed to a partial one, so that nobody takes a
    half-removed folder for complete.
    """
    shutil.rmtree(
        _move(folder, partial_name(folder.with_name(folder.name + ".removed")))
    )


def best_name(root: Path) -> str | None:
    """Return the name of the best checkpoint if one is marked and still exists."""
    path = root / BEST_FILE
    name = read_json(path)["folder"] if path.is_file() else None
    return str(name) if name and (root / name / MANIFEST_FILE).is_file() else None


def _move(source: Path, target: Path) -> Path:
    if target.exists():
        shutil.rmtree(target)
    return source.rename(target)


def _write_best(root: Path, name: str) -> None:
    # Written under another name first, so that readers never see half of it.
    temporary = root / (BEST_FILE + PARTIAL_SUFFIX)
    write_json(temporary, {"folder": name})
    temporary.rename(root / BEST_FILE)
    sync_folder(root)


def job_name() -> str:
    """Return the torchrun job of this process, equal over its restarts; empty outside of one."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{run}.{os.getppid()}" if run else ""
