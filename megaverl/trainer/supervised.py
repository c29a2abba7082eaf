"""Supervised fine-tuning on prompt/answer pairs: a command (`megaverl sft`), and a warm-up for RL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megaverl.config import Config
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.controller.core import Controller
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptDataset, PromptRecord
from megaverl.data.prompts import PromptEncoder
from megaverl.data.sources import Entry
from megaverl.distributed.collectives import together
from megaverl.errors import DataError
from megaverl.monitoring.console import Console
from megaverl.monitoring.timeline import Timeline
from megaverl.rollout.engine import Generation
from megaverl.trainer.build import Builder
from megaverl.trainer.job import Job, Stages
from megaverl.trainer.offline import OfflineTrainer, TrainerGroup, with_optimizer
from megaverl.trainer.saving import export_model
from megaverl.trainer.serving import serve_program
from megaverl.workers.micro_batches import Weighting, cross_entropy, run_updates
from megaverl.workers.model import TrainingModel
from megaverl.workers.responses import rollout_batch


class AnswerUpdates:
    """Actor's model with optimizer steps on the cross-entropy of answer tokens, given the prompts."""

    def __init__(self, config: Config, builder: Builder) -> None:
        self.config, self.encoder = config, builder.encoder()
        self.algorithm, self.seed = AlgorithmConfig(), config.run.seed
        self.micro_batch_tokens = config.actor.micro_batch_tokens
        self.model = builder.model(
            config.actor, "actor", trained=config.actor.lora is None
        )
        self.trainable = with_optimizer(self.model, config.actor, config.sft)

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

    def __init__(
        self, config: Config, builder: Builder, console: Console, job: Job
    ) -> None:
        super().__init__(
            config, builder, console, job, config.sft, answer_sources(config)
        )
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


def warm_up(
    config: Config, builder: Builder, console: Console, job: Job
) -> TrainingModel:
    """Run all steps of `sft` without saving or recording anything. Return the model that RL starts from."""
    stages = Stages(Timeline(), job)
    worker = WarmUpWorker(config, builder, stages)
    num_steps = config.sft.steps

    async def program(controller: Controller) -> None:
        trainers = TrainerGroup("trainer", range(controller.num_ranks), controller)
        for step in range(num_steps):
            await trainers.take_step(step)

    with console.progress("supervised warm-up", num_steps) as worker.advance:
        serve_program(
            program,
            {"trainer": worker},
            config=config,
            stages=stages,
            console=console,
        )
    return worker.model


class WarmUpWorker:
    """Worker of one rank in a warm-up.

    Attributes:
        model: model that is trained.
        advance: displays that this many steps have been taken.
    """

    def __init__(self, config: Config, builder: Builder, stages: Stages) -> None:
        self._stages = stages
        self._data = builder.dataset(answer_sources(config))
        self._sampler = self._data.sampler(
            config.sft.batch_size, config.run.seed, shuffle=config.data.shuffle
        )
        self._updates = AnswerUpdates(config, builder)
        self.model = self._updates.model
        self.advance: Callable[[int], None] = lambda steps: None

    def take_step(self, step: int) -> None:
        """Run one optimizer step on the rows of a step."""
        with self._stages("warm_up"):
            records = [self._data[row] for row in self._sampler.indices(step)]
            self._updates.update(records, step)
        self.advance(1)


def answer_sources(config: Config) -> Sequence[Entry]:
    """Return the sources of prompts with answers."""
    return config.sft.train or config.data.train


def answers_batch(
    config: Config, encoder: PromptEncoder, records: Sequence[PromptRecord]
) -> RolloutBatch:
    """Return pairs as a batch whose responses are the reference answers.

    Raises:
        DataError: an answer is not text or is too long. The message names the row.
    """
    answers = [answer_tokens(config, encoder, record) for record in records]
    generations = [
        Generation(tokens, [0.0] * len(tokens), "stop") for tokens in answers
    ]
    return rollout_batch(records, generations, list(range(len(records))))


def answer_tokens(
    config: Config, encoder: PromptEncoder, record: PromptRecord
) -> list[int]:
    """Return the tokens of a row's answer, including the end of sequence.

    Raises:
        DataError: the answer is not text or is too long. The message names the row.
    """
    limit = config.sft.max_answer_tokens or config.max_response_tokens
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
