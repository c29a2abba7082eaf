"""Output of a run: checkpoints, exported Hugging Face models, metrics, samples and timelines."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megaverl.checkpoint import read_json
from megaverl.checkpoint.choice import STATE_FILE, saved_config
from megaverl.checkpoint.commit import Committer, Retention
from megaverl.checkpoint.store import CheckpointStore
from megaverl.config import Config
from megaverl.config.run import RunConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.tokenizers import Tokenizer
from megaverl.distributed.collectives import on_first_rank
from megaverl.errors import CheckpointError
from megaverl.models.folder import classifier_config
from megaverl.monitoring.alerts import Alerts
from megaverl.monitoring.backends import Backend
from megaverl.monitoring.console import Console
from megaverl.monitoring.timeline import (
    total_received,
)
from megaverl.monitoring.tracker import Tracker
from megaverl.outside import read_json as read_json_text
from megaverl.outside import read_json_file
from megaverl.trainer.build import Builder
from megaverl.trainer.resuming import ChangedSettings, config_writer, stage_of
from megaverl.workers.model import TrainingModel
from megaverl.workers.reward import RewardRole, Scores
from megaverl.workers.trainable import TrainableModel


def open_endpoint(run: RunConfig) -> Backend:
    """Open the endpoint of `run.metrics_port`.

    Raises:
        OSError: the port is in use, or the interface does not exist.
    """
    # It imports prometheus_client, which only this key needs.
    from megaverl.monitoring.prometheus import MetricsEndpoint

    assert run.metrics_port is not None
    name = run.metrics_token_env
    token = None if name is None else os.environ[name]
    return MetricsEndpoint(run.name, run.metrics_host, run.metrics_port, token)


class Records:
    """Records of a run. One rank keeps them; on all other ranks nothing is written.

    Args:
        keeps: whether this rank keeps the records.

    Attributes:
        latest: completed steps of the last record, and all metrics recorded after as many, on the rank that keeps the
            records.
    """

    def __init__(
        self, config: Config, run_dir: Path, console: Console, *, keeps: bool
    ) -> None:
        self.config, self.run_dir, self.console = config, run_dir, console
        self.keeps = keeps
        self.latest: tuple[int, dict[str, float]] = (0, {})
        self._tracker: Tracker | None = None
        self._alerts: Alerts | None = None

    @contextmanager
    def opened(self, done: int) -> Iterator[None]:
        """Open trackers and alerts for the remaining steps, and close them at the end.

        Args:
            done: number of steps completed before this start. Records of later steps are dropped.
        """
        if not self.keeps:
            yield
            return
        run = self.config.run
        # A killed run may have written samples of steps that are now taken again.
        forget_samples(self._samples, done)
        self._tracker = Tracker(
            self.run_dir,
            run.log_with,
            only=run.track_metrics,
            resume_step=done or None,
            name=run.name,
            config=self.config.to_dict(),
            warn=self.console.warn,
        )
        if run.metrics_port is not None:
            self._tracker.add("run.metrics_port", partial(open_endpoint, run))
        if alerts := self.config.alerts:
            self._alerts = Alerts(alerts, self.run_dir, run.name, self.console.warn)
        try:
            yield
        finally:
            if self._alerts is not None:
                self._alerts.close()
            self._tracker.close()
            self._tracker = self._alerts = None

    def log(self, done: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `done` completed steps to the trackers and check the alerts."""
        metrics = {**metrics, **total_received(metrics)}
        if self._tracker is not None:
            self._tracker.log(done, metrics)
        if self._alerts is not None:
            self._alerts.note(done, metrics)
        # A validation after a step is a record of its own.
        last_done, known = self.latest
        self.latest = done, {**(known if last_done == done else {}), **metrics}

    def log_samples(
        self, done: int, records: Sequence[Mapping[str, Any]], split: str = "train"
    ) -> None:
        """Write samples for a person to read."""
        if self._tracker is not None:
            self.aside(
                lambda: append_samples(self._samples, done, records, split=split)
            )
            self._tracker.log_samples(done, split, records)

    def aside(self, write: Callable[[], object]) -> None:
        """Write a file that nothing depends on. If it cannot be written, warn and continue."""
        try:
            write()
        except OSError as error:
            self.console.warn(f"{error}; the run continues without this file")

    @property
    def _samples(self) -> Path:
        return self.run_dir / "samples.jsonl"


