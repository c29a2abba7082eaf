"""Trainers without generation: supervised fine-tuning, preference optimization and reward models.

They share a loop with one optimizer step on the rows of a data set, checkpoints and exact resume. `SFTTrainer` trains
on prompt/answer pairs, also as a warm-up for RL. `PreferenceTrainer` (`megaverl dpo`) and `RewardModelTrainer`
(`megaverl reward`) train on pairs of responses.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megaverl.config import Config
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.roles import ActorConfig, RewardModelConfig
from megaverl.config.run import PreferenceConfig, SFTConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptDataset, PromptRecord
from megaverl.data.preferences import PreferenceColumns, PreferenceReader
from megaverl.data.prompts import PromptEncoder
from megaverl.data.sources import Entry
from megaverl.distributed.collectives import together
from megaverl.errors import DataError, MegaverlError
from megaverl.monitoring.console import Console
from megaverl.monitoring.profiler import Profiler
from megaverl.monitoring.timeline import Timeline, memory_metrics
from megaverl.rollout.engine import Generation
from megaverl.trainer.build import Builder
from megaverl.trainer.job import Job, Leaving, PreemptionHandler, Stages, kept_objects
from megaverl.trainer.resuming import GoingOn
from megaverl.trainer.saving import (
    Records,
    Saving,
    export_classifier,
    export_model,
    settle_file,
    tokenizer_digest,
)
from megaverl.trainer.trainer_engines import make_trainable
from megaverl.workers.micro_batches import Weighting, cross_entropy, run_updates
from megaverl.workers.model import TrainingModel
from megaverl.workers.pairs import PreferenceUpdates, RewardModelUpdates, of_single_responses
from megaverl.workers.responses import rollout_batch
from megaverl.workers.trainable import TrainableModel


def with_longest(config: Config, longest: int | None) -> Config:
    """Return the configuration with the maximum response length of a stage, for a `Builder`.

    Args:
        longest: maximum tokens of a response in the rows, or None to keep the limit of generated responses.
    """
    if longest is None:
        return config
    sampling = {**config.rollout.sampling, "max_tokens": longest}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"sampling": sampling})})


def with_optimizer(
    builder: Builder, model: TrainingModel, role: ActorConfig | RewardModelConfig, stage: SFTConfig | PreferenceConfig
) -> TrainableModel:
    """Create the optimizer of a model with the learning rate, schedule and number of steps of a stage."""
    schedule = {"lr_decay_style": stage.lr_decay_style, "lr_warmup_steps": stage.lr_warmup_steps}
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
    """

    name: str  # name of the stage, in metrics and checkpoints
    trained: dict[str, TrainableModel]
    validate_every = 0

    def __init__(
        self,
        config: Config,
        builder: Builder,
        console: Console,
        job: Job | None,
        stage: SFTConfig | PreferenceConfig,
        sources: Sequence[Entry],
    ) -> None:
        self.config, self.builder, self.console = config, builder, console
        self.steps, self.is_first = stage.steps, dist.get_rank() == 0
        self.stages = Stages(Timeline(dist.get_rank()), job)
        timeline = self.stages.timeline
        self.profiler = Profiler(config.run.profile, builder.config.run_dir, timeline.rank, timeline, console.warn)
        self.data = self.dataset(sources)
        self.sampler = self.data.sampler(stage.batch_size, config.run.seed, shuffle=config.data.shuffle)
        self.saving = Saving(config, builder.config.run_dir, self.stages.status, console)
        builder.resumes = self.saving.resumed_from is not None
        self.leave = PreemptionHandler()
        self.records = Records(config, builder.config.run_dir, console, keeps=self.is_first)
        self.next_step = 0

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
            return self._train()

    def _train(self) -> dict[str, float]:
        self._resume()
        result: dict[str, float] = {}
        try:
            with self.records.opened(self.next_step):
                for step in range(self.next_step, self.steps):
                    result = self._after(step + 1, self._measured_step(step))
        # Every rank raises a MegaverlError. A checkpoint of an earlier step is then written completely and only needs
        # its commit.
        except MegaverlError:
            self.saving.commit_written()
            raise
        finally:
            self.profiler.close()
            if self.is_first:
                self.records.aside(lambda: self.stages.timeline.export(self.builder.config.run_dir / "timeline.json"))
        if self.config.checkpoint.export_hf:
            self.stages.status("export")
            self.export(self.builder.config.run_dir / "hf")
            self.console.print(f"model written to {self.builder.config.run_dir / 'hf'}")
        return result

    def _measured_step(self, step: int) -> dict[str, float]:
        self.stages.step = step + 1
        self.profiler.begin(step + 1)
        start = time.perf_counter()
        with self.stages(self.name):
            found = self.one_step([self.data[i] for i in self.sampler.indices(step)], step)
        self.profiler.end(step + 1)
        self.next_step = step + 1
        metrics = {f"{self.name}/{name}": value for name, value in found.items()}
        metrics[f"{self.name}/step_time_ms"] = (time.perf_counter() - start) * 1e3
        return metrics | memory_metrics("actor")

    def _after(self, done: int, metrics: dict[str, float]) -> dict[str, float]:
        last = done == self.steps
        validated: dict[str, float] = {}
        if last or (self.validate_every and done % self.validate_every == 0):
            with self.stages("validation"):
                validated = {f"validation/{name}": value for name, value in self.validate().items()}
        self.records.log(done, metrics | validated)
        shown = {"loss", "accuracy", "preference_accuracy", "margin"}
        text = [f"{n.rpartition('/')[2]} {v:.4f}" for n, v in metrics.items() if n.rpartition("/")[2] in shown]
        text += [f"{name} {value:.4f}" for name, value in validated.items()]
        self.console.print(f"step {done}/{self.steps}  " + "  ".join(text))
        self.saving.look()
        if self.saving.is_due(done, last=last, is_best=False):
            self._save(done, wait=last)
        if not last and (signal := self.leave.agreed()):
            self._save(done, wait=True)
            going_on = GoingOn.of(self.config, has_saved=True)
            raise Leaving(f"{signal}: saved after {done} of {self.steps} steps; {going_on.advice}", going_on.code)
        return validated or metrics

    def _save(self, done: int, *, wait: bool) -> None:
        state = {
            "stage": self.name,
            "next_step": done,
            "steps": self.steps,
            "sampler": self.sampler.state_dict(),
            "tokenizer": tokenizer_digest(self.builder.tokenizer),
            "metrics_bytes": settle_file(self.builder.config.run_dir / "metrics.jsonl") if self.is_first else 0,
        }
        with self.stages("checkpoint"):
            self.saving.save(done, self.trained, state, wait=wait, best=False, inside=False, files={})

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


