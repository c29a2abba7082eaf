"""Save and resume: all ranks write, one rank commits with a single rename, and only complete checkpoints are loaded."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megaverl.checkpoint import (
    FIX,
    FORMAT_VERSION,
    PREFIX,
    Manifest,
    damaged,
    folder_of,
    newest_first,
    partial_name,
    read_json,
    synced_record,
    write_bytes,
    writing,
)
from megaverl.checkpoint.background import start_writing
from megaverl.checkpoint.choice import STATE_FILE, is_finished, kind_of
from megaverl.checkpoint.commit import (
    Committer,
    Retention,
    commit,
    job_name,
    prepare_folder,
    prune,
)
from megaverl.checkpoint.shards import (
    Files,
    StagedShards,
    Stager,
    check_pickles,
    own_errors,
    read_shards,
)
from megaverl.checkpoint.training_state import (
    apply_state,
    buffer_storages,
    capture_random_state,
    engine_of,
    load_from_other_engine,
    restore_random_state,
    sharded_state,
    trained_storages,
)
from megaverl.config.run import RESUME_WORDS
from megaverl.distributed.collectives import reduce_json, together
from megaverl.errors import CheckpointError, DamagedCheckpoint
from megaverl.monitoring.tracker import collect_versions
from megaverl.workers.trainable import TrainableModel

logger = logging.getLogger(__name__)


@dataclass
class _Pending:
    """A checkpoint that is being written. The commit adds the manifest's serial and files."""

    folder: Path
    manifest: Manifest
    shards: StagedShards
    written: Future[list[Any]]
    best: bool


