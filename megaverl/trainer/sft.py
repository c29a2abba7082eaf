"""Supervised fine-tuning on prompt/answer pairs, with the actor's engine: the warm-up before RL."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from megaverl.config import Config
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptDataset, PromptRecord
from megaverl.errors import DataError
from megaverl.metrics.console import Console
from megaverl.roles.megatron_model import MicroBatch
from megaverl.roles.trainable import TrainableModel
from megaverl.roles.updates import Weighting, run_updates, share
from megaverl.rollout.engine import Generation
from megaverl.trainer.build import Builder
from megaverl.trainer.samples import rollout_batch


class SFTTrainer:
    """Cross-entropy on the answers' tokens, given the prompts. Every rank makes one."""

    def __init__(self, config: Config, builder: Builder, console: Console) -> None:
        self.config, self.builder, self.console = config, builder, console
        sft = config.sft
        self.data: PromptDataset = builder.dataset(sft.train or config.data.train)
        self.sampler = self.data.sampler(sft.batch_size, config.run.seed, shuffle=config.data.shuffle)
        self.encoder = builder.encoder()
        self.model = builder.model(config.actor, "actor")
        scheduler = {"lr_decay_style": sft.lr_decay_style, "lr_warmup_steps": sft.lr_warmup_steps}
        self.trainable = TrainableModel(
            self.model,
            optimizer={**config.actor.optimizer, "lr": sft.lr},
            scheduler=scheduler,
            ddp=config.actor.ddp,
            total_updates=sft.steps,
            gradient_accumulation=config.actor.gradient_accumulation,
            offload=config.actor.offload,
        )

    def train(self, on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None) -> None:
        """All steps; `on_step(done, metrics)` after each."""
        with self.console.progress("supervised warm-up", self.config.sft.steps) as advance:
            for step in range(self.config.sft.steps):
                start = time.perf_counter()
                metrics = self.one_step(step)
                metrics["sft/step_time_ms"] = (time.perf_counter() - start) * 1e3
                advance(1)
                on_step(step + 1, metrics)

    def one_step(self, step: int) -> dict[str, float]:
        """One optimizer step on the pairs of `step`."""
        batch = self.batch([self.data[i] for i in self.sampler.indices(step)])
        metrics = run_updates(
            self.trainable,
            batch,
            self._loss,
            algorithm=AlgorithmConfig(),
            weighting=Weighting("token_mean"),
            fields={},
            micro_batch_tokens=self.config.actor.micro_batch_tokens,
            seed=self.config.run.seed,
            step=step,
        )
        return {f"sft/{name}": value for name, value in metrics.items()}

    def batch(self, records: Sequence[PromptRecord]) -> RolloutBatch:
        """Pairs as a batch whose responses are the reference answers.

        Raises:
            DataError: an answer that is not text, or longer than allowed; names the row.
        """
        limit = self.config.sft.max_answer_tokens or int(self.config.rollout.sampling["max_tokens"])
        answers = []
        for record in records:
            if not isinstance(record.reference, str):
                raise DataError(
                    f"{record.where}: the answer is {type(record.reference).__name__}, and fine-tuning needs text. "
                    "Name the right column with data.answer_key."
                )
            tokens = self.encoder.encode_answer(record.reference)
            if len(tokens) > limit:
                raise DataError(
                    f"{record.where}: the answer is {len(tokens)} tokens long, and at most {limit} are allowed. "
                    "Raise sft.max_answer_tokens, or shorten the row."
                )
            answers.append(Generation(tokens, [0.0] * len(tokens), "stop"))
        return rollout_batch(records, answers, list(range(len(records))))

    def _loss(self, logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        log_probs, _ = self.model.log_probs(logits, micro)
        loss = -(micro.fields["weights"] * log_probs).sum()
        return loss, {"loss": share(loss)}
