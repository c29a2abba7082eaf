"""Training on the rows of a data set, without generation: the program, and the base of its trainers.

    train_on_rows                the program, on the coordinator's rank
      take_step, validate        one optimizer step on the rows of a step; metrics of held-out rows
      report_step, save_if_due   what follows a step

`supervised.SFTTrainer` trains on prompt/answer pairs. `preferences.PreferenceTrainer`
(`megaverl dpo`) and `preferences.RewardModelTrainer` (`megaverl reward`) train on pairs
of responses.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from signal import Signals

import torch.distributed as dist

from megaverl.config import Config
from megaverl.config.roles import ActorConfig, RewardModelConfig
from megaverl.config.run import PreferenceConfig, SFTConfig
from megaverl.controller.core import Controller
from megaverl.controller.groups import WorkerGroup, remote
from megaverl.data.datasets import PromptDataset, PromptRecord
from megaverl.data.sources import Entry
from megaverl.distributed.traffic import by_dimension, received_bytes
from megaverl.errors import MegaverlError
from megaverl.monitoring.console import Console
from megaverl.monitoring.profiler import Profiler
from megaverl.monitoring.timeline import Timeline, memory_metrics
from megaverl.trainer.build import Builder
from megaverl.trainer.job import (
    Job,
    Leaving,
    PreemptionHandler,
    Stages,
    kept_objects,
)
from megaverl.trainer.resuming import how_to_go_on
from megaverl.trainer.saving import Records, Saving, settle_file, tokenizer_digest
from megaverl.trainer.serving import serve_program
from megaverl.trainer.trainer_engines import make_trainable
from megaverl.workers.model import TrainingModel
from megaverl.workers.trainable import TrainableModel


async def train_on_rows(
    trainers: TrainerGroup, first_step: int, num_steps: int, validate_every: int
) -> None:
    """Run the remaining steps. After each step, validate, save or leave if that is due.

    Args:
        trainers: all ranks of the job. They hold one model.
        first_step: number of steps completed before this start.
        validate_every: number of steps between validations, or 0 for one at the end only.
    """
    for step in range(first_step, num_steps):
        done = step + 1
        is_last = done == num_steps
        trainers.take_step(step)
        if is_last or (validate_every and done % validate_every == 0):
            trainers.validate()
        trainers.report_step(done)
        await trainers.save_if_due(done)
        signal = trainers.signal
        if signal and not is_last:
            await trainers.leave(signal, done)
            return


class TrainerGroup(WorkerGroup):
    """All ranks of a job that trains one model on a data set."""

    @remote
    def take_step(self, step: int) -> None:
        """Run one optimizer step on the rows of a step, counted from 0."""

    @remote
    def validate(self) -> None:
        """Measure the model on the held-out rows, if there are any."""

    @remote
    def report_step(self, done: int) -> None:
        """Write and display the metrics of the last of `done` steps, and of a validation after it."""

    @remote
    def save_if_due(self, done: int) -> None:
        """Save a checkpoint if `checkpoint.save_every` asks for one after `done` steps, and after the last step."""

    @remote
    def leave(self, signal: int, done: int) -> None:
        """Save a checkpoint after `done` steps. Every rank exits when the program has ended.

        Args:
            signal: number of the signal that asked the run to leave.
        """

    @property
    def signal(self) -> int:
        """Number of the signal that asked a rank to leave the run, or 0."""
        return self._controller.signal


def with_optimizer(
    model: TrainingModel,
    role: ActorConfig | RewardModelConfig,
    stage: SFTConfig | PreferenceConfig,
) -> TrainableModel:
    """Create the optimizer of a model with the learning rate, schedule and number of steps of a stage."""
    schedule = {
        "lr_decay_style": stage.lr_decay_style,
        "lr_warmup_steps": stage.lr_warmup_steps,
    }
    role = role.model_copy(update={"scheduler": schedule})
    return make_trainable(model, role, {**role.optimizer, "lr": stage.lr}, stage.steps)


class OfflineTrainer(ABC):
    """Base of the trainers on a data set. Every rank creates one and calls `train`.

    Subclasses define the trained models, and what a step does.

    Args:
        stage: settings of the stage, such as steps and batch size.
        sources: paths of the rows, or entries of `data.train`.

    Attributes:
        trained: models that a checkpoint contains, by role. A subclass creates them after this constructor, which
            decides whether the run resumes.
        validate_every: number of steps between validations, or 0 for one at the end only.
        leaving: exception to raise on every rank after the program, if the run was left before its end.
        result: metrics of the last validation, or else of the last step.
    """

    name: str  # name of the stage, in metrics and checkpoints
    role = "actor"  # role of the trained model
    trained: dict[str, TrainableModel]
    validate_every = 0

    def __init__(
        self,
        config: Config,
        builder: Builder,
        console: Console,
        job: Job,
        stage: SFTConfig | PreferenceConfig,
        sources: Sequence[Entry],
    ) -> None:
        self.config, self.builder, self.console = config, builder, console
        self.steps, self.is_first = stage.steps, dist.get_rank() == 0
        self.run_dir = builder.config.run_dir
        self.stages = Stages(Timeline(dist.get_rank()), job)
        timeline = self.stages.timeline
        timeline.received, timeline.by_dimension = received_bytes, by_dimension
        timeline.roles[self.name] = self.role
        self.profiler = Profiler(
            config.run.profile, self.run_dir, timeline.rank, timeline, console.warn
        )
        self.data = self.dataset(sources)
        self.sampler = self.data.sampler(
            stage.batch_size, config.run.seed, shuffle=config.data.shuffle
        )
        self.saving = Saving(config, self.run_dir, self.stages.status, console)
        # The checkpoint provides the weights, so the builder does not read them from
        # the model's folder.
        builder.resumes = self.saving.resumed_from is not None
        self.leave = PreemptionHandler()
        self.records = Records(config, self.run_dir, console, keeps=self.is_first)
        self.next_step = 0
        self.leaving: Leaving | None = None
        self.result: dict[str, float] = {}

    @abstractmethod
    def dataset(self, sources: Sequence[Entry]) -> PromptDataset:
        """Load and check the rows of sources."""

    @abstractmethod
    def one_step(self, records: list[PromptRecord], step: int) -> dict[str, float]:
        """Run one optimizer step on these rows. Return its metrics."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the trained model as a Hugging Face folder."""

    def validate(self) -> dict[str, float]:
        """Return metrics on held-out rows, or an empty dictionary without held-out rows."""
        return {}

    def train(self) -> dict[str, float]:
        """Run the remaining steps.

        Returns:
            Metrics of the last validation, or else of the last step.

        Raises:
            Leaving: the run was asked to leave, has saved, and can be started again.
        """
        with self.leave.listening(), kept_objects():
            self._resume()
            self._run_steps()
            if self.config.checkpoint.export_hf:
                self.stages.status("export")
                self.export(self.run_dir / "hf")
                self.console.print(f"model written to {self.run_dir / 'hf'}")
        return self.result

    def _run_steps(self) -> None:
        """Serve the program of the run until it ends."""

        async def program(controller: Controller) -> None:
            trainers = TrainerGroup("trainer", range(controller.num_ranks), controller)
            await train_on_rows(
                trainers, self.next_step, self.steps, self.validate_every
            )

        try:
            with self.records.opened(self.next_step):
                serve_program(
                    program,
                    {"trainer": TrainerWorker(self)},
                    config=self.config,
                    stages=self.stages,
                    leave=self.leave,
                    console=self.console,
                )
                if self.leaving is not None:
                    raise self.leaving
        # Every rank raises a MegaverlError. A checkpoint of an earlier step is then
        # written completely and only needs its commit.
        except MegaverlError:
            self.saving.commit_written()
            raise
        finally:
            self.profiler.close()
            if self.is_first:
                self.records.aside(
                    lambda: self.stages.timeline.export(self.run_dir / "timeline.json")
                )

    def save(self, done: int, *, wait: bool) -> None:
        """Save a checkpoint after `done` steps. Collective over all ranks.

        Args:
            wait: whether to return only when it is committed.
        """
        state = {
            "stage": self.name,
            "next_step": done,
            "steps": self.steps,
            "sampler": self.sampler.state_dict(),
            "tokenizer": tokenizer_digest(self.builder.tokenizer),
            "metrics_bytes": settle_file(self.run_dir / "metrics.jsonl")
            if self.is_first
            else 0,
        }
        with self.stages("checkpoint"):
            self.saving.save(
                done, self.trained, state, wait=wait, best=False, inside=False, files={}
            )

    def _resume(self) -> None:
        """Load the checkpoint that the run resumes from, if there is one."""
        if self.saving.resumed_from is None:
            return
        self.stages.status("resume")
        _, state = self.saving.resume(self.trained, self.name, self.builder.tokenizer)
        self.sampler.check_state(state["sampler"])
        self.next_step = int(state["next_step"])
        self.saving.note_resumed(self.next_step, inside=False)
        self.saving.report_resumed(self.next_step, self.steps, "", self.trained)


