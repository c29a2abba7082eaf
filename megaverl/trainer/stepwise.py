"""The loop of a program's own where roles have ranks of their own: its steps are taken when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megaverl.config import Config
from megaverl.data.datasets import PromptRecord
from megaverl.dataflow import DataFlow
from megaverl.dataflow.tensor_channel import TensorChannel
from megaverl.distributed.collectives import broadcast_json
from megaverl.errors import ConfigError
from megaverl.monitoring.console import Console
from megaverl.trainer.job import Job
from megaverl.trainer.split import SplitTrainer
from megaverl.trainer.stored_rollouts import StoredRollouts


class StepwiseTrainer(SplitTrainer):
    """`SplitTrainer`, step by step. Every rank of the job takes part in every call.

    A step's samples are on every rank, and whatever a program makes of them it makes on each of them alike.

    Raises:
        ConfigError: engines that are to be ahead of training, which a program's own loop decides.
    """

    def __init__(self, config: Config, console: Console, job: Job) -> None:
        if config.rollout.async_rollout:
            raise ConfigError(
                "rollout.async_rollout: a loop of one's own generates and trains in turn. Leave it out, or use "
                "RLTrainer(...).train()."
            )
        super().__init__(config, console, job)
        if self.fabric.has("rollout"):
            self.timeline.roles["rollout"] = "rollout"
        self._courier = TensorChannel(self.fabric)
        self._given: StoredRollouts | None = None

    def make_flow(self) -> DataFlow:
        self.step.is_given = True
        return self.step.flow(self.placement.ranks)

    @contextmanager
    def recording(self) -> Iterator[None]:
        with super().recording():
            self._met = self.next_step
            self._meet(self._met, starts=True)
            yield

    def rollouts(self, step: int) -> StoredRollouts:
        self.step.metrics = {}
        self.timeline.begin(step)
        prompts = self.prompts.take(self.config.data.prompts_per_step)
        engines = self.placement.ranks["rollout"]
        others = tuple(rank for rank in range(self.placement.size) if rank not in engines)
        if self.fabric.has("rollout"):
            with self.stages("rollout"):
                batch = self.step.generate(prompts, step)
            self._courier.send("drawn", batch, engines, others)
        else:
            with self.stages("wait"):
                batch = self._courier.receive("drawn", engines, others)
        return self._rollouts(step, {"rollouts": batch})

    def one_step(self, step: int, rollouts: StoredRollouts | None = None) -> dict[str, float]:
        """This rank's part of it; what was measured, `after_step` tells."""
        assert rollouts is not None, "a program gives them"
        self._given = rollouts
        self._turn(step)
        return {}

    def after_step(self, done: int) -> dict[str, float]:
        """Where all meet. Returns what was measured in the step and in a validation after it, on every rank."""
        self._met = done
        self._meet(done)
        mine = [metrics for step, metrics in self.records.history if step == done]
        found = {name: value for metrics in mine for name, value in metrics.items()}
        return dict(broadcast_json(found, self.reporter, self.fabric.control))

    def safe_point(self) -> None:
        """Where all meet they have agreed on it already."""

    def settle(self) -> None:
        super().settle()
        self._courier.settle()
        self.carrier.settle()
        self.coordinator.close()
        self.records.aside(lambda: self.reports.write_timeline(self.timeline, self.run_dir))
        self.records.aside(lambda: self.reports.join_timelines(self.run_dir))

    def _starts_from(self, step: int, moving: dict[str, Any]) -> tuple[dict[str, Any], Sequence[PromptRecord]]:
        assert self._given is not None
        given, self._given = self._given, None
        self.step.metrics |= given.metrics
        done = given.values
        if not self.fabric.has("reward"):  # scores come from the ranks of rewards, even where they were given
            done.pop("scores", None)
        return done, []
