"""Supervised fine-tuning on prompt/answer pairs, with the actor's engine: a stage of its own, or RL's warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megaverl.config import Config
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptDataset, PromptRecord
from megaverl.data.prompts import PromptEncoder
from megaverl.data.sources import Entry
from megaverl.distributed.collectives import together
from megaverl.errors import DataError
from megaverl.monitoring.console import Console
from megaverl.rollout.engine import Generation
from megaverl.trainer.build import Builder
from megaverl.trainer.job import Job
from megaverl.trainer.offline import OfflineTrainer, with_optimizer
from megaverl.trainer.saving import export_model
from megaverl.workers.micro_batches import Weighting, cross_entropy, run_updates
from megaverl.workers.model import TrainingModel
from megaverl.workers.responses import rollout_batch


class AnswerUpdates:
    """Cross-entropy on the answers' tokens, given the prompts: the actor's model, and its optimizer steps."""

    def __init__(self, config: Config, builder: Builder) -> None:
        self.config, self.encoder = config, builder.encoder()
        self.algorithm, self.seed = AlgorithmConfig(), config.run.seed
        self.micro_batch_tokens = config.actor.micro_batch_tokens
        self.model = builder.model(config.actor, "actor", trained=config.actor.lora is None)
        self.trainable = with_optimizer(builder, self.model, config.actor, config.sft)

    def update(self, records: Sequence[PromptRecord], step: int) -> dict[str, float]:
        """One optimizer step on these pairs; every rank takes part."""
        return run_updates(
            self,
            answers_batch(self.config, self.encoder, records),
            cross_entropy(self.model),
            weighting=Weighting("token_mean"),
            fields={},
            step=step,
        )


class SFTTrainer(OfflineTrainer):
    """`megaverl sft`. Every rank makes one and calls `train`."""

    name = "sft"

    def __init__(self, config: Config, builder: Builder, console: Console, job: Job | None = None) -> None:
        super().__init__(config, builder, console, job, config.sft, answer_sources(config))
        self.updates = AnswerUpdates(config, builder)
        self.trained = {"actor": self.updates.trainable}

    def dataset(self, sources: Sequence[Entry]) -> PromptDataset:
        dataset, encoder = self.builder.dataset(sources), self.builder.encoder()
        with together():  # a bad answer ends the run before it starts
            for number in range(len(dataset)):
                answer_tokens(self.config, encoder, dataset[number])
        return dataset

    def one_step(self, records: list[PromptRecord], step: int) -> dict[str, float]:
        return self.updates.update(records, step)

    def export(self, folder: Path) -> None:
        export_model(self.updates.model, self.builder, folder)


def warm_up(config: Config, builder: Builder, console: Console) -> TrainingModel:
    """All steps of `sft` at once, with nothing saved or written down: what RL then starts from."""
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
    """Where prompts with answers come from."""
    return config.sft.train or config.data.train


def answers_batch(config: Config, encoder: PromptEncoder, records: Sequence[PromptRecord]) -> RolloutBatch:
    """Pairs as a batch whose responses are the reference answers.

    Raises:
        DataError: an answer that is not text, or longer than allowed; names the row.
    """
    answers = [answer_tokens(config, encoder, record) for record in records]
    generations = [Generation(tokens, [0.0] * len(tokens), "stop") for tokens in answers]
    return rollout_batch(records, generations, list(range(len(records))))


def answer_tokens(config: Config, encoder: PromptEncoder, record: PromptRecord) -> list[int]:
    """A row's answer, with its end of sequence.

    Raises:
        DataError: see `answers_batch`.
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