VALIDATION_PAIRS = 256  # pairs in one batch


class PairTrainer(OfflineTrainer):
    """Base of the trainers on pairs of responses."""

    updates: PreferenceUpdates | RewardModelUpdates

    def __init__(
        self, config: Config, builder: Builder, console: Console, job: Job | None = None, *, pairs_only: bool = True
    ) -> None:
        preference = config.preference
        self.reader = PreferenceReader(
            builder.encoder(),
            PreferenceColumns.of(preference),
            max_tokens=preference.max_response_tokens or int(config.rollout.sampling["max_tokens"]),
            pairs_only=pairs_only,
        )
        super().__init__(config, builder, console, job, preference, preference.train)
        self.validate_every = preference.validate_every
        self.held_out = self.dataset(preference.validation) if preference.validation else None

    def dataset(self, sources: Sequence[Entry]) -> PromptDataset:
        dataset = self.builder.dataset(sources, needs_answer=False)
        with together():
            self.reader.check(dataset)
        return dataset

    def one_step(self, records: list[PromptRecord], step: int) -> dict[str, float]:
        return self.updates.update(self.reader.batch(records))

    def validate(self) -> dict[str, float]:
        if self.held_out is None:
            return {}
        total: dict[str, float] = {}
        for start in range(0, len(self.held_out), VALIDATION_PAIRS):
            rows = range(start, min(start + VALIDATION_PAIRS, len(self.held_out)))
            found = self.updates.evaluate(self.reader.batch([self.held_out[i] for i in rows]))
            total = {name: total.get(name, 0.0) + value * len(rows) for name, value in found.items()}
        return {name: value / len(self.held_out) for name, value in total.items()}


class PreferenceTrainer(PairTrainer):
    """Trainer of the actor on pairs with DPO, IPO, KTO, SimPO or ORPO, and a frozen reference for losses with one."""

    name = "dpo"

    def __init__(self, config: Config, builder: Builder, console: Console, job: Job | None = None) -> None:
        preference, actor = config.preference, config.actor
        super().__init__(config, builder, console, job, pairs_only=not of_single_responses(preference.loss))
        model = builder.model(actor, "actor", trained=actor.lora is None)
        policy = with_optimizer(builder, model, actor, preference)
        self.trained = {"actor": policy}
        self.updates = PreferenceUpdates(
            policy,
            preference.loss,
            preference.options,
            builder.reference(model) if config.preference_needs_reference else None,
            micro_batch_tokens=actor.micro_batch_tokens,
        )

    def export(self, folder: Path) -> None:
        export_model(self.updates.model, self.builder, folder)