# Keys that every sample record has. Values from `log_extra` do not replace them.
OF_SAMPLES = (
    "step",
    "split",
    "agent",
    "episode",
    "turns",
    "prompt",
    "response",
    "reference",
    "reward",
    "finish_reason",
)


def sample_records(
    batch: RolloutBatch, scores: Scores, reward: RewardRole, count: int
) -> list[dict[str, Any]]:
    """Return the first `count` samples as JSON-compatible records.

    `turns` is the number of turns in this conversation of the episode.
    """
    agents, turns = batch.columns.get("agent"), batch.columns.get("turns")
    return [
        {
            **({"agent": agents[i]} if agents else {}),
            **(
                {"episode": int(batch.episode_ids[i])} if "episode_ids" in batch else {}
            ),
            **({"turns": len(turns[i])} if turns else {}),
            "prompt": batch.columns["prompt"][i],
            "response": reward.transcript(batch, i),
            "reference": batch.columns["reference"][i],
            "reward": round(float(scores.total[i]), 6)
            if bool(scores.scored[i])
            else None,
            "finish_reason": batch.columns["finish_reason"][i],
            **{
                name: value
                for name, value in scores.logged.get(i, {}).items()
                if name not in OF_SAMPLES
            },
        }
        for i in range(min(count, len(batch)))
    ]


def forget_samples(path: Path, after_step: int) -> None:
    """Drop the records of steps after `after_step`, which a resumed run writes again. 0 drops all records.

    An incomplete last line of a killed run is dropped as well.
    """
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines() if after_step else []
        # A complete record ends with the brace of its JSON object.
        kept = [
            line
            for line in lines
            if line.endswith("}")
            and read_json_text(line, not_finite=True)["step"] <= after_step
        ]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def append_samples(
    path: Path, step: int, records: Sequence[Mapping[str, Any]], split: str = "train"
) -> None:
    """Append one JSON line per record to `path`."""
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(
                json.dumps(
                    {"step": step, "split": split, **record},
                    ensure_ascii=False,
                    default=str,
                )
                + "\n"
            )


