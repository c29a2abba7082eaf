"""Save and resume: all ranks write, one commits by one rename, and only whole checkpoints are loaded."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaverl.checkpoint.background import Writing
from megaverl.checkpoint.checksums import synced_record, write_bytes
from megaverl.checkpoint.commit import Committer, FirstRank, Retention, best_name, commit, job_name, make_room, prune
from megaverl.checkpoint.dist_files import check_pickles, own_errors, read_shards
from megaverl.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    PREFIX,
    Manifest,
    damaged,
    folder_of,
    newest_first,
    read_json,
    torn_name,
)
from megaverl.checkpoint.megatron_state import apply_state, buffer_storages, sharded_state, trained_storages
from megaverl.checkpoint.random_state import capture_random_state, restore_random_state
from megaverl.checkpoint.shards import Files, StagedShards, Stager
from megaverl.distributed.collectives import gather_json, together
from megaverl.errors import CheckpointError, DamagedCheckpoint
from megaverl.models.lora import Adapters
from megaverl.monitoring.versions import collect_versions
from megaverl.workers.trainable import TrainableModel

STATE_FILE = "state.json"
MEND = (
    "Look at the folder's free space and rights, or point run.dir elsewhere. The checkpoints before it are untouched."
)

logger = logging.getLogger(__name__)


@dataclass
class _Pending:
    """A checkpoint that is being written."""

    folder: Path
    manifest: Manifest
    shards: StagedShards
    writing: Writing
    best: bool


@dataclass
class _Search:
    """For the newest checkpoint that is whole.

    Attributes:
        left: those not looked at yet, newest first.
        problems: what is wrong with the others.
        fails: whether it is an error that none is whole.
        told: of so many problems.
    """

    root: Path
    left: list[Path]
    problems: list[str]
    fails: bool
    told: int = 0


class CheckpointStore:
    """The checkpoints of one run folder. Every rank makes one, and all ranks call its methods together.

    Args:
        root: the folder, on a file system that all ranks share; made by the first save.
        retention: which checkpoints stay.
        committer: who marks a checkpoint complete.
        warn: told, on every rank, of a damaged checkpoint that is passed over.
        phase: told what a save is about to do: checkpoint_copy, checkpoint_write, checkpoint_commit, and see `commit`.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        retention: Retention | None = None,
        committer: Committer | None = None,
        phase: Callable[[str], None] = lambda name: None,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self.root, self.retention = Path(root), retention or Retention()
        self.committer: Committer = committer or FirstRank()
        self.phase, self._warn = phase, warn
        self._stager = Stager()
        self._pending: _Pending | None = None
        self._search: _Search | None = None
        self._was_there = False
        self._versions: dict[str, str] = {}

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint was started and is not committed yet; the same on all ranks."""
        return self._pending is not None

    def save(self, step: int, roles: Mapping[str, TrainableModel], state: Mapping[str, Any], **options: Any) -> Path:
        """Write the checkpoint of `step`; when this returns, it is on the disk and whole. Arguments as of `start`.

        Raises:
            CheckpointError: on every rank. The earlier checkpoints are untouched, the new one is not there.
        """
        self.start(step, roles, state, **options, in_background=False)
        path = self.finish()
        assert path is not None
        return path

    def start(
        self,
        step: int,
        roles: Mapping[str, TrainableModel],
        state: Mapping[str, Any],
        *,
        files: Mapping[str, Callable[[Path], None]] | None = None,
        own_files: Mapping[str, bytes] | None = None,
        best: bool = False,
        inside: bool = False,
        in_background: bool = True,
    ) -> None:
        """Begin to write the state as it is now; `finish` commits it. Waits for an earlier one.

        In the background, what is not written when an optimizer is about to step is copied to host memory first.

        Args:
            roles: models, optimizers and schedulers, by role.
            state: the trainer's own state, JSON, the same on every rank.
            files: further files by name, each written by a function that is given its path. The rank that
                commits writes them; they must not change meanwhile.
            own_files: this rank's own, by name.
            best: remember it as the best so far.
            inside: it was taken in the middle of the next step.
            in_background: write in a thread, while training goes on; False: here and now, without a copy.

        Raises:
            CheckpointError: on every rank: no space, a folder that is gone, or the checkpoint before this one
                failed.
        """
        self.finish()
        folder = folder_of(self.root, step, inside=inside)
        torn = torn_name(folder)
        self.phase("checkpoint_copy")
        with own_errors(f"{torn}: the checkpoint was not written", MEND):
            shards = self._staged(roles, in_background)
        num_bytes = sum(self.committer.collect(shards.num_bytes))
        self.committer.decide(lambda: self._make_room(torn, num_bytes))
        random_state = json.dumps(capture_random_state()).encode()
        own = {_random_file(self.committer.rank): random_state, **(own_files or {})}
        if self.committer.decides:
            own[STATE_FILE] = json.dumps(dict(state), indent=1).encode()
        more = dict(files or {}) if self.committer.decides else {}
        self.phase("checkpoint_write")
        self._pending = _Pending(
            folder=folder,
            manifest=self._manifest(step, roles),
            shards=shards,
            writing=Writing(lambda: _write(torn, shards, own, more), in_background=in_background),
            best=best,
        )
        for trainable in roles.values():  # only now: what is not going to be written need not be copied
            trainable.before_step = lambda: shards.held.settle(lambda: self.phase("checkpoint_write"))

    def finish(self, *, wait: bool = True) -> Path | None:
        """Commit the checkpoint that was started, once every rank has written its part.

        Args:
            wait: for all ranks; else a checkpoint that is not complete yet is left for a later call.

        Returns:
            Its folder, if it was committed now.

        Raises:
            CheckpointError: on every rank, if one could not write: names the ranks and why.
        """
        pending = self._pending
        if pending is None:
            return None
        if not wait:
            ranks = self.committer.collect([pending.writing.is_done, pending.writing.has_failed])
            if not all(done for done, _ in ranks) and not any(failed for _, failed in ranks):
                return None
        self._pending = None
        self.phase("checkpoint_commit")
        reports = self.committer.collect(list(pending.writing.outcome()))
        self.committer.decide(lambda: self._commit(pending, reports))
        return pending.folder

    def resume(self, folder: Path, roles: Mapping[str, TrainableModel]) -> tuple[Path, dict[str, Any]]:
        """`load` what `resolve` has found; where that turns out to be damaged, the newest older one that is whole.

        Returns:
            The folder that was loaded, and the trainer's state.

        Raises:
            CheckpointError: on every rank: of another model, or none is whole; or the one that was asked for is not.
        """
        search, candidate = self._search, folder
        while True:
            try:
                return candidate, self.load(candidate, roles)
            except DamagedCheckpoint as error:
                if search is None:
                    raise
                search.problems.append(str(error))
                older = self._next_whole(search)
                if older is None:
                    raise
                candidate = older

    def load(self, folder: str | Path, roles: Mapping[str, TrainableModel]) -> dict[str, Any]:
        """Restore `roles` in place, on any grid, and the random generators; returns the trainer's state.

        With another number of ranks the random generators stay as they are.

        Raises:
            DamagedCheckpoint: on every rank: what was read is not what was written. The roles hold parts of it.
            CheckpointError: on every rank: of another model, or it lacks a role.
        """
        folder = Path(folder)
        described = self._of_all_worlds(_describe(roles))
        world_size, state = self.committer.decide(lambda: _open(folder, described))
        with together(self.committer.group):  # worlds with roles of their own load them each by itself
            if roles:
                with _present(roles):
                    is_alone = all(role.model.grid.shape.dp == 1 for role in roles.values())
                    apply_state(roles, read_shards(sharded_state(roles, loading=True), folder, is_alone=is_alone))
        if world_size == self.committer.size:
            with together():
                restore_random_state(read_json(folder / _random_file(self.committer.rank)))
        self._was_there = self._was_there or folder.parent == self.root
        return dict(state)

    def check(self, folder: Path) -> None:
        """Read every byte of a checkpoint, all ranks together, and compare the checksums.

        Raises:
            CheckpointError: on every rank: what is missing or damaged.
        """
        if wrong := self._wrong(folder):
            raise damaged(folder, wrong)

    def latest(self, job: str = "") -> Path | None:
        """The newest checkpoint all of whose files are there, None where there is none yet; warns of damaged ones.

        Args:
            job: only those that this job wrote.

        Raises:
            CheckpointError: every one is damaged.
        """
        return self._newest(self.root, job)

    def best(self) -> Path | None:
        """The best checkpoint, if one was marked so and is still there."""
        name = self.committer.decide(lambda: best_name(self.root))
        return self.root / name if name else None

    def resolve(self, resume: str, *, restarted: bool = False) -> Path | None:
        """What to resume from: all of its files are there, and their bytes are those that were written.

        Those of its tensors, nearly all of it, `resume` compares as it reads them.

        Args:
            resume: `auto` (the newest here, if any), `latest` (the newest here, which must be there), `never`, or
                a folder: a checkpoint, a `checkpoints` folder or a run folder; of those, the newest is taken.
            restarted: torchrun has started the ranks again, so what this job itself has saved comes first.

        Raises:
            CheckpointError: on every rank: no such folder, or no whole checkpoint in it.
        """
        self._search = None
        if restarted and resume not in ("auto", "latest"):
            own = self.latest(self.committer.decide(job_name))
            if own is not None:
                return own
        if resume == "never":
            return None
        if resume in ("auto", "latest"):
            newest = self.latest()
            if newest is None and resume == "latest":
                raise CheckpointError(
                    f"checkpoint.resume=latest: {self.root} holds no checkpoint ({PREFIX}NNNNNNNN folders). "
                    "With auto, a run without one starts anew."
                )
            return newest
        path = Path(resume)
        kind = self.committer.decide(lambda: _kind_of(path))
        if kind == "checkpoint":
            if wrong := self._wrong(path, tensors=False):
                raise damaged(path, wrong)
            return path
        root = path / "checkpoints" if kind == "run" else path
        newest = self._newest(root)
        if newest is None:
            raise CheckpointError(f"checkpoint.resume={resume}: {root} holds no checkpoint ({PREFIX}NNNNNNNN folders).")
        return newest

    def _staged(self, roles: Mapping[str, TrainableModel], in_background: bool) -> StagedShards:
        """What is to be written; of what training changes, or moves away, meanwhile, a copy is taken before it does."""
        moving = [trainable for trainable in roles.values() if trainable.leaves]
        staying = [trainable for trainable in roles.values() if in_background and not trainable.leaves]
        with _present(roles):
            return self._stager.stage(
                sharded_state(roles),
                held=trained_storages(staying),
                copied=trained_storages(moving) | buffer_storages([*moving, *staying]),
                committer=self.committer,
            )

    def _of_all_worlds(self, mine: dict[str, Any]) -> dict[str, Any]:
        """What all worlds say of their roles, where there are several."""
        if self.committer.group is None:
            return mine
        return {role: what for found in self.committer.collect(mine) for role, what in found.items()}

    def _make_room(self, torn: Path, num_bytes: int) -> None:
        if self._was_there and not self.root.is_dir():
            raise CheckpointError(
                f"{torn}: the checkpoint was not written: the folder {self.root} has vanished, with the checkpoints "
                "that were in it. Is its file system still mounted? Make the folder again to go on there."
            )
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{torn}: the checkpoint was not written: {error}. {MEND}") from error
        self._was_there = True
        make_room(self.root, torn, num_bytes)

    def _manifest(self, step: int, roles: Mapping[str, TrainableModel]) -> Manifest:
        """What is known before anything is written; the serial and the files come with the commit."""
        if self.committer.decides and not self._versions:
            self._versions = collect_versions()
        return Manifest(
            format=FORMAT_VERSION,
            serial=0,
            step=step,
            world_size=self.committer.size,
            job=job_name(),
            roles=self._of_all_worlds(_describe(roles)),
            versions=self._versions,
            files={},
        )

    def _commit(self, pending: _Pending, reports: list[Any]) -> None:
        torn = torn_name(pending.folder)
        failures = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(reports) if why is not None]
        if failures:
            # its space is better free
            shutil.rmtree(torn, ignore_errors=True)
            raise CheckpointError(f"{torn}: the checkpoint was not written: {'; '.join(failures)}. {MEND}")
        files: Files = {}
        for (written, _), _ in reports:
            files |= written
        try:
            files |= pending.shards.index(torn, [items for (_, items), _ in reports])
        except OSError as error:
            raise CheckpointError(f"{torn}: the checkpoint was not written: {error}. {MEND}") from error
        manifest = Manifest(**{**pending.manifest.__dict__, "files": dict(sorted(files.items()))})
        commit(pending.folder, manifest, best=pending.best, phase=self.phase)
        self.phase("checkpoint_prune")
        prune(self.root, self.retention)

    def _newest(self, root: Path, job: str = "") -> Path | None:
        found, problems = self.committer.decide(lambda: _as_json(newest_first(root, job)))
        self._search = _Search(root, [Path(name) for name in found], problems, fails=not job)
        return self._next_whole(self._search)

    def _next_whole(self, search: _Search) -> Path | None:
        """The newest of those that are left; tells of those that were passed over."""
        newest = None
        while search.left and newest is None:
            folder = search.left.pop(0)
            if wrong := self._wrong(folder, tensors=False):
                search.problems.append(str(damaged(folder, wrong)))
            else:
                newest = folder
        if newest is None and search.problems and search.fails:
            raise CheckpointError("\n".join([f"{search.root}: no checkpoint is whole.", *search.problems]))
        for problem in search.problems[search.told :]:
            self._warn(f"passed over {problem}")
        search.told = len(search.problems)
        return newest

    def _wrong(self, folder: Path, *, tensors: bool = True) -> list[str]:
        """What is wrong with the files of a checkpoint; each rank reads a share of them."""
        wrong: list[str] = []
        with together(self.committer.group):
            manifest = Manifest.read(folder)
            wrong = manifest.wrong_sizes(folder)
            if not wrong:
                wrong = manifest.wrong_bytes(folder, self.committer.rank, self.committer.size, tensors=tensors)
        return sorted({problem for found in gather_json(wrong, self.committer.group) for problem in found})


def _write(
    torn: Path, shards: StagedShards, own: Mapping[str, bytes], more: Mapping[str, Callable[[Path], None]]
) -> Any:
    """All that one rank writes: [records of its files, where its items lie]."""
    files, items = shards.write(torn)
    for name, data in own.items():
        files[name] = write_bytes(torn / name, data)
    for name, write in more.items():
        write(torn / name)
        files[name] = synced_record(torn / name)
    return [files, items]


@contextmanager
def _present(roles: Mapping[str, TrainableModel]) -> Iterator[None]:
    """What was moved out of the accelerator's memory is back inside."""
    with ExitStack() as stack:
        for trainable in roles.values():
            stack.enter_context(trainable.present())
        yield


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
            "lora": _describe_adapters(trainable.model.adapters, trainable.base_identity),
            "grid": asdict(trainable.model.grid.shape),
        }
        for role, trainable in roles.items()
    }
    return dict(json.loads(json.dumps(described)))


def _describe_adapters(adapters: Adapters | None, base: str) -> dict[str, Any] | None:
    """What decides whether adapters fit: their layers, and the weights that they were trained on."""
    if adapters is None:
        return None
    layers = sorted({low_rank.projection for low_rank in adapters.low_ranks.values()})
    return {"rank": adapters.config.rank, "alpha": adapters.config.alpha, "layers": layers, "base": base}


def _as_json(found: tuple[list[Path], list[str]]) -> list[list[str]]:
    return [[str(folder) for folder in found[0]], found[1]]


def _kind_of(path: Path) -> str:
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint.resume={path}: {'a file, not a folder' if path.exists() else 'no such folder'}. "
            "Give auto, latest, never, or the folder of a checkpoint."
        )
    if (path / MANIFEST_FILE).is_file() or path.name.startswith(PREFIX):
        return "checkpoint"
    return "run" if (path / "checkpoints").is_dir() else "root"


def _random_file(rank: int) -> str:
    return f"random_{rank:05d}.json"