class RewardModelTrainer(PairTrainer):
    """Trainer of a reward model: a sequence classifier with one label that ranks the responses of a pair
    (Bradley-Terry).
    """

    name = "reward_model"

    def __init__(self, config: Config, builder: Builder, console: Console, job: Job | None = None) -> None:
        super().__init__(config, builder, console, job)
        section = config.reward_model
        fresh = section.lora is None
        model = builder.model(section, "reward_model", path=section.path, value_head=1, trained=fresh)
        classifier = with_optimizer(builder, model, section, config.preference)
        self.trained = {"reward_model": classifier}
        self.updates = RewardModelUpdates(
            classifier, section.loss, section.options, micro_batch_tokens=section.micro_batch_tokens
        )

    def export(self, folder: Path) -> None:
        export_classifier(self.updates.model, self.builder, folder, path=self.config.reward_model.path)


class AnswerUpdates:
    """Actor's model with optimizer steps on the cross-entropy of answer tokens, given the prompts."""

    def __init__(self, config: Config, builder: Builder) -> None:
        self.config, self.encoder = config, builder.encoder()
        self.algorithm, self.seed = AlgorithmConfig(), config.run.seed
        self.micro_batch_tokens = config.actor.micro_batch_tokens
        self.model = builder.model(config.actor, "actor", trained=config.actor.lora is None)
        self.trainable = with_optimizer(builder, self.model, config.actor, config.sft)

    def update(self, records: Sequence[PromptRecord], step: int) -> dict[str, float]:
        """Run one optimizer step on these pairs. Collective over all ranks."""
        return run_updates(
            self,
            answers_batch(self.config, self.encoder, records),
            cross_entropy(self.model),
            weighting=Weighting("token_mean"),
            fields={},
            step=step,
        )


class SFTTrainer(OfflineTrainer):
    """Trainer of `megaverl sft`. Every rank creates one and calls `train`."""

    name = "sft"

    def __init__(self, config: Config, builder: Builder, console: Console, job: Job | None = None) -> None:
        super().__init__(config, builder, console, job, config.sft, answer_sources(config))
        self.updates = AnswerUpdates(config, builder)
        self.trained = {"actor": self.updates.trainable}

    def dataset(self, sources: Sequence[Entry]) -> PromptDataset:
        dataset, encoder = self.builder.dataset(sources), self.builder.encoder()
        with together():  # an invalid answer ends the run before it starts
            for number in range(len(dataset)):
                answer_tokens(self.config, encoder, dataset[number])
        return dataset

    def one_step(self, records: list[PromptRecord], step: int) -> dict[str, float]:
        return self.updates.update(records, step)

    def export(self, folder: Path) -> None:
        export_model(self.updates.model, self.builder, folder)


def warm_up(config: Config, builder: Builder, console: Console) -> TrainingModel:
    """Run all steps of `sft` without saving or recording anything. Return the model that RL starts from."""
    sft = config.sft
    data = builder.dataset(answer_sources(config))
    sampler = data.sampler(sft.batch_size, config.run.seed, shuffle=config.data.shuffle)
    updates = AnswerUpdates(config, builder)
    with console.progress("supervised warm-up", sft.steps) as advance:
        for step in range(sft.steps):
            updates.update([data[i] for i in sampler.indices(step)], step)
            advance(1)
    return updates.model


def answer_sources(config: Config) -> Sequence[Entry]:
    """Return the sources of prompts with answers."""
    return config.sft.train or config.data.train


def answers_batch(config: Config, encoder: PromptEncoder, records: Sequence[PromptRecord]) -> RolloutBatch:
    """Return pairs as a batch whose responses are the reference answers.

    Raises:
        DataError: an answer is not text or is too long. The message names the row.
    """
    answers = [answer_tokens(config, encoder, record) for record in records]
    generations = [Generation(tokens, [0.0] * len(tokens), "stop") for tokens in answers]
    return rollout_batch(records, generations, list(range(len(records))))


def answer_tokens(config: Config, encoder: PromptEncoder, record: PromptRecord) -> list[int]:
    """Return the tokens of a row's answer, including the end of sequence.

    Raises:
        DataError: the answer is not text or is too long. The message names the row.
    """
    limit = config.sft.max_answer_tokens or int(config.rollout.sampling["max_tokens"])
    if not isinstance(record.reference, str):
        raise DataError(
            f"{record.where}: the answer is {type(record.reference).__name__}, and fine-tuning needs text. "
            "Name the right column with data.answer_key."
        )
    tokens = encoder.encode_answer(record.reference)
    if len(tokens) > limit:
        raise DataError(
            f"{record.where}: the answer is {len(tokens)} tokens long, and at most {limit} are allowed. "
            "Raise sft.max_answer_tokens, or shorten the row."
        )
    return tokens
