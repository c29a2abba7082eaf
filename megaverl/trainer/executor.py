"""Where the operators of a step run, and what waits for what: on the same ranks one after the other (`Colocated`), or
on ranks of their own (`disaggregated.Disaggregated`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from megaverl.config import Config
from megaverl.coordinator import CoordinatorClient, LocalCoordinator, Progress, Rules
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.data.streaming import Prompts
from megaverl.dataflow import DataFlow
from megaverl.distributed.worlds import Fabric
from megaverl.monitoring.console import Console
from megaverl.monitoring.timeline import memory_metrics
from megaverl.trainer.agents import AgentsStep, agents_roles
from megaverl.trainer.build import Builder
from megaverl.trainer.job import Stages, reporter
from megaverl.trainer.records import Records
from megaverl.trainer.roles import Roles, make_roles
from megaverl.trainer.sample_routing import SampleRouting
from megaverl.trainer.step import RLStep
from megaverl.trainer.stored_rollouts import RolloutFolder, StoredRollouts
from megaverl.trainer.validation import Evaluation, Validation
from megaverl.workers.model import TrainingModel
from megaverl.workers.reward import Scores
from megaverl.workers.trainable import TrainableModel

# Called with the name of an operator that has run, and all values so far.
AfterOperator = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Measured:
    """What a step has left for the records."""

    metrics: dict[str, float]
    rollouts: RolloutBatch
    scores: Scores


class Executor(Protocol):
    """Runs the steps of a run on this rank. Every rank of the job calls the same methods in the same order.

    Attributes:
        roles: this rank's part of every role.
        step: the operators. flow: those of a step, compiled.
        control: all ranks of the job; None: the default group.
        makes_samples: this rank generates or scores.
        may_leave_inside: a run that is asked to leave may do so between the operators of a step.
    """

    roles: Roles
    step: RLStep
    flow: DataFlow
    control: dist.ProcessGroup | None = None
    makes_samples: bool = True
    may_leave_inside: bool = False

    def begins_after(self, step: int) -> int:
        """How many steps must be behind all ranks when this one begins its part of `step`; steps count from 0."""

    def run(self, step: int, prompts: Prompts, given: StoredRollouts | None, after: AfterOperator) -> None:
        """This rank's operators of a step.

        Args:
            given: samples that are there already; else they are generated from the next prompts.
            after: called after every operator, where the run may leave inside a step.
        """

    def generate(self, step: int, prompts: Sequence[PromptRecord]) -> RolloutBatch:
        """Responses alone, on every rank."""

    def synchronise(self, done: int, *, starts: bool) -> None:
        """All ranks are after `done` steps: the engines get the weights that these have made.

        Args:
            starts: they are where the run begins, or goes on.
        """

    def measured(self, done: int) -> Measured | None:
        """What the last of `done` steps has left; None on ranks that do not have it."""

    def evaluate(self, validation: Validation) -> Evaluation | None:
        """Validate the engines' weights; None in a replay, which has no engines."""

    def share(self, metrics: dict[str, float]) -> dict[str, float]:
        """What was measured where records are kept, on every rank."""

    def coordinate(self, progress: Progress, resumed_from: Path | None) -> None:
        """Who decides over updates, from where the run stands."""

    def collect(self, state: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint's state from what each rank has of it, the same on all; with the coordinator's."""

    def own_files(self) -> dict[str, bytes]:
        """What a checkpoint holds of this rank alone, by file."""
        return {}

    @property
    def trained(self) -> dict[str, TrainableModel]:
        """What a checkpoint holds of this rank's models, by role."""
        return self.roles.trained

    @property
    def saved(self) -> dict[str, TrainableModel]:
        """What of it this rank saves."""
        return self.trained

    @property
    def exported(self) -> dict[str, TrainingModel]:
        """The models that this rank exports, by the name of their folder."""
        return self.roles.exported

    def write_timeline(self, records: Records, run_dir: Path) -> None:
        """What this rank did when."""

    def settle(self, records: Records, run_dir: Path) -> None:
        """The steps are over: wait for what is still on its way, and join all ranks' timelines."""


class Colocated(Executor):
    """All roles on all ranks: operators run one after the other, the weights' synchronisation among them."""

    may_leave_inside = True

    def __init__(
        self, builder: Builder, stages: Stages, console: Console, replayed: RolloutFolder | None, fabric: Fabric
    ) -> None:
        self.config, self.stages = builder.config, stages
        own_agents = self.config.environment.agents == "own"
        self.roles = (agents_roles if own_agents else make_roles)(builder, generates=replayed is None)
        make_step = AgentsStep if own_agents else RLStep
        self.step = make_step(self.config, self.roles, replayed, warn=console.warn, span=stages)
        self.flow = self.step.flow()
        self.routing = SampleRouting(self.step, fabric, reporter(fabric.placement))
        self._readers = self.routing.readers(self.flow)
        self._values: Mapping[str, Any] = {}
        self._epoch = 0.0

    def begins_after(self, step: int) -> int:
        return step

    def run(self, step: int, prompts: Prompts, given: StoredRollouts | None, after: AfterOperator) -> None:
        self.step.stored, self.routing.step = None, step
        self.step.metrics = dict(given.metrics) if given else {}
        with self.stages.timeline.step(step):
            done = self._held(given.values) if given else self.step.gathered(prompts, step)
            if done and not given:
                after("reward", done)
            taken = [] if done else prompts.take(self.step.num_prompts)
            self.step.readers = self._readers
            self._values = self.flow.run(self.stages, done, after, prompts=taken, step=step)
            self.step.readers = None
        self._epoch = prompts.epoch

    def _held(self, given: dict[str, Any]) -> dict[str, Any]:
        """Of samples that are on every rank already, those that this rank works on."""
        if self._readers is None:
            return given
        return given | {"rollouts": self._readers.of_whole(given["rollouts"])}

    def generate(self, step: int, prompts: Sequence[PromptRecord]) -> RolloutBatch:
        with self.stages("rollout"):
            return self.step.generate(prompts, step)

    def synchronise(self, done: int, *, starts: bool) -> None:
        """An operator of the step does."""
        if starts:
            self.routing.first_step = done

    def measured(self, done: int) -> Measured:
        self.stages.status("log")
        batch, times = self._values["rollouts"], self.stages.timeline.step_metrics()
        seconds = times["time/step_ms"] / 1e3
        metrics = {
            "rollout/staleness": 0.0,  # of one's own weights, where no response was begun with older ones
            **self.step.metrics,
            **times,
            **memory_metrics("actor"),
            "train/step_time_ms": seconds * 1e3,
            "train/epoch": self._epoch,
            "train/tokens_per_sec": float(sum(sequence_lengths(batch).lengths)) / seconds,
        }
        return Measured(metrics, batch, self._values["scores"])

    def evaluate(self, validation: Validation) -> Evaluation | None:
        if self.roles.rollout is None:
            return None
        with self.stages("validation"):
            return validation.evaluate(self.roles, readers=self.routing.readers_of_validation())

    def share(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics

    def coordinate(self, progress: Progress, resumed_from: Path | None) -> None:
        self._coordinator = LocalCoordinator(list(self.trained), rules_of(self.config), progress)
        for role, trainable in self.trained.items():
            trainable.coordinator = CoordinatorClient(self._coordinator, role, progress)

    def collect(self, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"coordinator": self._coordinator.progress.to_dict()}

    def write_timeline(self, records: Records, run_dir: Path) -> None:
        if records.keeps:
            records.aside(lambda: self.stages.timeline.export(run_dir / "timeline.json"))

    def settle(self, records: Records, run_dir: Path) -> None:
        """Nothing is on its way, and one rank's timeline is that of all."""


def rules_of(config: Config) -> Rules:
    """What is applied, skipped, or the end, as `coordinator` says."""
    given, rollout = config.coordinator, config.rollout
    return Rules(
        skip_above=given.skip_above,
        on_nonfinite=given.on_nonfinite,
        max_skips=given.max_skips,
        max_staleness=rollout.max_staleness if rollout.async_rollout or rollout.partial is not None else None,
    )