class TrainerWorker:
    """Worker of one rank: the methods that `TrainerGroup` calls."""

    def __init__(self, trainer: OfflineTrainer) -> None:
        self._trainer = trainer
        self._metrics: dict[str, float] = {}  # of the last step
        self._validated: dict[str, float] = {}  # of a validation after it

    def take_step(self, step: int) -> None:
        """Run one optimizer step on the rows of a step, and measure it."""
        trainer = self._trainer
        trainer.stages.step = step + 1
        trainer.profiler.begin(step + 1)
        start = time.perf_counter()
        timeline = trainer.stages.timeline
        with timeline.step(step + 1), trainer.stages(trainer.name):
            records = [trainer.data[row] for row in trainer.sampler.indices(step)]
            measured = trainer.one_step(records, step)
        trainer.profiler.end(step + 1)
        trainer.next_step = step + 1
        self._metrics = {
            f"{trainer.name}/{name}": value for name, value in measured.items()
        }
        self._metrics[f"{trainer.name}/step_time_ms"] = (
            time.perf_counter() - start
        ) * 1e3
        received = {
            name: value
            for name, value in timeline.step_metrics().items()
            if name.startswith("comm/")
        }
        self._metrics |= received | memory_metrics("actor")
        self._validated = {}

    def validate(self) -> None:
        """Measure the model on the held-out rows."""
        with self._trainer.stages("validation"):
            measured = self._trainer.validate()
        self._validated = {
            f"validation/{name}": value for name, value in measured.items()
        }

    def report_step(self, done: int) -> None:
        """Write and display the metrics of a step."""
        trainer = self._trainer
        trainer.records.log(done, self._metrics | self._validated)
        shown = {"loss", "accuracy", "preference_accuracy", "margin"}
        values = {
            name.rpartition("/")[2]: value for name, value in self._metrics.items()
        }
        text = [
            f"{name} {value:.4f}" for name, value in values.items() if name in shown
        ]
        text += [f"{name} {value:.4f}" for name, value in self._validated.items()]
        trainer.console.print(f"step {done}/{trainer.steps}  " + "  ".join(text))
        trainer.result = self._validated or self._metrics

    def save_if_due(self, done: int) -> None:
        """Save a checkpoint if one is due, and commit an earlier one that has been written."""
        trainer = self._trainer
        is_last = done == trainer.steps
        trainer.saving.look()
        if trainer.saving.is_due(done, last=is_last, is_best=False):
            # After the last step there is no further work that could overlap the write.
            trainer.save(done, wait=is_last)

    def leave(self, signal: int, done: int) -> None:
        """Save a checkpoint, and note that the run leaves."""
        trainer = self._trainer
        # The process ends next, so the checkpoint must be committed first.
        trainer.save(done, wait=True)
        code, advice = how_to_go_on(trainer.config, has_saved=True)
        name = Signals(signal).name
        trainer.leaving = Leaving(
            f"{name}: saved after {done} of {trainer.steps} steps; {advice}", code
        )
