"""The loop: steps, validation, checkpoints, what a person sees."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaverl.checkpoint.commit import Committer
from megaverl.config import Config
from megaverl.coordinator import CoordinatorClient, LocalCoordinator, Progress, Rules
from megaverl.data.batch import RolloutBatch
from megaverl.dataflow import DataFlow
from megaverl.distributed.collectives import on_first_rank, together
from megaverl.errors import CheckpointError, MegaverlError
from megaverl.monitoring.console import Console
from megaverl.monitoring.memory import memory_metrics
from megaverl.monitoring.timeline import Timeline
from megaverl.trainer.async_schedule import read_ahead
from megaverl.trainer.build import Builder
from megaverl.trainer.job import Job, Leaving, PreemptionHandler, Stages, unheard
from megaverl.trainer.records import Records
from megaverl.trainer.roles import Roles, make_roles
from megaverl.trainer.samples import sample_records
from megaverl.trainer.saving import Saving, check_origin, checkpoint_store, export_model, settle_file, tokenizer_digest
from megaverl.trainer.step import RLStep
from megaverl.trainer.stored_rollouts import RolloutFolder, StoredRollouts
from megaverl.trainer.validation import Validation
from megaverl.workers.reward import Scores
from megaverl.workers.trainable import TrainableModel

# After these a run may leave in the middle of a step: nothing is trained yet.
SAFE_AFTER = ("rollout", "reward")
ROLLOUT_FILE = "rollouts.safetensors"


PYTHON_THRESHOLD = (700, 10, 10)  # of the garbage collector


class Trainer:
    """PPO or GRPO, from a configuration to trained weights. Every rank makes one and calls `train`.

    Args:
        job: this rank's place in it; is told what this rank is doing.
    """

    def __init__(
        self, config: Config, console: Console, builder: Builder | None = None, job: Job | None = None
    ) -> None:
        self.config, self.console = config, console
        self.job, self.rank = job, dist.get_rank()
        builder = builder or Builder(config, fabric=job.fabric if job else None)
        self.builder, self.run_dir = builder, builder.run_dir
        self.records = Records(config, self.run_dir, console, keeps=self.keeps_records)
        held_out = builder.dataset(config.data.validation) if config.data.validation else None
        self.validation = Validation(config, held_out, self.records, console)
        self.prompts = builder.prompts()
        if self.prompts.losses:
            console.print(f"training prompts: {self.prompts.losses}")
        self.timeline = Timeline(self.rank)
        self.stages = Stages(self.timeline, job.liveness.note if job else unheard)
        replay = config.trainer.replay_rollouts
        replayed = RolloutFolder(replay) if replay is not None else None
        self.stages.note("resume")
        store = checkpoint_store(config.checkpoint, self.run_dir, self.stages.note, self.committer(), console)
        self.saving = Saving(config.checkpoint, store, console)
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        self.resumed_from = store.resolve(config.checkpoint.resume, restarted=restarted)
        self.stages.note("build")
        builder.resumes = self.resumed_from is not None
        self.roles = self.make_roles(builder, generates=replayed is None)
        self.step = RLStep(config, self.roles, replayed, warn=console.warn)
        self.flow = self.make_flow()
        mine = job.fabric.placement.ranks if job else {}
        for each in self.flow.plan.operators:
            here = [role for role in each.roles if job is None or job.fabric.rank in mine.get(role, ())]
            if here:
                self.timeline.roles[each.name] = here[-1]
        self.next_step = 0
        self.cut_off: StoredRollouts | None = None  # of the next step, from a run that left inside it
        self.stored = RolloutFolder(self.run_dir / "rollouts") if config.trainer.store_rollouts else None
        self.leave = PreemptionHandler()

    @property
    def keeps_records(self) -> bool:
        """Whether this rank writes down what the run has measured."""
        return self.rank == 0

    def committer(self) -> Committer:
        """Who marks a checkpoint complete."""
        return Committer()

    def make_roles(self, builder: Builder, *, generates: bool) -> Roles:
        """This rank's part of every role."""
        return make_roles(builder, generates=generates)

    def make_flow(self) -> DataFlow:
        """A step's operators."""
        return self.step.flow()

    def appoint(self, progress: Progress) -> None:
        """Who decides over updates, from where the run stands."""
        self._alone = LocalCoordinator(list(self.trained), rules_of(self.config), progress)
        for role, trainable in self.trained.items():
            trainable.judge = CoordinatorClient(self._alone, role, progress)

    @property
    def progress(self) -> Progress:
        """Updates that were decided on."""
        return self._alone.progress

    @property
    def makes_samples(self) -> bool:
        """Whether this rank takes part in making a step's samples: it generates or scores."""
        return True

    @property
    def trained(self) -> dict[str, TrainableModel]:
        """What a checkpoint holds, by role."""
        return self.roles.trained

    @property
    def saved(self) -> dict[str, TrainableModel]:
        """What of it this rank saves."""
        return self.trained

    def own_files(self) -> dict[str, bytes]:
        """What a checkpoint holds of this rank alone, by file."""
        return {}

    def train(self) -> dict[str, float]:
        """Run to the last step; returns the last validation's metrics, or the last step's.

        Raises:
            Leaving: the run was asked to leave, has saved, and is to be started again.
        """
        with self.leave.listening(), kept_objects():
            return self._train()

    def _train(self) -> dict[str, float]:
        config = self.config
        self.resume()
        if self.step.replayed is not None:
            with together():
                self.step.replayed.check(self.next_step, config.trainer.steps, config.samples_per_step)
        with self.recording():
            result = self._steps()
        if config.checkpoint.export_hf:
            self.stages.note("export")
            self.export()
        return result

    def _steps(self) -> dict[str, float]:
        result: dict[str, float] = {}
        if self.next_step == 0 and self.config.trainer.validate_at_start:
            result = self._validate(0) or result
        self.safe_point()
        for step in range(self.next_step, self.config.trainer.steps):
            self.stages.step = step + 1
            result = self.one_step(step) or result
            self.next_step = step + 1
            result = self.after_step(step + 1) or result
            self.safe_point()
        return result

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the steps: the records, which go on from where the run stands, and the timeline at the end."""
        if self.keeps_records and self.stored is not None:
            self.stored.forget(self.next_step)
        try:
            with self.records.opened(self.next_step):
                yield
        except MegaverlError:  # of all ranks: what the step before has written is whole, and only lacks its name
            self.saving.commit_written()
            raise
        finally:
            self.write_timeline()

    def write_timeline(self) -> None:
        """What this rank did when; also of a run that has failed."""
        if self.keeps_records:
            self.records.aside(lambda: self.timeline.export(self.run_dir / "timeline.json"))

    def export(self) -> None:
        """Write the trained model as a Hugging Face folder."""
        models, folder = self.roles.exported, self.run_dir / "hf"
        for name, model in models.items():
            export_model(model, self.builder, folder / name)
        self.console.print(
            f"model{'s' * (len(models) > 1)} written to {folder}{': ' * (len(models) > 1)}{', '.join(models)}"
        )

    def rollouts(self, step: int) -> StoredRollouts:
        """Responses to the next prompts, for a step of one's own; nothing is scored or trained.

        Raises:
            Leaving: the run was asked to leave, and has saved, with these.
        """
        cut_off, self.cut_off = self.cut_off, None
        if cut_off is not None:
            return cut_off
        self.step.metrics = {}
        self.timeline.begin(step)
        prompts = self.prompts.take(self.config.data.prompts_per_step)
        with self.stages("rollout"):
            values = {"rollouts": self.step.generate(prompts, step)}
        self._after_operator("rollout", values)
        return self._rollouts(step, values)

    def settle(self) -> None:
        """Wait for what is still being written; every rank does, at the end of a loop of one's own."""
        self.saving.settle()

    def one_step(self, step: int, rollouts: StoredRollouts | None = None) -> dict[str, float]:
        """One step of training, on responses to the next prompts, or on `rollouts`; returns its metrics."""
        cut_off, self.cut_off = rollouts or self.cut_off, None
        self.step.stored = None
        self.step.metrics = dict(cut_off.metrics) if cut_off else {}
        with self.timeline.step(step):
            done = cut_off.values if cut_off else self.step.gathered(self.stages, self.prompts, step)
            if done and not cut_off:
                self._after_operator("reward", done)
            prompts = [] if done else self.prompts.take(self.config.data.prompts_per_step)
            # what a program has made of its rollouts, it makes again when it goes on: it leaves between its calls
            after = self._after_operator if rollouts is None else lambda name, values: None
            values = self.flow.run(self.stages, done, after, prompts=prompts, step=step)
        self.stages.note("log")
        batch, times = values["rollouts"], self.timeline.step_metrics()
        seconds = times["time/step_ms"] / 1e3
        metrics = {
            **self.step.metrics,
            **times,
            **memory_metrics("actor"),
            "rollout/staleness": 0.0,  # of one's own weights; where roles run apart it may be more
            "train/step_time_ms": seconds * 1e3,
            "train/epoch": self.prompts.epoch,
            "train/tokens_per_sec": float(batch.sequence_lengths.sum()) / seconds,
        }
        self.log_step(step + 1, metrics, batch, values["scores"])
        if self.stored is not None:
            rollouts = self._rollouts(step, values)
            on_first_rank(lambda: RolloutFolder(self.run_dir / "rollouts").append(rollouts))
        return metrics

    def log_step(self, done: int, metrics: Mapping[str, float], batch: RolloutBatch, scores: Scores) -> None:
        """Write and show what a step has measured, with some of its samples."""
        trainer = self.config.trainer
        self.records.log(done, metrics)
        if self.keeps_records:
            self.records.log_samples(done, sample_records(batch, scores, self.roles.reward, trainer.save_samples))
        self.console.step(done, trainer.steps, metrics)

    def after_step(self, done: int) -> dict[str, float] | None:
        """Validate and save where the configuration says so; `done` steps are behind us."""
        last = done == self.config.trainer.steps
        result = self._validate(done) if self.validation.is_due(done) else None
        is_best = result is not None and self.validation.best.step == done
        if self.saving.is_due(done, last=last, is_best=is_best):
            self._save(done, best=is_best, wait=last)
        return result

    def _after_operator(self, name: str, values: Mapping[str, Any]) -> None:
        """Inside a step, leave if asked to, with what was generated."""
        if name not in SAFE_AFTER or self.step.replayed is not None:
            return
        self.saving.look()
        if signal := self.leave.agreed():
            self._leave(signal, self._rollouts(self.next_step, values))

    def safe_point(self) -> None:
        """Between steps: see what became of a checkpoint that was being written, and leave if asked to."""
        self.saving.look()
        if self.next_step < self.config.trainer.steps and (signal := self.leave.agreed()):
            self._leave(signal, None)

    def _leave(self, signal: str, cut_off: StoredRollouts | None) -> None:
        if self.next_step == 0 and cut_off is None:
            what = "nothing was trained yet"
        else:
            if not self._save(self.next_step, wait=True, cut_off=cut_off):
                raise CheckpointError(f"{signal}: the run leaves, and could not save before.")
            inside = f", inside step {self.next_step + 1}" if cut_off else ""
            what = f"saved after {self.next_step} of {self.config.trainer.steps} steps{inside}"
        raise Leaving(f"{signal}: {what}; start the run again to go on.")

    def _rollouts(self, step: int, values: Mapping[str, Any]) -> StoredRollouts:
        """What a step has generated and scored so far."""
        measured = {k: v for k, v in self.step.metrics.items() if k.startswith(("rollout/", "reward/"))}
        version = self.roles.sync.weight_version if self.roles.sync else 0
        return StoredRollouts(step, version, values["rollouts"], values.get("scores"), measured)

    def _validate(self, done: int) -> dict[str, float] | None:
        if not self.validation.happens or self.roles.rollout is None:
            return None
        with self.stages("validation"):
            evaluation = self.validation.evaluate(self.roles)
        self.validation.note(done, evaluation)
        return evaluation.metrics

    def _save(
        self, done: int, *, best: bool = False, wait: bool = False, cut_off: StoredRollouts | None = None
    ) -> bool:
        with self.stages("checkpoint"):
            files = {ROLLOUT_FILE: cut_off.write} if cut_off else {}
            state = self._state(cut_off)
            return self.saving.save(
                done,
                self.saved,
                state,
                wait=wait,
                best=best,
                inside=cut_off is not None,
                files=files,
                own_files=self.own_files(),
            )

    def _state(self, cut_off: StoredRollouts | None) -> dict[str, Any]:
        sync, in_flight = self.roles.sync, self.roles.in_flight
        return {
            "next_step": self.next_step,
            "kl": self.roles.kl.state_dict(),
            "sampler": self.prompts.state_dict(),
            "tokenizer": tokenizer_digest(self.builder.tokenizer),
            "weight_version": sync.weight_version if sync else 0,
            "generation_budget": in_flight.budget if in_flight and in_flight.measures else None,
            "best": self.validation.state_dict(),
            "metrics_bytes": settle_file(self.run_dir / "metrics.jsonl") if self.keeps_records else 0,
            "cut_off": cut_off.facts() if cut_off else None,
            "ahead": [],
            "coordinator": self.progress.to_dict(),
        }

    def resume(self) -> None:
        """Take up a checkpoint, if there is one; then the engine has the actor's weights."""
        self.stages.note("resume")
        sync, path = self.roles.sync, self.resumed_from
        state: dict[str, Any] | None = None
        if path is not None:
            if sync is not None:
                sync.source_changes()
            path, state = self.saving.store.resume(path, self.trained)
            self.resumed_from = path
            self._take_up(path, state)
        if sync is not None:
            sync.reshard()
        if sync is not None and state is not None:
            sync.weight_version = int(state["weight_version"]) or sync.weight_version
            if (in_flight := self.roles.in_flight) is not None and in_flight.measures:
                in_flight.budget = state.get("generation_budget")
        self.step.newest_version = (int(state["weight_version"]) if state else 0) or 1
        self.appoint(Progress.from_dict(state["coordinator"]) if state else Progress())
        if path is not None:
            inside = f", and step {self.next_step + 1} goes on after its rollout" if self.cut_off else ""
            done = f"{self.next_step} of {self.config.trainer.steps} steps are done"
            self.console.print(f"resumed from {path}: {done}{inside}")

    def _take_up(self, path: Path, state: dict[str, Any]) -> None:
        """The trainer's own state.

        Raises:
            CheckpointError, DataError: it was made with other data, or another tokenizer.
        """
        check_origin(path, state, "train", self.builder.tokenizer)
        self.prompts.load_state_dict(state["sampler"], int(state["next_step"]))
        self.roles.kl.load_state_dict(state["kl"])
        self.next_step = int(state["next_step"])
        self.validation.load_state_dict(state["best"])
        self.saving.note_resumed(self.next_step, inside=state["cut_off"] is not None)
        if state["cut_off"] is not None and self.step.replayed is None:
            with together():
                self.cut_off = StoredRollouts.read(path / ROLLOUT_FILE, state["cut_off"])
        if self.makes_samples and self.step.replayed is None:
            with together():
                self.step.waiting = read_ahead(path, state.get("ahead", ()))
        written = self.run_dir / "metrics.jsonl"
        if self.keeps_records and path.parent.parent == self.run_dir and settle_file(written) < state["metrics_bytes"]:
            self.console.warn(
                f"{written} holds less than when {path.name} was saved ({state['metrics_bytes']} bytes then): "
                "the steps that are missing there will stay so"
            )


def rules_of(config: Config) -> Rules:
    """What is applied, skipped, or the end, as `coordinator` says."""
    given, rollout = config.coordinator, config.rollout
    return Rules(
        skip_above=given.skip_above,
        on_nonfinite=given.on_nonfinite,
        max_skips=given.max_skips,
        max_staleness=rollout.max_staleness if rollout.async_rollout else None,
    )


@contextmanager
def kept_objects() -> Iterator[None]:
    """What is there now stays until the end, so it need not be looked through for garbage.

    megatron-core collects garbage twice in every save, which with all libraries imported takes half a second a time.
    What is made from here on is looked at as often as Python has it.
    """
    gc.freeze()
    gc.set_threshold(*PYTHON_THRESHOLD)
    try:
        yield
    finally:
        gc.unfreeze()