class Saving:
    """Checkpoints of a run, as section `checkpoint` of the configuration requests them. All ranks call every method.

    Args:
        phase: called with the name of every phase of a save.

    Attributes:
        resumed_from: checkpoint that the run resumes from, or None for a fresh start.
        changed: settings that differ from those of that checkpoint.
    """

    def __init__(
        self,
        run: Config,
        run_dir: Path,
        phase: Callable[[str], None],
        console: Console,
        committer: Committer | None = None,
    ) -> None:
        config = run.checkpoint
        self.run, self.config, self.console = run, config, console
        self.changed = ChangedSettings()
        retention = Retention(
            keep_last_k=config.keep_last_k,
            keep_best=config.keep_best,
            milestone_interval=config.milestone_interval,
        )
        folder, committer = run_dir / "checkpoints", committer or Committer()
        self.store = CheckpointStore(
            folder,
            retention=retention,
            committer=committer,
            phase=phase,
            warn=console.warn,
        )
        # torchrun sets this variable. A restarted job prefers its own checkpoints (see
        # `CheckpointStore.resolve`).
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        self.resumed_from = self.store.resolve(config.resume, restarted=restarted)
        self._last: tuple[int, bool] | None = None

    def is_due(self, done: int, *, last: bool, is_best: bool) -> bool:
        """Return whether to save after `done` steps.

        Args:
            last: whether this is the last step.
            is_best: whether the validation after this step is the best so far.
        """
        interval = self.config.save_interval
        return last or bool(
            interval and (done % interval == 0 or (is_best and self.config.keep_best))
        )

    def resume(
        self, roles: Mapping[str, TrainableModel], stage: str, tokenizer: Tokenizer
    ) -> tuple[Path, dict[str, Any]]:
        """Load the checkpoint that the run resumes from. Collective over all ranks.

        Settings are compared before anything is loaded. If the newest checkpoint is
        damaged, an older one is loaded, and `resumed_from` then refers to it.

        Returns:
            Folder of the checkpoint, and the trainer's state.

        Raises:
            ConfigError: lists every changed setting that a resumed run cannot follow.
            CheckpointError: the checkpoint is of another command or tokenizer, or cannot be loaded.
        """
        assert self.resumed_from is not None, "the run starts anew"
        self._compare(self.resumed_from, stage, tokenizer)
        loaded, state = self.store.resume(self.resumed_from, roles)
        # The newest checkpoint was damaged. The older one may come from other settings.
        if loaded != self.resumed_from:
            self.resumed_from = loaded
            self._compare(loaded, stage, tokenizer)
        return loaded, state

    def _compare(self, folder: Path, stage: str, tokenizer: Tokenizer) -> None:
        """Compare command, tokenizer and settings of a checkpoint with those of the run. One rank reads the files."""
        state, before = self.store.committer.decide(
            lambda: [read_json(folder / STATE_FILE), saved_config(folder)]
        )
        check_origin(folder, state, stage, tokenizer)
        self.changed = ChangedSettings.since(folder, before, self.run, stage)

    def report_resumed(
        self, done: int, total: int, more: str, roles: Mapping[str, TrainableModel]
    ) -> None:
        """Print where the run resumes, which settings have changed, and the next learning rates.

        Args:
            more: text to append to the first line.
        """
        self.console.print(
            f"resumed from {self.resumed_from}: {done} of {total} steps are done{more}"
        )
        for line in self.changed.lines():
            self.console.print(line)
        if done < total and (
            rates := [
                f"{name} {role.learning_rate:.4g}" for name, role in roles.items()
            ]
        ):
            self.console.print(f"learning rate of the next update: {', '.join(rates)}")

    def note_resumed(self, done: int, *, inside: bool) -> None:
        """Record that the state after `done` steps is already saved, so that it is not saved again.

        Args:
            inside: whether the checkpoint contains samples of a running step.
        """
        self._last = (done, inside)

    def look(self) -> None:
        """Commit a checkpoint whose background write has finished. Called at every safe point.

        Raises:
            CheckpointError: the write failed, and `on_write_error` is stop.
        """
        self._attempt(lambda: self.store.finish(wait=False))

    def save(
        self,
        done: int,
        roles: Mapping[str, TrainableModel],
        state: Mapping[str, Any],
        *,
        wait: bool,
        **options: Any,
    ) -> bool:
        """Save a checkpoint after `done` steps.

        Args:
            wait: wait until the checkpoint is complete, as at the end of a run. Otherwise `async_save` decides.
            options: further arguments of `CheckpointStore.start`.

        Returns:
            False if this save or the one before it failed and the run continues.

        Raises:
            CheckpointError: the save failed, and `on_write_error` is stop.
        """
        in_background = self.config.async_save and not wait
        # This state is being saved or is saved already, as after a signal at the end of
        # a step.
        if self._last == (done, bool(options.get("inside"))):
            return self.settle()
        # A failure of the previous checkpoint does not prevent this one.
        earlier = self._attempt(self.store.finish)
        options["files"] = {**options.get("files", {}), **config_writer(self.run)}
        started = self._attempt(
            lambda: self.store.start(
                done, roles, state, in_background=in_background, **options
            )
        )
        if started:
            self._last = (done, bool(options.get("inside")))
        if not in_background:
            return started and self.settle()
        return started and earlier

    def commit_written(self) -> None:
        """Commit the checkpoint that is being written, when the run ends with an error on all ranks.

        Failures are printed and not raised, so that they do not hide the error of the
        run.
        """
        try:
            self.store.finish()
        except CheckpointError as error:
            self.console.error(str(error))

    def settle(self) -> bool:
        """Wait until pending checkpoints are written. Return False if that failed."""
        return self._attempt(self.store.finish)

    def _attempt(self, action: Callable[[], Any]) -> bool:
        try:
            action()
        except CheckpointError as error:
            # The state is not saved, so the next call must not skip it.
            self._last = None
            if self.config.on_write_error == "stop":
                raise
            self.console.error(
                f"{error} The run continues without it (checkpoint.on_write_error=continue)."
            )
            return False
        return True