class CheckpointStore:
    """The checkpoints of one run folder. Every rank makes a store, and all ranks call its methods together.

    Args:
        root: the folder, on a file system that all ranks share; created by the first save.
        retention: rules for keeping checkpoints.
        committer: decides which rank marks a checkpoint complete.
        warn: called on every rank for a damaged checkpoint that is skipped.
        phase: called with the next stage of a save: checkpoint_copy, checkpoint_write, checkpoint_commit; see `commit`.

    Example:
        store = CheckpointStore("runs/demo/checkpoints")
        store.start(step, {"actor": actor}, {"next_step": step})   # writes in the background
        store.finish()                                             # all ranks have written: commit
        folder = store.resolve("auto")
        folder, state = store.resume(folder, {"actor": actor})
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
        self.committer = committer or Committer()
        self.phase, self._warn = phase, warn
        self._stager = Stager()
        self._pending: _Pending | None = None
        self._search: Generator[Path, str, None] | None = None
        self._was_there = False
        self._versions: dict[str, str] = {}

    def save(
        self,
        step: int,
        roles: Mapping[str, TrainableModel],
        state: Mapping[str, Any],
        **options: Any,
    ) -> Path:
        """Write the checkpoint of `step` and commit it. Arguments as in `start`.

        Raises:
            CheckpointError: on every rank. Earlier checkpoints are untouched, and the new one does not exist.
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
        """Begin to write the state as it is now; `finish` commits it. Waits for an earlier save.

        A background save copies what is not written yet to host memory when an
        optimizer is about to step.

        Args:
            roles: role -> model, optimizer and scheduler.
            state: the trainer's own state as JSON, equal on every rank.
            files: name -> function that writes a further file to the given path. The committing rank writes them; they
                must not change meanwhile.
            own_files: name -> contents of this rank's own files.
            best: mark the checkpoint as the best so far.
            inside: it is taken in the middle of the next step.
            in_background: write in a thread while training continues; False: write now, without copies.

        Raises:
            CheckpointError: on every rank: there is no space, the folder is gone, or the previous save failed.
        """
        # One save at a time: an earlier one is committed first.
        self.finish()
        folder = folder_of(self.root, step, inside=inside)
        partial = partial_name(folder)
        self.phase("checkpoint_copy")
        # Staging comes before the folder: its plan tells how many bytes must fit on the
        # disk.
        with own_errors(f"{partial}: the checkpoint was not written", FIX):
            shards = self._staged(roles, in_background)
        was_there = self._was_there
        # Collective over all ranks. The committing rank creates the folder, and all
        # raise its error.
        self.committer.conclude(
            shards.num_bytes,
            lambda sizes: prepare_folder(
                self.root, partial, sum(sizes), was_there=was_there
            ),
        )
        self._was_there = True
        # The random state is taken now, not when the thread writes it: training draws
        # numbers meanwhile.
        rank_files = {
            _random_file(self.committer.rank): json.dumps(
                capture_random_state()
            ).encode(),
            **(own_files or {}),
        }
        more: Mapping[str, Callable[[Path], None]] = {}
        # Files that are equal on all ranks are written once.
        if self.committer.decides:
            rank_files[STATE_FILE] = json.dumps(dict(state), indent=1).encode()
            more = files or {}
            self._versions = self._versions or collect_versions()
        self.phase("checkpoint_write")
        manifest = Manifest(
            format=FORMAT_VERSION,
            serial=0,
            step=step,
            world_size=self.committer.size,
            job=job_name(),
            roles=self._merge_reports(_describe(roles)),
            versions=self._versions,
            files={},
        )
        written = start_writing(
            lambda: _write(partial, shards, rank_files, more),
            in_background=in_background,
        )
        self._pending = _Pending(folder, manifest, shards, written, best)
        # Set the hook last: if staging fails, nothing is written and nothing need be
        # copied.
        # Training calls this before the next update changes what is not written yet.
        for trainable in roles.values():
            trainable.before_step = lambda: shards.held.settle(
                lambda: self.phase("checkpoint_write")
            )

    def finish(self, *, wait: bool = True) -> Path | None:
        """Commit the save that was started, once every rank has written its part.

        Args:
            wait: wait for all ranks; False: leave an incomplete save for a later call.

        Returns:
            Its folder, if it was committed now.

        Raises:
            CheckpointError: on every rank, if one could not write; names the ranks and the reasons.
        """
        pending = self._pending
        if pending is None:
            return None
        if not wait:
            done = pending.written.done()
            # All ranks must decide alike whether to commit. A failure ends the wait at
            # once: the others' files are of no use then.
            state = [done, done and pending.written.exception() is not None]
            if not self.committer.conclude(
                state,
                lambda states: all(d for d, _ in states) or any(f for _, f in states),
            ):
                return None
        # Cleared before anything can fail, so that a failed save is not committed
        # later.
        self._pending = None
        self.phase("checkpoint_commit")
        # Blocks until this rank's files are written.
        error = pending.written.exception()
        report = (
            [pending.written.result(), None]
            if error is None
            else [None, f"{type(error).__name__}: {error}"]
        )
        # Collective over all ranks: each reports its files or its error, and one rank
        # commits.
        self.committer.conclude(report, lambda reports: self._commit(pending, reports))
        return pending.folder

    def resume(
        self, folder: Path, roles: Mapping[str, TrainableModel]
    ) -> tuple[Path, dict[str, Any]]:
        """Load the checkpoint that `resolve` found; if it turns out to be damaged, the newest older complete one.

        Returns:
            The folder that was loaded, and the trainer's state.

        Raises:
            CheckpointError: on every rank: another model, no complete checkpoint, or the named one is damaged.
        """
        # A damaged checkpoint is skipped if the run did not name it.
        while True:
            try:
                return folder, self.load(folder, roles)
            except DamagedCheckpoint as error:
                if self._search is None:
                    raise
                try:
                    # The search continues with the next older one, and warns about this
                    # one.
                    folder = self._search.send(str(error))
                except StopIteration:
                    raise error from None

    def load(
        self, folder: str | Path, roles: Mapping[str, TrainableModel]
    ) -> dict[str, Any]:
        """Restore `roles` in place, on any grid, and the random generators; return the trainer's state.

        With another number of ranks, the random generators are not restored.

        Raises:
            DamagedCheckpoint: on every rank: bytes have changed. The roles hold parts of the checkpoint.
            CheckpointError: on every rank: the checkpoint is of another model, or lacks a role.
        """
        folder = Path(folder)
        # Collective: all role groups check the same checkpoint before anything is
        # loaded.
        described = self._merge_reports(_describe(roles))
        world_size, engines, state = self.committer.decide(
            lambda: _open(folder, described)
        )
        foreign = {
            role: trained
            for role, trained in roles.items()
            if engines[role] != engine_of(trained)
        }
        same_engine = {
            role: trained for role, trained in roles.items() if role not in foreign
        }
        # Each role group loads its own roles; errors are raised on all of them.
        with together(self.committer.group):
            if same_engine:
                with _present(same_engine):
                    is_alone = all(
                        role.model.grid.shape.dp * role.model.grid.shape.cp == 1
                        for role in same_engine.values()
                    )
                    apply_state(
                        same_engine,
                        read_shards(
                            sharded_state(same_engine, loading=True),
                            folder,
                            is_alone=is_alone,
                        ),
                    )
            with _present(foreign):
                for role, trainable in foreign.items():
                    load_from_other_engine(role, trainable, folder)
        # Random states belong to ranks. On another number of ranks they would be
        # meaningless.
        if world_size == self.committer.size:
            with together():
                restore_random_state(
                    read_json(folder / _random_file(self.committer.rank))
                )
        self._was_there = self._was_there or folder.parent == self.root
        return dict(state)

    def latest(self, job: str = "") -> Path | None:
        """Return the newest checkpoint with all its files, or None if there is none yet; warn about damaged ones.

        Args:
            job: only checkpoints of this job.

        Raises:
            CheckpointError: all checkpoints are damaged.
        """
        return self._newest(self.root, job)

    def resolve(self, resume: str, *, restarted: bool = False) -> Path | None:
        """Return the checkpoint to resume from, or None to start anew.

        All its files exist, and their bytes are intact. The files of tensors, nearly
        all of it, are verified by `resume` as it reads them.

        Args:
            resume: `auto` (the newest here, if any), `latest` (the newest here, which must exist), `unfinished` (the
                newest here, unless its run is complete), `never`, or a folder: a checkpoint, a `checkpoints` folder or
                a run folder, whose newest checkpoint is taken.
            restarted: torchrun has restarted the ranks, so this job's own checkpoints come first.

        Raises:
            CheckpointError: on every rank: the folder does not exist, or has no complete checkpoint.
        """
        self._search = None
        # With a named folder, or `never`, a restart would otherwise begin again there
        # and repeat what this job has saved.
        if restarted and resume not in ("auto", "latest"):
            latest_checkpoint = self.latest(self.committer.decide(job_name))
            if latest_checkpoint is not None:
                return latest_checkpoint
        if resume == "never":
            return None
        if resume in RESUME_WORDS:
            newest = self.latest()
            if newest is not None:
                folder = newest
                anew = resume == "unfinished" and self.committer.decide(
                    lambda: is_finished(folder)
                )
                return None if anew else newest
            if resume == "latest":
                raise CheckpointError(
                    f"checkpoint.resume=latest: {self.root} holds no checkpoint ({PREFIX}NNNNNNNN folders). "
                    "With auto, a run without one starts from the beginning."
                )
            return None
        path = Path(resume)
        kind = self.committer.decide(lambda: kind_of(path))
        if kind == "checkpoint":
            # A checkpoint that was named explicitly is not replaced by another one.
            if wrong := self._wrong(path):
                raise damaged(path, wrong)
            return path
        root = path / "checkpoints" if kind == "run" else path
        newest = self._newest(root)
        if newest is None:
            raise CheckpointError(
                f"checkpoint.resume={resume}: {root} holds no checkpoint ({PREFIX}NNNNNNNN folders)."
            )
        return newest

    def _staged(
        self, roles: Mapping[str, TrainableModel], in_background: bool
    ) -> StagedShards:
        """Stage the tensors to write. Tensors that training will change or move are copied before that happens."""
        moving = [trainable for trainable in roles.values() if trainable.offloads]
        staying = [
            trainable
            for trainable in roles.values()
            # Offloaded tensors move, so they cannot be written in place later.
            if in_background and not trainable.offloads
        ]
        with _present(roles):
            return self._stager.stage(
                sharded_state(roles),
                held=trained_storages(staying),
                copied=trained_storages(moving) | buffer_storages([*moving, *staying]),
                committer=self.committer,
            )

    def _merge_reports(self, report: dict[str, Any]) -> dict[str, Any]:
        """Merge the roles' descriptions of all role groups, if there are several."""
        if self.committer.group is None:
            return report
        return dict(
            self.committer.conclude(
                report,
                lambda reports: {
                    role: value
                    for one_report in reports
                    for role, value in one_report.items()
                },
            )
        )

    def _commit(self, pending: _Pending, reports: list[Any]) -> None:
        partial = partial_name(pending.folder)
        failures = [
            f"rank {rank}: {failure}"
            for rank, (_, failure) in enumerate(reports)
            if failure is not None
        ]
        if failures:
            # Free its space.
            # The checkpoint cannot be completed, and its space may be all that is left.
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"{partial}: the checkpoint was not written: {'; '.join(failures)}. {FIX}"
            )
        files: Files = {}
        for (written, _), _ in reports:
            files |= written
        # The index is written last, when the places of all items are known.
        with writing(partial):
            files |= pending.shards.index(partial, [items for (_, items), _ in reports])
        manifest = replace(pending.manifest, files=dict(sorted(files.items())))
        commit(pending.folder, manifest, best=pending.best, phase=self.phase)
        self.phase("checkpoint_prune")
        prune(self.root, self.retention)

    def _newest(self, root: Path, job: str = "") -> Path | None:
        self._search = self._whole(root, job)
        return next(self._search, None)

    def _whole(self, root: Path, job: str) -> Generator[Path, str, None]:
        """Yield the complete checkpoints, newest first, and warn about those that are skipped.

        A value sent to the generator is the problem of the last checkpoint that was
        yielded.
        """

        def search() -> list[list[str]]:
            checkpoints, wrong = newest_first(root, job)
            return [list(map(str, checkpoints)), wrong]

        # Collective: all ranks look at the same checkpoints, in the same order.
        (names, problems), warned = self.committer.decide(search), 0
        for folder in map(Path, names):
            if wrong := self._wrong(folder):
                problems.append(str(damaged(folder, wrong)))
                continue
            for problem in problems[warned:]:
                self._warn(f"passed over {problem}")
            warned = len(problems)
            # The generator waits here until this checkpoint turns out to be damaged.
            problems.append((yield folder))
        if problems and not job:
            raise CheckpointError(
                "\n".join([f"{root}: no checkpoint is intact.", *problems])
            )
        for problem in problems[warned:]:
            self._warn(f"passed over {problem}")

    def _wrong(self, folder: Path) -> list[str]:
        """Return the problems of a checkpoint's files except the tensors' bytes.

        Each rank reads a share of the files.
        """
        wrong: list[str] = []
        with together(self.committer.group):
            manifest = Manifest.read(folder)
            wrong = manifest.wrong_sizes(folder)
            if not wrong:
                wrong = manifest.wrong_bytes(
                    folder, self.committer.rank, self.committer.size, tensors=False
                )
        # Collective. Each rank has checked a share of the files.
        problems: list[str] = reduce_json(
            wrong, lambda ranks: sorted(set().union(*ranks)), self.committer.group
        )
        return problems


