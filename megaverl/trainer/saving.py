"""What a run leaves on the disk: checkpoints when they are due, and trained models as Hugging Face folders."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaverl.checkpoint.commit import Committer, Retention
from megaverl.checkpoint.store import CheckpointStore
from megaverl.config.run import CheckpointConfig
from megaverl.data.tokenizers import Tokenizer
from megaverl.distributed.collectives import on_first_rank
from megaverl.errors import CheckpointError
from megaverl.models.classifier import classifier_config
from megaverl.monitoring.console import Console
from megaverl.trainer.build import Builder
from megaverl.workers.model import TrainingModel
from megaverl.workers.trainable import TrainableModel


class Saving:
    """The checkpoints of a run as `checkpoint` in the configuration wants them. All ranks call it together.

    Args:
        phase: called with the name of every phase of a save.

    Attributes:
        resumed_from: the checkpoint that the run goes on from; None: it starts afresh.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: Path,
        phase: Callable[[str], None],
        console: Console,
        committer: Committer | None = None,
    ) -> None:
        self.config, self.console = config, console
        retention = Retention(
            keep_last_k=config.keep_last_k, keep_best=config.keep_best, milestone_interval=config.milestone_interval
        )
        folder, committer = run_dir / "checkpoints", committer or Committer()
        self.store = CheckpointStore(folder, retention=retention, committer=committer, phase=phase, warn=console.warn)
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        self.resumed_from = self.store.resolve(config.resume, restarted=restarted)
        self.num_failed = 0
        self._last: tuple[int, bool] | None = None

    def is_due(self, done: int, *, last: bool, is_best: bool) -> bool:
        """Whether to save after `done` steps."""
        interval = self.config.save_interval
        return last or bool(interval and (done % interval == 0 or (is_best and self.config.keep_best)))

    def note_resumed(self, done: int, *, inside: bool) -> None:
        """What the run goes on from need not be saved again."""
        self._last = (done, inside)

    def look(self) -> None:
        """At every safe point: commit a checkpoint that was written meanwhile, or report that it was not.

        Raises:
            CheckpointError: it was not, and `on_write_error` is stop.
        """
        self._attempt(lambda: self.store.finish(wait=False))

    def save(
        self, done: int, roles: Mapping[str, TrainableModel], state: Mapping[str, Any], *, wait: bool, **options: Any
    ) -> bool:
        """Save after `done` steps; False if it failed and the run goes on all the same.

        Args:
            wait: until it is whole, as at the end of a run; else `async_save` says so.
            options: of `CheckpointStore.start`.

        Raises:
            CheckpointError: it failed, and `on_write_error` is stop.
        """
        in_background = self.config.async_save and not wait
        if self._last == (done, bool(options.get("inside"))):
            return self.settle()
        # one that failed says nothing of the next
        earlier = self._attempt(self.store.finish)
        started = self._attempt(lambda: self.store.start(done, roles, state, in_background=in_background, **options))
        if started:
            self._last = (done, bool(options.get("inside")))
        if not in_background:
            return started and self.settle()
        return started and earlier

    def commit_written(self) -> None:
        """When the run ends with an error that all ranks have: keep what is being written. Tells, and never raises."""
        try:
            self.store.finish()
        except CheckpointError as error:
            self.console.error(str(error))

    def settle(self) -> bool:
        """Wait for what is still being written; False if it failed."""
        return self._attempt(self.store.finish)

    def _attempt(self, action: Callable[[], Any]) -> bool:
        try:
            action()
        except CheckpointError as error:
            self.num_failed += 1
            self._last = None
            if self.config.on_write_error == "stop":
                raise
            self.console.error(f"{error} The run goes on without it (checkpoint.on_write_error=continue).")
            return False
        return True


def settle_file(path: Path) -> int:
    """Put a file that is being appended to on the disk; its size, 0 where there is none."""
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            return path.stat().st_size
    except OSError:  # a tracker that cannot write has said so
        return 0


def check_origin(path: Path, state: Mapping[str, Any], stage: str, tokenizer: Tokenizer) -> None:
    """That a checkpoint was written by the command that reads it, with the same tokenizer.

    Args:
        state: the trainer's, out of the checkpoint. stage: train, sft, dpo or reward_model.

    Raises:
        CheckpointError: it was not.
    """
    found = state.get("stage", "train")
    if found != stage:
        commands = {"reward_model": "reward"}
        raise CheckpointError(
            f"{path}: it was written by `megaverl {commands.get(found, found)}`, and this is `megaverl "
            f"{commands.get(stage, stage)}`. Give this run a name of its own (run.name); to start from the other's "
            "model, set model.path to its folder hf."
        )
    mine = tokenizer_digest(tokenizer)
    if state["tokenizer"] != mine:
        raise CheckpointError(
            f"{path}: it was made with another tokenizer ({state['tokenizer']}; this run's, of {tokenizer.source}, is "
            f"{mine}). Name the right one with model.tokenizer."
        )


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """The same for tokenizers that give the same ids to the same tokens, and end responses alike."""
    facts = [sorted(tokenizer.backend.get_vocab().items()), tokenizer.stop_token_ids, tokenizer.chat_template]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def export_model(model: TrainingModel, builder: Builder, folder: Path) -> None:
    """Write `folder` with weights, configuration and tokenizer; replaces an older one. Every rank takes part.

    Adapters are merged into these weights, and stand by themselves in `folder`_adapter, as peft has them.
    """
    tokenizer = builder.run_dir / "tokenizer"

    def save_tokenizer() -> None:
        tokenizer.mkdir(parents=True, exist_ok=True)
        builder.tokenizer.save(tokenizer)

    on_first_rank(save_tokenizer, model.grid.world)
    model.export(folder, source_folder=builder.folder, tokenizer_folder=tokenizer, overwrite=True)
    if model.adapters is not None:
        model.save_adapters(folder.with_name(f"{folder.name}_adapter"), base=builder.config.model.path)


def export_classifier(model: TrainingModel, builder: Builder, folder: Path, *, path: str | None) -> None:
    """Write a reward model as Hugging Face's `...ForSequenceClassification` with one label. Every rank takes part.

    Args:
        path: of the model that it started from; None: `model.path`.
    """
    source = builder.files(path).folder

    def describe() -> str:
        own = Path(tempfile.mkdtemp(prefix="classifier_", dir=builder.run_dir))
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        described = classifier_config(config, pad_token_id=builder.tokenizer.pad_token_id)
        (own / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        builder.tokenizer.save(own)
        return str(own)

    described = on_first_rank(describe, model.grid.world)
    model.export(folder, source_folder=described, overwrite=True)
    on_first_rank(lambda: shutil.rmtree(described), model.grid.world)