def settle_file(path: Path) -> int:
    """Flush a file that is being appended to. Return its size in bytes, or 0 if it does not exist."""
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            return path.stat().st_size
    # A tracker that could not write has already warned.
    except OSError:
        return 0


def check_origin(
    path: Path, state: Mapping[str, Any], stage: str, tokenizer: Tokenizer
) -> None:
    """Check that the same command with the same tokenizer wrote a checkpoint.

    Args:
        state: trainer's state in the checkpoint.
        stage: train, sft, dpo or reward_model.

    Raises:
        CheckpointError: another command or tokenizer wrote it.
    """
    saved_stage = stage_of(state)
    if saved_stage != stage:
        commands = {"reward_model": "reward"}
        raise CheckpointError(
            f"{path}: it was written by `megaverl {commands.get(saved_stage, saved_stage)}`, and this is `megaverl "
            f"{commands.get(stage, stage)}`. Give this run a name of its own (run.name); to start from the other's "
            "model, set model.path to its folder hf."
        )
    digest = tokenizer_digest(tokenizer)
    if state["tokenizer"] != digest:
        raise CheckpointError(
            f"{path}: it was made with another tokenizer ({state['tokenizer']}; this run's, of {tokenizer.source}, is "
            f"{digest}). Name the right one with model.tokenizer."
        )


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest that is equal for tokenizers with the same vocabulary, stop tokens and chat template."""
    facts = [
        sorted(tokenizer.backend.get_vocab().items()),
        tokenizer.stop_token_ids,
        tokenizer.chat_template,
    ]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def export_model(
    model: TrainingModel, builder: Builder, folder: Path, *, path: str | None = None
) -> None:
    """Write weights, configuration and tokenizer to `folder`, replacing older files. Collective over all ranks.

    Adapters are merged into the weights, and are also written separately to
    `folder`_adapter in peft's format.

    Args:
        path: model whose configuration the folder gets, or None for `model.path`.
    """
    tokenizer = builder.config.run_dir / "tokenizer"

    def save_tokenizer() -> None:
        tokenizer.mkdir(parents=True, exist_ok=True)
        builder.tokenizer.save(tokenizer)

    on_first_rank(save_tokenizer, model.grid.world)
    model.export(
        folder,
        source_folder=builder.files(path).folder,
        tokenizer_folder=tokenizer,
        overwrite=True,
    )
    if model.adapters is not None:
        model.save_adapters(
            folder.with_name(f"{folder.name}_adapter"), base=builder.config.model.path
        )


def export_draft(
    model: TrainingModel, builder: Builder, folder: Path, *, actor_folder: Path
) -> None:
    """Write the draft model or head as `export_model` does. Collective over all ranks.

    Args:
        actor_folder: exported actor, whose output layer vLLM expects beside an MTP head.
    """
    config = builder.config
    export_model(model, builder, folder, path=config.draft_path)
    if config.trains_head:
        # Imported here because it imports transformers' models.
        from megaverl.models.new_heads import copy_target_layers

        on_first_rank(
            lambda: copy_target_layers(folder, actor_folder), model.grid.world
        )


def export_classifier(
    model: TrainingModel, builder: Builder, folder: Path, *, path: str | None
) -> None:
    """Write a reward model in the format of Hugging Face's `...ForSequenceClassification` with one label.

    Collective over all ranks.

    Args:
        path: model that the reward model started from, or None for `model.path`.
    """
    source = builder.files(path).folder

    def describe() -> str:
        folder = Path(
            tempfile.mkdtemp(prefix="classifier_", dir=builder.config.run_dir)
        )
        config = read_json_file(source / "config.json")
        described = classifier_config(
            config, pad_token_id=builder.tokenizer.pad_token_id
        )
        (folder / "config.json").write_text(
            json.dumps(described, indent=2) + "\n", encoding="utf-8"
        )
        builder.tokenizer.save(folder)
        return str(folder)

    described = on_first_rank(describe, model.grid.world)
    model.export(folder, source_folder=described, overwrite=True)
    on_first_rank(lambda: shutil.rmtree(described), model.grid.world)
