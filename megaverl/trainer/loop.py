"""Trainer of one rank: builds its roles, runs or serves the training loop, saves, resumes and reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaverl.checkpoint.commit import Committer
from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.data.distributed_batch import whole_on
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.dataflow import Operator
from megaverl.distributed.collectives import together
from megaverl.distributed.traffic import by_dimension, received_bytes
from megaverl.errors import CheckpointError, MegaverlError
from megaverl.monitoring.console import Console
from megaverl.monitoring.profiler import Profiler
from megaverl.monitoring.stragglers import KernelMeter, ProcessorMeter, Stragglers
from megaverl.monitoring.timeline import Timeline
from megaverl.planner.search import hardware_of
from megaverl.planner.simulator import MeasuredRate
from megaverl.platform import platform
from megaverl.trainer.build import Builder
from megaverl.trainer.job import (
    Job,
    Leaving,
    PreemptionHandler,
    Stages,
    kept_objects,
    reporter,
)
from megaverl.trainer.partial_rollouts import PARTIAL_FILE
from megaverl.trainer.program import begin_given, give_rollouts, take_given_step, train
from megaverl.trainer.replanning import Replanning
from megaverl.trainer.resuming import how_to_go_on
from megaverl.trainer.roles import make_roles
from megaverl.trainer.run_state import RunState
from megaverl.trainer.saving import (
    Records,
    Saving,
    export_draft,
    export_model,
    sample_records,
    settle_file,
    tokenizer_digest,
)
from megaverl.trainer.served_run import ServedRun
from megaverl.trainer.step_flow import training_operators
from megaverl.trainer.stored_rollouts import RolloutFolder, StoredRollouts
from megaverl.trainer.validation import Validation
from megaverl.trainer.waiting_samples import read_waiting
from megaverl.workers import RemoteWorker
from megaverl.workers.decisions import counts_from_state
from megaverl.workers.reward import Scores

ROLLOUT_FILE = "rollouts.safetensors"


class Trainer:
    """Reinforcement learning run on one rank, from a configuration to trained weights.

    Every rank creates one and calls `train`. The coordinator's rank runs the program of
    the run (`program.train`), and all ranks serve its calls.

    Args:
        job: this rank's place in the job.

    Attributes:
        next_step: next step of the run, counted from 0.
        measured: metrics of the last validation, or else of the last step, on ranks that have them.
        cut_off: samples of the next step, if the run resumed from a checkpoint inside a step.
        served: this rank's part in the programs of the run, once the run has begun.

    Example:
        trainer = Trainer(config, console, join_job(config, "train", console))
        metrics = trainer.train()
    """

    def __init__(
        self,
        config: Config,
        console: Console,
        job: Job,
        builder: Builder | None = None,
    ) -> None:
        self.config, self.console = config, console
        context = job.context
        rank, placement = context.rank, context.placement
        self.keeps_records = rank == reporter(placement)
        self.builder = builder = builder or Builder(config, context=context)
        self.run_dir = builder.config.run_dir
        self.records = Records(config, self.run_dir, console, keeps=self.keeps_records)
        held_out = (
            builder.dataset(config.data.validation) if config.data.validation else None
        )
        self.validation = Validation(config, held_out, self.records, console)
        self.prompts = builder.prompts()
        if self.prompts.losses:
            console.print(f"training prompts: {self.prompts.losses}")
        self.timeline = Timeline(rank)
        self.timeline.received, self.timeline.by_dimension = (
            received_bytes,
            by_dimension,
        )
        self.stages = Stages(self.timeline, job)
        self.profiler = Profiler(
            config.run.profile, self.run_dir, rank, self.timeline, console.warn
        )
        replay = config.trainer.replay_rollouts
        replayed = RolloutFolder(replay) if replay is not None else None
        self.stages.status("resume")
        # With separate role groups, the coordinator's rank decides on commits for all
        # ranks of the job.
        committer = Committer()
        if not placement.is_colocated:
            committer = Committer(context.control, placement.coordinator)
        self.saving = Saving(
            config, self.run_dir, self.stages.status, console, committer
        )
        self.stages.status("build")
        # The weights of trained roles come from the checkpoint, so the builder does not
        # read them from the model's folder.
        builder.resumes = self.saving.resumed_from is not None
        self.roles = make_roles(builder, context, generates=replayed is None)
        self.run_state = RunState(
            builder.config, self.roles, context, self.stages, console, replayed
        )
        self.step = self.run_state.step
        if note := self.roles.reward.reward.accuracy_note:
            console.print(note)
        for operator in self._stage_operators():
            if here := [role for role in operator.roles if context.has(role)]:
                # The timeline shows an operator of several roles under the last of its
                # roles on this rank.
                self.timeline.roles[operator.name] = here[-1]
        self.stragglers = self._stragglers()
        self.rate = self._rate(placement.size)
        if config.run.profile.steps:
            self.profiler.dims = self._named_groups()
        self.next_step = 0
        self.measured: dict[str, float] = {}
        self.served: ServedRun
        self.cut_off: StoredRollouts | None = None
        self.stored = (
            RolloutFolder(self.run_dir / "rollouts")
            if config.trainer.store_rollouts
            else None
        )
        self.leave = PreemptionHandler()
        self.replanning = Replanning(config, console, keeps=self.keeps_records)

    def _stage_operators(self) -> Iterator[Operator]:
        """Yield the operators whose names are stages of a step."""
        yield from self.run_state.flow.plan.operators
        if self.roles.agents:
            # The flow has one operator for all stages of an agent's training.
            yield from training_operators(self.step)

    def _named_groups(self) -> dict[tuple[int, ...], str]:
        """Return the names of this rank's process groups in its models' grids, by the groups' ranks.

        A group of all ranks has the key (). A name is a role and a dimension of its
        grid, such as "actor tp".
        """
        group_names: dict[tuple[int, ...], list[str]] = {}
        for role, trainable in self.roles.trained.items():
            # The same group may belong to several grids, and is shown with all of its
            # names.
            grid = trainable.model.grid
            for dim, ranks in grid.shape.groups_of(grid.rank).items():
                group_names.setdefault(
                    () if len(ranks) == grid.shape.world_size else ranks, []
                ).append(f"{role} {dim}")
        return {ranks: ", ".join(names) for ranks, names in group_names.items()}

    def _stragglers(self) -> Stragglers | None:
        """Create the straggler detection, or return None if `run.stragglers_every` is 0.

        Ranks are compared with each other if they have the same roles and the same
        pipeline stage of the actor.
        """
        if not (every := self.config.run.stragglers_every):
            return None
        context = self.run_state.context
        with together(context.control):
            meter = KernelMeter() if platform.is_cuda else ProcessorMeter(self.timeline)
        actor = self.roles.actor
        stage = None if isinstance(actor, RemoteWorker) else actor.model.grid.coords.pp
        return Stragglers(
            meter,
            f"{context.roles} {stage}",
            every,
            group=context.control,
            name=context.describe,
            log=self.console.warn,
        )

    def _rate(self, world: int) -> MeasuredRate | None:
        """Create the meter of the ranks' compute throughput.

        Without a GPU, the hardware's peak is known only from `run.hardware`.

        Returns:
            None on ranks that keep no records, and if the hardware cannot be determined.
        """
        if not self.keeps_records:
            return None
        known = platform.is_cuda or self.config.run.hardware is not None
        try:
            return MeasuredRate(
                self.config, world, hardware_of(self.config, world) if known else None
            )
        except MegaverlError as error:
            self.console.warn(f"train/mfu and its like are not measured: {error}")
            return None

    def train(self) -> dict[str, float]:
        """Run the remaining steps.

        Returns:
            Metrics of the last validation, or else of the last step.

        Raises:
            Leaving: the run was asked to leave, has saved, and can be started again.
        """
        with self.leave.listening(), kept_objects():
            self.resume()
            # The stored rollouts must cover all steps before the first of them is
            # trained on.
            if self.step.replayed is not None:
                with together(self.run_state.context.control):
                    self.step.replayed.check(
                        self.next_step,
                        self.config.trainer.steps,
                        self.config.samples_per_step,
                    )
            with self.recording():
                self.served = ServedRun(self)
                self.served.serve(lambda run: train(run, self.next_step))
                self.run_state.settle(self.records, self.run_dir)
            if self.config.checkpoint.export_hf:
                self.export()
        return self.measured

    def begin_step(self, step: int) -> None:
        """Start the meters of a step, counted from 0."""
        self.stages.step = step + 1
        self.profiler.begin(step + 1)
        if self.stragglers is not None:
            self.stragglers.begin(step)

    # --- loop driven by a Python program ------------------------------------------------------------------------------

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Open a loop that a Python program drives: restore a checkpoint if there is
        one, and sync the engine's weights.
        """
        self.resume()
        with self.leave.listening(), self.recording():
            self.served = ServedRun(self, is_given=True)
            self.served.serve(lambda run: begin_given(run, self.next_step))
            yield

    def rollouts(self) -> StoredRollouts:
        """Return responses to the next prompts. Nothing is scored or trained.

        They are generated now, unless the engines have generated them during the update
        before (`rollout.async_rollout`).

        Raises:
            Leaving: the run was asked to leave, and has saved with these responses. Where roles have ranks of their
                own, it leaves at the end of `update` instead.
        """
        step = self.next_step
        self.step.metrics = {}
        self.profiler.begin(step + 1)
        self.timeline.begin(step)
        self._enter(step)
        if not self.served.has_shared:
            self.served.serve(lambda run: give_rollouts(run, step))
        batch = self.served.take_shared()
        return self._stored(step, batch, None, self.step.measured(step))

    def update(self, rollouts: StoredRollouts) -> dict[str, float]:
        """Score and train on a step's responses, then validate and save if due.

        Returns:
            Metrics of the step, and of a validation after it, on every rank.

        Raises:
            Leaving: the run was asked to leave, and has saved after this step.
        """
        step = self.next_step
        self._enter(step)
        self.served.give(rollouts)
        self.served.serve(lambda run: take_given_step(run, step))
        done = self.next_step
        last_done, recorded = self.records.latest
        metrics = dict(recorded) if last_done == done else {}
        if done == self.config.trainer.steps and self.config.checkpoint.export_hf:
            self.export()
        return self.run_state.share(metrics)

    def _enter(self, step: int) -> None:
        """Note that this rank has come to a call of its Python program; others may not call it at all."""
        self.stages.step = step + 1
        self.stages.status("begin")

    def settle(self) -> None:
        """Wait for pending writes. Every rank calls this at the end of a loop that a Python program drives."""
        self.saving.settle()
        self.run_state.settle(self.records, self.run_dir)

    # --- after a step -------------------------------------------------------------------------------------------------

    def save_if_due(self, done: int) -> None:
        """Save a checkpoint if one is due after `done` steps. Collective over all ranks."""
        last = done == self.config.trainer.steps
        is_best = self.validation.best.step == done
        if self.saving.is_due(done, last=last, is_best=is_best):
            self._save(done, best=is_best, wait=last)

    def report(self, done: int) -> dict[str, float]:
        """Write and display the metrics of the last completed step, with some of its samples.

        Returns:
            The metrics on ranks that have them, otherwise an empty dictionary.
        """
        trainer, measured = self.config.trainer, self.run_state.measured(done)
        slow = self.stragglers.compare(done) if self.stragglers is not None else {}
        if measured is not None:
            # The reward functions define no correct response, so an accuracy would be
            # meaningless.
            if not self.roles.reward.reward.has_accuracy:
                measured.metrics.pop("reward/accuracy", None)
            measured.metrics.update(
                slow | self.replanning.look(done, measured.metrics, measured.rollouts)
            )
            if self.rate is not None:
                seconds = measured.metrics["train/step_time_ms"] / 1e3
                measured.metrics.update(
                    self.rate.metrics(
                        sequence_lengths(measured.rollouts).lengths, seconds
                    )
                )
            self.records.log(done, measured.metrics)
            if self.keeps_records:
                samples = sample_records(
                    measured.rollouts,
                    measured.scores,
                    self.roles.reward,
                    trainer.save_samples,
                )
                self.records.log_samples(done, samples)
            self.console.step(done, trainer.steps, measured.metrics)
        if self.stored is not None:
            with together(self.run_state.context.control):
                if measured is not None and self.keeps_records:
                    self.stored.append(
                        self._stored(
                            done - 1,
                            measured.rollouts,
                            measured.scores,
                            measured.metrics,
                        )
                    )
        return measured.metrics if measured is not None else {}

    def leave_run(
        self, signal: str, rollouts: RolloutBatch | None, scores: Scores | None
    ) -> Leaving:
        """Save a checkpoint with the samples of the running step. Collective over all ranks.

        Args:
            signal: name of the signal that asked the run to leave.
            rollouts, scores: samples of the running step, as far as they exist.

        Returns:
            The exception with which every rank leaves.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        cut_off = None
        if rollouts is not None:
            # A checkpoint holds all samples, while this rank may hold only its own
            # rows.
            whole = whole_on(rollouts, 0)
            measured = self.step.measured(self.next_step)
            cut_off = self._stored(self.next_step, whole, scores, measured)
        # A run that has trained nothing has no checkpoint to write. A second start
        # loses nothing.
        nothing_yet = self.next_step == 0 and cut_off is None
        progress = "nothing was trained yet"
        if not nothing_yet:
            if not self._save(self.next_step, wait=True, cut_off=cut_off):
                raise CheckpointError(
                    f"{signal}: the run leaves, and could not save before."
                )
            inside = f", inside step {self.next_step + 1}" if cut_off else ""
            progress = f"saved after {self.next_step} of {self.config.trainer.steps} steps{inside}"
        code, advice = how_to_go_on(self.config, has_saved=not nothing_yet)
        return Leaving(f"{signal}: {progress}; {advice}", code)

    def _stored(
        self,
        step: int,
        rollouts: RolloutBatch,
        scores: Scores | None,
        metrics: Mapping[str, float],
    ) -> StoredRollouts:
        """Return the samples of a step so far, with the metrics that describe them."""
        # Other metrics belong to training and are measured when the step is repeated.
        measured = {
            k: v for k, v in metrics.items() if k.startswith(("rollout/", "reward/"))
        }
        version = self.roles.sync.weight_version if self.roles.sync else 0
        return StoredRollouts(step, version, rollouts, scores, measured)

    # --- records and checkpoints --------------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Open the records for the remaining steps, and write the timeline at the end."""
        # A resumed run repeats steps after its checkpoint and stores their rollouts
        # again.
        if self.keeps_records and self.stored is not None:
            self.stored.forget(self.next_step)
        try:
            with self.records.opened(self.next_step):
                yield
        # Every rank raises a MegaverlError. A checkpoint of an earlier step is then
        # written completely and only needs its commit.
        except MegaverlError:
            self.saving.commit_written()
            raise
        finally:  # also after a failure
            self.profiler.close()
            self.run_state.write_timeline(self.records, self.run_dir)

    def export(self) -> None:
        """Write the trained models as Hugging Face folders."""
        self.stages.status("export")
        models, folder = self.run_state.exported, self.run_dir / "hf"
        for name, model in models.items():
            export_model(model, self.builder, folder / name)
        if "" in models:
            self.console.print(f"model written to {folder}")
        elif models:
            self.console.print(f"models written to {folder}: {', '.join(models)}")
        if (draft := self.roles.draft) is not None:
            draft_folder = folder.with_name("hf_draft")
            export_draft(draft.model, self.builder, draft_folder, actor_folder=folder)
            self.console.print(f"draft model written to {draft_folder}")

    def _save(
        self,
        done: int,
        *,
        best: bool = False,
        wait: bool = False,
        cut_off: StoredRollouts | None = None,
    ) -> bool:
        files = {ROLLOUT_FILE: cut_off.write} if cut_off else {}
        with self.stages("checkpoint"):
            return self.saving.save(
                done,
                self.run_state.saved,
                self._state(cut_off),
                wait=wait,
                best=best,
                inside=cut_off is not None,
                files=files,
                own_files=self.run_state.own_files(),
            )

    def _state(self, cut_off: StoredRollouts | None) -> dict[str, Any]:
        sync, in_flight = self.roles.sync, self.roles.in_flight
        of_reporter = {
            "next_step": self.next_step,
            "steps": self.config.trainer.steps,
            "kl": self.roles.kl_state(),
            "tokenizer": tokenizer_digest(self.builder.tokenizer),
            "best": self.validation.state_dict(),
            "metrics_bytes": settle_file(self.run_dir / "metrics.jsonl")
            if self.keeps_records
            else 0,
            "cut_off": cut_off.facts() if cut_off else None,
        }
        of_engines = {
            "weight_version": sync.weight_version if sync else 0,
            "generation_budget": in_flight.budget
            if in_flight and in_flight.measures
            else None,
            "partial_groups": len(self.step.in_progress.groups)
            if self.step.in_progress is not None
            else 0,
            "sampler": self.prompts.state_dict(),
        }
        return self.run_state.collect(of_reporter, of_engines)

    def resume(self) -> None:
        """Restore the checkpoint if there is one, then send the actor's weights to the engines."""
        self.stages.status("resume")
        sync, path = self.roles.sync, self.saving.resumed_from
        state: dict[str, Any] | None = None
        notes: list[str] = []
        if path is not None:
            # The engine may share tensors with the actor, so loading a checkpoint makes
            # the engine's weights inconsistent.
            if sync is not None:
                sync.source_changes()
            path, state = self.saving.resume(
                self.run_state.trained, "train", self.builder.tokenizer
            )
            notes = self._take_up(path, state)
        if sync is not None:
            sync.reshard()
        if self.roles.draft_sync is not None:
            self.roles.draft_sync.reshard()
        if sync is not None and state is not None:
            # Weight versions count over the whole run, because tokens of restored
            # samples refer to them.
            sync.weight_version = int(state["weight_version"]) or sync.weight_version
            if (in_flight := self.roles.in_flight) is not None and in_flight.measures:
                in_flight.budget = state.get("generation_budget")
        self.step.newest_version = (int(state["weight_version"]) if state else 0) or 1
        self.run_state.prepare_updates(
            counts_from_state(state["coordinator"]) if state else {}, path
        )
        if path is not None:
            inside = (
                f", and step {self.next_step + 1} goes on after its rollout"
                if self.cut_off
                else ""
            )
            total = self.config.trainer.steps
            self.saving.report_resumed(
                self.next_step, total, inside, self.run_state.trained
            )
            for note in notes:
                self.console.print(note)

    def _take_up(self, path: Path, state: dict[str, Any]) -> list[str]:
        """Restore the trainer's own state from a checkpoint. Return notes to show to the user."""
        self.prompts.load_state_dict(state["sampler"], int(state["next_step"]))
        self.roles.load_kl_state(state["kl"])
        self.next_step = int(state["next_step"])
        notes = [*self.prompts.notes, *self._take_up_best(state["best"])]
        for role, trainable in self.run_state.trained.items():
            if moved := self.saving.changed.moved_updates(
                self.config, self.next_step, role
            ):
                trainable.move_schedule(moved)
        self.saving.note_resumed(self.next_step, inside=state["cut_off"] is not None)
        if self.step.replayed is None:
            with together():
                if state["cut_off"] is not None:
                    self.cut_off = StoredRollouts.read(
                        path / ROLLOUT_FILE, state["cut_off"]
                    )
                if state.get("partial_groups"):
                    self._take_up_partial(path, int(state["partial_groups"]))
                if self.run_state.makes_samples:
                    self.step.waiting = read_waiting(path, state.get("ahead", ()))
            notes += self._settle_samples()
        written = self.run_dir / "metrics.jsonl"
        # Only a checkpoint of this run folder refers to this file. A resume from
        # another run starts a new file.
        if (
            self.keeps_records
            and path.parent.parent == self.run_dir
            and settle_file(written) < state["metrics_bytes"]
        ):
            self.console.warn(
                f"{written} holds less than when {path.name} was saved ({state['metrics_bytes']} bytes then): "
                "the steps that are missing there will stay so"
            )
        return notes

    def _take_up_best(self, best: Mapping[str, Any]) -> list[str]:
        """Restore the best validation so far, unless the validation's prompts or metric have changed. Return notes."""
        measure = (
            "trainer.best_metric",
            "trainer.validation_",
            "data.validation",
            "reward",
        )
        changed = [
            change.key
            for change in self.saving.changed.changes
            if change.key.startswith(measure)
        ]
        if changed:
            return [
                f"the best validation so far is forgotten: {', '.join(changed)} changed what is best"
            ]
        # None in a checkpoint without held-out prompts, or of an older version.
        measured_on = best.get("data")
        if measured_on is not None and measured_on != self.validation.data_digest:
            return [
                "the best validation so far is forgotten: the rows of data.validation have changed"
            ]
        self.validation.load_state_dict(best)
        return []

    def _settle_samples(self) -> list[str]:
        """Keep or restart samples of the checkpoint that were generated under other generation settings. Return notes.

        Complete responses are trained on with the settings that they were drawn with.
        Unfinished responses restart from their prompts, because their remaining tokens
        would come from another distribution than their first ones.
        """
        before, changed = (
            self.saving.changed.before,
            self.saving.changed.generated_otherwise,
        )
        if before is None or not changed:
            return []
        notes = []
        sampling = before["rollout"]["sampling"]
        keys = ", ".join(change.key for change in changed)
        steps = set(self.step.waiting)
        if self.cut_off is not None:
            self.cut_off = self.cut_off.drawn_with(sampling)
            steps.add(self.cut_off.step)
        self.step.waiting = {
            step: stored.drawn_with(sampling)
            for step, stored in self.step.waiting.items()
        }
        if steps:
            numbers = ", ".join(str(step + 1) for step in sorted(steps))
            notes.append(
                f"responses of step {numbers} are trained on as they were generated before {keys} changed"
            )
        if self.step.in_progress is not None and self.step.in_progress.groups:
            self.step.in_progress.restart()
            count = len(self.step.in_progress.groups)
            notes.append(
                f"{count} unfinished groups of responses begin anew from their prompts: {keys} changed"
            )
        return notes

    def _take_up_partial(self, path: Path, number: int) -> None:
        """Restore the responses that were unfinished when a checkpoint was saved.

        Args:
            number: groups of responses in progress in the checkpoint.

        Raises:
            CheckpointError: the run has neither `rollout.partial` nor `rollout.in_flight_updates`.
        """
        if self.step.in_progress is None:
            raise CheckpointError(
                f"{path}: holds {number} unfinished groups of responses. Only a run with rollout.partial or "
                "rollout.in_flight_updates can continue them. Set the key again (partial.over_sample: 1 makes the "
                "groups fewer), or give this run a name of its own (run.name)."
            )
        self.step.in_progress.read(path / PARTIAL_FILE)