def _write(
    partial: Path,
    shards: StagedShards,
    rank_files: Mapping[str, bytes],
    more: Mapping[str, Callable[[Path], None]],
) -> list[Any]:
    """Write all files of one rank; return [records of its files, places of its items]."""
    files, items = shards.write(partial)
    for name, data in rank_files.items():
        # Other files come after the tensors, which take nearly all of the time.
        files[name] = write_bytes(partial / name, data)
    for name, write in more.items():
        write(partial / name)
        files[name] = synced_record(partial / name)
    return [files, items]


@contextmanager
def _present(roles: Mapping[str, TrainableModel]) -> Iterator[None]:
    """Bring offloaded state back to the device while the block runs."""
    with ExitStack() as stack:
        for trainable in roles.values():
            stack.enter_context(trainable.present())
        yield


def _open(
    folder: Path, wanted: dict[str, dict[str, Any]]
) -> tuple[int, dict[str, str], Any]:
    """Check a checkpoint before anything is loaded.

    Returns:
        (its world size, the engine of each role, the trainer's state).
    """
    manifest = Manifest.read(folder)
    manifest.check_files(folder)
    manifest.check_roles(folder, wanted)
    check_pickles(folder)
    engines = {
        role: described.get("engine", "megatron")
        for role, described in manifest.roles.items()
    }
    return manifest.world_size, engines, read_json(folder / STATE_FILE)


def _describe(roles: Mapping[str, TrainableModel]) -> dict[str, dict[str, Any]]:
    """Return the manifest's description of each role, in the form in which JSON returns it."""
    described = {}
    for role, trainable in roles.items():
        model, lora = trainable.model, None
        # Adapters fit only the same layers of a base model with the same weights.
        if model.adapters is not None:
            config = model.adapters.config
            layers = sorted(
                {low_rank.projection for low_rank in model.adapters.low_ranks.values()}
            )
            lora = {
                "rank": config.rank,
                "alpha": config.alpha,
                "layers": layers,
                "base": trainable.base_identity,
            }
        described[role] = {
            "engine": engine_of(trainable),
            "model": {
                name: value
                for name, value in asdict(model.spec).items()
                if name != "source"
            },
            "value_head": model.value_head,
            "lora": lora,
            "grid": asdict(model.grid.shape),
        }
    return dict(json.loads(json.dumps(described)))


def _random_file(rank: int) -> str:
    return f"random_{rank:05d}.json"
