"""Trainers on pairs of responses: preference optimization (`megaverl dpo`) and reward models (`megaverl reward`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megaverl.config import Config
from megaverl.data.datasets import PromptDataset, PromptRecord
from megaverl.data.preferences import PreferenceColumns, PreferenceReader
from megaverl.data.sources import Entry
from megaverl.distributed.collectives import together
from megaverl.monitoring.console import Console
from megaverl.trainer.build import Builder
from megaverl.trainer.job import Job
from megaverl.trainer.offline import OfflineTrainer, with_optimizer
from megaverl.trainer.saving import export_classifier, export_model
from megaverl.workers.pairs import (
    PreferenceUpdates,
    RewardModelUpdates,
    reads_single_responses,
)

VALIDATION_PAIRS = 256  # pairs in one batch


class PairTrainer(OfflineTrainer):
    """Base of the trainers on pairs of responses."""

    updates: PreferenceUpdates | RewardModelUpdates

    def __init__(
        self,
        config: Config,
        builder: Builder,
        console: Console,
        job: Job,
        *,
        pairs_only: bool = True,
    ) -> None:
        preference = config.preference
        self.reader = PreferenceReader(
            builder.encoder(),
            PreferenceColumns.of(preference),
            max_tokens=preference.max_response_tokens or config.max_response_tokens,
            pairs_only=pairs_only,
        )
        super().__init__(config, builder, console, job, preference, preference.train)
        self.validate_every = preference.validate_every
        self.held_out = (
            self.dataset(preference.validation) if preference.validation else None
        )

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
            metrics = self.updates.evaluate(
                self.reader.batch([self.held_out[i] for i in rows])
            )
            total = {
                name: total.get(name, 0.0) + value * len(rows)
                for name, value in metrics.items()
            }
        return {name: value / len(self.held_out) for name, value in total.items()}


class PreferenceTrainer(PairTrainer):
    """Trainer of the actor on pairs with DPO, IPO, KTO, SimPO or ORPO, and a frozen reference for losses with one."""

    name = "dpo"

    def __init__(
        self, config: Config, builder: Builder, console: Console, job: Job
    ) -> None:
        preference, actor = config.preference, config.actor
        super().__init__(
            config,
            builder,
            console,
            job,
            pairs_only=not reads_single_responses(preference.loss),
        )
        model = builder.model(actor, "actor", trained=actor.lora is None)
        policy = with_optimizer(model, actor, preference)
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
    """Trainer of a reward model: a sequence classifier with one label that ranks the
    responses of a pair (Bradley-Terry).
    """

    name = role = "reward_model"

    def __init__(
        self, config: Config, builder: Builder, console: Console, job: Job
    ) -> None:
        super().__init__(config, builder, console, job)
        section = config.reward_model
        fresh = section.lora is None
        model = builder.model(
            section, "reward_model", path=section.path, value_head=1, trained=fresh
        )
        classifier = with_optimizer(model, section, config.preference)
        self.trained = {"reward_model": classifier}
        self.updates = RewardModelUpdates(
            classifier,
            section.loss,
            section.options,
            micro_batch_tokens=section.micro_batch_tokens,
        )

    def export(self, folder: Path) -> None:
        export_classifier(
            self.updates.model, self.builder, folder, path=self.config.reward_model.path
        )
