"""Stages on pairs of responses: `megaverl dpo` trains a policy, `megaverl reward` a reward model."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptDataset, PromptRecord
from megaverl.data.preferences import PreferenceColumns, PreferenceReader
from megaverl.distributed.collectives import on_first_rank, together
from megaverl.models.classifier import classifier_config
from megaverl.monitoring.console import Console
from megaverl.trainer.build import Builder
from megaverl.trainer.job import Job
from megaverl.trainer.offline import OfflineTrainer
from megaverl.trainer.saving import export_model
from megaverl.workers.pairs import PreferenceUpdates, RewardModelUpdates, of_single_responses
from megaverl.workers.trainable import TrainableModel

VALIDATION_PAIRS = 256  # in one batch


class _PairTrainer(OfflineTrainer):
    """What both stages share: the data."""

    pairs_only = True

    def __init__(self, config: Config, builder: Builder, console: Console, job: Job | None = None) -> None:
        preference = config.preference
        columns = PreferenceColumns(
            preference.chosen_key,
            preference.rejected_key,
            preference.completion_key,
            preference.label_key,
            preference.margin_key,
        )
        self.reader = PreferenceReader(
            builder.encoder(),
            columns,
            max_tokens=preference.max_response_tokens or int(config.rollout.sampling["max_tokens"]),
            pairs_only=self.pairs_only,
        )
        super().__init__(config, builder, console, job, steps=preference.steps, batch_size=preference.batch_size)
        self.held_out: PromptDataset | None = None
        if preference.validation:
            self.held_out = self.dataset(preference.validation)

    @property
    def train_sources(self) -> list[str]:
        return self.config.preference.train

    def dataset(self, sources: list[str]) -> PromptDataset:
        dataset = self.builder.dataset(sources, needs_answer=False)
        with together():
            self.reader.check(dataset)
        return dataset

    @property
    def validate_every(self) -> int:
        return self.config.preference.validate_every

    def validate(self) -> dict[str, float]:
        if self.held_out is None:
            return {}
        total: dict[str, float] = {}
        for start in range(0, len(self.held_out), VALIDATION_PAIRS):
            rows = range(start, min(start + VALIDATION_PAIRS, len(self.held_out)))
            found = self.evaluate(self.reader.batch([self.held_out[i] for i in rows]))
            total = {name: total.get(name, 0.0) + value * len(rows) for name, value in found.items()}
        return {name: value / len(self.held_out) for name, value in total.items()}

    def evaluate(self, batch: RolloutBatch) -> dict[str, float]:
        """Metrics of some pairs."""
        raise NotImplementedError

    @property
    def schedule(self) -> dict[str, int | str]:
        preference = self.config.preference
        return {"lr_decay_style": preference.lr_decay_style, "lr_warmup_steps": preference.lr_warmup_steps}


class PreferenceTrainer(_PairTrainer):
    """DPO, IPO, KTO, SimPO, ORPO: the actor learns from pairs, next to a frozen reference where the loss has one."""

    name = "dpo"

    def __init__(self, config: Config, builder: Builder, console: Console, job: Job | None = None) -> None:
        self.pairs_only = not of_single_responses(config.preference.loss)
        super().__init__(config, builder, console, job)
        preference, actor = config.preference, config.actor
        self.model = builder.model(actor, "actor", trained=actor.lora is None)
        self.trainable = TrainableModel(
            self.model,
            optimizer={**actor.optimizer, "lr": preference.lr},
            scheduler=self.schedule,
            ddp=actor.ddp,
            total_updates=preference.steps,
            gradient_accumulation=actor.gradient_accumulation,
            offload=actor.offload,
        )
        self.updates = PreferenceUpdates(
            self.trainable, preference.loss, preference.options, micro_batch_tokens=actor.micro_batch_tokens
        )
        self.reference = None
        if config.preference_needs_reference:
            self.reference = builder.reference(self.model)

    @property
    def trained(self) -> dict[str, TrainableModel]:
        return {"actor": self.trainable}

    def one_step(self, records: list[PromptRecord], step: int) -> dict[str, float]:
        return self.updates.update(self.reader.batch(records), self.reference)

    def evaluate(self, batch: RolloutBatch) -> dict[str, float]:
        return self.updates.evaluate(batch, self.reference)

    def export(self, folder: Path) -> None:
        export_model(self.model, self.builder, folder)


class RewardModelTrainer(_PairTrainer):
    """Bradley-Terry: a sequence classifier with one label learns which response of a pair is the better one."""

    name = "reward_model"

    def __init__(self, config: Config, builder: Builder, console: Console, job: Job | None = None) -> None:
        super().__init__(config, builder, console, job)
        preference, section = config.preference, config.reward_model
        fresh = section.lora is None
        self.model = builder.model(section, "reward_model", path=section.path, value_head=1, trained=fresh)
        self.trainable = TrainableModel(
            self.model,
            optimizer={**section.optimizer, "lr": preference.lr},
            scheduler=self.schedule,
            ddp=section.ddp,
            total_updates=preference.steps,
            gradient_accumulation=section.gradient_accumulation,
            offload=section.offload,
        )
        self.updates = RewardModelUpdates(
            self.trainable, section.loss, section.options, micro_batch_tokens=section.micro_batch_tokens
        )

    @property
    def trained(self) -> dict[str, TrainableModel]:
        return {"reward_model": self.trainable}

    def one_step(self, records: list[PromptRecord], step: int) -> dict[str, float]:
        return self.updates.update(self.reader.batch(records))

    def evaluate(self, batch: RolloutBatch) -> dict[str, float]:
        return self.updates.evaluate(batch)

    def export(self, folder: Path) -> None:
        export_classifier(self.trainable, self.builder, folder, path=self.config.reward_model.path)


def export_classifier(trainable: TrainableModel, builder: Builder, folder: Path, *, path: str | None) -> None:
    """Write a reward model as Hugging Face's `...ForSequenceClassification` with one label. Every rank takes part.

    Args:
        path: of the model that it started from; None: `model.path`.
    """
    model, source = trainable.model, builder.files(path).folder

    def describe() -> str:
        own = tempfile.mkdtemp(prefix="classifier_", dir=builder.run_dir)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        described = classifier_config(config, pad_token_id=builder.tokenizer.pad_token_id)
        (Path(own) / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        builder.tokenizer.save(own)
        return own

    described = Path(on_first_rank(describe, model.grid.world))
    model.export(folder, source_folder=described, overwrite=True)
    on_first_rank(lambda: _remove(described), model.grid.world)


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
