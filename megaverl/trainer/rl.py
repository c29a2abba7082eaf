"""The loop: steps, validation, checkpoints, what a person sees."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaverl.checkpoint.store import CheckpointStore
from megaverl.config import Config
from megaverl.data.datasets import PromptDataset
from megaverl.metrics.console import Console
from megaverl.metrics.memory import memory_metrics
from megaverl.metrics.timeline import Timeline
from megaverl.metrics.tracker import Tracker
from megaverl.roles.trainable import TrainableModel
from megaverl.trainer.build import Builder
from megaverl.trainer.evaluate import Evaluation, evaluate
from megaverl.trainer.export import export_model
from megaverl.trainer.samples import append_samples, forget_samples, sample_records
from megaverl.trainer.step import RLStep, Roles


@dataclass
class Best:
    """The best validation so far."""

    step: int = -1
    value: float = float("-inf")


class RLTrainer:
    """PPO or GRPO, from a configuration to trained weights. Every rank makes one and calls `train`."""

    def __init__(self, config: Config, console: Console, builder: Builder | None = None) -> None:
        self.config, self.console = config, console
        self.rank = dist.get_rank()
        builder = builder or Builder(config)
        self.builder, self.run_dir = builder, builder.run_dir
        self.train_data = builder.dataset(config.data.train)
        self.validation_data: PromptDataset | None = None
        if config.data.validation:
            self.validation_data = builder.dataset(config.data.validation)
        self.sampler = self.train_data.sampler(
            config.data.prompts_per_step, config.run.seed, shuffle=config.data.shuffle
        )
        actor = builder.actor()
        self.roles = Roles(
            actor=actor,
            critic=builder.critic() if config.uses_critic else None,
            reference=builder.reference() if config.uses_reference else None,
            reward=builder.reward(),
            kl=builder.kl_controller(),
            rollout=builder.rollout(actor.model),
        )
        self.timeline = Timeline(self.rank)
        self.step = RLStep(config, self.roles)
        self.flow = self.step.flow()
        self.best = Best()
        self.next_step = 0
        self.store = CheckpointStore(
            self.run_dir / "checkpoints", keep_last=config.checkpoint.keep_last, keep_best=config.checkpoint.keep_best
        )
        self.history: list[tuple[int, dict[str, float]]] = []

    @property
    def trained(self) -> dict[str, TrainableModel]:
        """What a checkpoint holds, by role."""
        roles = {"actor": self.roles.actor.trainable}
        if self.roles.critic is not None:
            roles["critic"] = self.roles.critic.trainable
        return roles

    def train(self) -> dict[str, float]:
        """Run to the last step; returns the last validation's metrics, or the last step's."""
        config = self.config
        self._resume()
        tracker = self._tracker()
        if self.rank == 0:
            forget_samples(self.run_dir / "samples.jsonl", self.next_step)
        result: dict[str, float] = {}
        try:
            self.roles.rollout.reshard()
            if self.next_step == 0 and config.trainer.validate_at_start:
                result = self._validate(tracker, 0) or result
            for step in range(self.next_step, config.trainer.steps):
                result = self._one_step(step, tracker) or result
                self.next_step = step + 1
                result = self._after(step + 1, tracker) or result
        finally:
            if tracker is not None:
                tracker.close()
                self.timeline.export(self.run_dir / "timeline.json")
        if config.checkpoint.export_hf:
            export_model(self.roles.actor.model, self.builder, self.run_dir / "hf")
            self.console.print(f"model written to {self.run_dir / 'hf'}")
        return result

    def _one_step(self, step: int, tracker: Tracker | None) -> dict[str, float]:
        prompts = [self.train_data[i] for i in self.sampler.indices(step)]
        self.step.metrics = {}
        start = time.perf_counter()
        with self.timeline.step(step):
            values = self.flow.run(self.timeline.span, prompts=prompts, step=step)
        seconds = time.perf_counter() - start
        batch = values["rollouts"]
        metrics = {
            **self.step.metrics,
            **self.timeline.step_metrics(),
            **memory_metrics("actor"),
            "train/step_time_ms": seconds * 1e3,
            "train/epoch": self.sampler.epoch(step + 1),
            "train/tokens_per_sec": float(batch.sequence_lengths.sum()) / seconds,
        }
        if tracker is not None:
            tracker.log(step + 1, metrics)
            records = sample_records(batch, values["scores"], self.roles.reward, self.config.trainer.save_samples)
            append_samples(self.run_dir / "samples.jsonl", step + 1, records)
        self.console.step(step + 1, self.config.trainer.steps, metrics)
        self.history.append((step + 1, metrics))
        return metrics

    def _after(self, done: int, tracker: Tracker | None) -> dict[str, float] | None:
        """Validate and save where the configuration says so; `done` steps are behind us."""
        trainer, checkpoint = self.config.trainer, self.config.checkpoint
        last = done == trainer.steps
        result, is_best = None, False
        if self.validation_data is not None and trainer.validate_every and (done % trainer.validate_every == 0 or last):
            best_before = self.best.step
            result = self._validate(tracker, done)
            is_best = self.best.step != best_before
        due = last or (checkpoint.save_interval and done % checkpoint.save_interval == 0)
        if due or (is_best and checkpoint.save_interval and checkpoint.keep_best):
            self._save(done, is_best)
        return result

    def _validate(self, tracker: Tracker | None, done: int) -> dict[str, float] | None:
        if self.validation_data is None or not self.config.trainer.validate_every:
            return None
        with self.timeline.span("validation"):
            evaluation = self.evaluate()
        metrics = evaluation.metrics
        value = metrics[f"validation/{self.config.trainer.best_metric}"]
        if value > self.best.value:
            self.best = Best(done, value)
        if tracker is not None:
            tracker.log(done, metrics)
            append_samples(self.run_dir / "samples.jsonl", done, evaluation.samples, split="validation")
        self.history.append((done, metrics))
        self.console.print(
            f"validation after step {done}: "
            + "  ".join(f"{name.removeprefix('validation/')} {value:.3f}" for name, value in metrics.items())
        )
        return metrics

    def evaluate(self) -> Evaluation:
        """Validate the weights that the engine holds now."""
        assert self.validation_data is not None
        count = len(self.validation_data)
        if self.config.trainer.validation_prompts is not None:
            count = min(count, self.config.trainer.validation_prompts)
        prompts = [self.validation_data[i] for i in range(count)]
        return evaluate(self.config, self.roles.rollout, self.roles.reward, prompts)

    def _tracker(self) -> Tracker | None:
        if self.rank != 0:
            return None
        return Tracker(
            self.run_dir,
            self.config.run.log_with,
            resume_step=self.next_step if self.next_step else None,
            name=self.config.run.name,
            config=self.config.to_dict(),
            warn=self.console.warn,
        )

    def _save(self, done: int, is_best: bool) -> None:
        with self.timeline.span("checkpoint"):
            self.store.save(done, self.trained, self._state(), best=is_best)

    def _state(self) -> dict[str, Any]:
        return {
            "next_step": self.next_step,
            "kl": self.roles.kl.state_dict(),
            "sampler": self.sampler.state_dict(),
            "weight_version": self.roles.rollout.weight_version,
            "best": {"step": self.best.step, "value": self.best.value},
        }

    def _resume(self) -> None:
        path: Path | None = self.store.resolve(self.config.checkpoint.resume)
        if path is None:
            return
        state = self.store.load(path, self.trained)
        self.sampler.check_state(state["sampler"])
        self.roles.kl.load_state_dict(state["kl"])
        self.next_step = int(state["next_step"])
        self.roles.rollout.weight_version = int(state["weight_version"])
        self.best = Best(int(state["best"]["step"]), float(state["best"]["value"]))
        self.console.print(f"resumed from {path}: {self.next_step} of {self.config.trainer.steps} steps are done")
