"""Executors: one rank's roles and metrics, and the routing of samples to ranks.

`Colocated` has all roles on all ranks. `disaggregated.Disaggregated` has roles on
separate ranks. `SampleRouting` decides which samples of a step each rank receives. A
rank receives only its own rows unless an operator reads all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from megaverl.algorithms import advantage_estimators, policy_losses
from megaverl.controller.dialogue import Dialogue
from megaverl.data.batch import RolloutBatch
from megaverl.data.distributed_batch import RowSelection
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.data.streaming import Prompts
from megaverl.dataflow import DataFlow
from megaverl.distributed.worlds import JobContext
from megaverl.monitoring.console import Console
from megaverl.monitoring.timeline import memory_metrics
from megaverl.sharding.rows import Rows, join_rows
from megaverl.trainer.agents import AgentsStep, agents_roles
from megaverl.trainer.build import Builder
from megaverl.trainer.job import Stages, reporter
from megaverl.trainer.roles import Roles, make_roles
from megaverl.trainer.saving import Records
from megaverl.trainer.schedule import RolloutFolder
from megaverl.trainer.step import RLStep
from megaverl.workers import local
from megaverl.workers.decisions import Rules, UpdateCounts, counts_to_state
from megaverl.workers.micro_batches import Updated, rows_of_updates
from megaverl.workers.model import TrainingModel
from megaverl.workers.reward import Scores
from megaverl.workers.trainable import TrainableModel

# Operators that declare which rows of the rollouts they read. Any other (`mix`, a
# user's operator) reads all rows.
SELECTIVE = (
    "reward",
    "ref_log_probs",
    "old_log_probs",
    "score_norms",
    "implicit_rewards",
    "values",
    "advantages",
)
TOKENS = frozenset({"input_ids", "generated_ids"})
# Operators that work with a rank's local rows. Any other operator needs all samples on
# every rank.
OF_HELD = frozenset(
    {*SELECTIVE, "rollout", "critic_update", "actor_update", "reshard"}
    - {"implicit_rewards"}
)


# Maps the lengths of a step's samples to the rows that each rank reads.
RowsRead = Callable[[SequenceLengths], Rows]


class SampleRouting:
    """Assignment of a step's samples to ranks, derived from the operators of each rank's roles.

    Args:
        reporter: rank that keeps the run's records.

    Attributes:
        step: running step, counted from 0.
        first_step: first step of this start of the run.
    """

    def __init__(self, steps: RLStep, context: JobContext, reporter: int) -> None:
        self._steps, self.context, self._reporter = steps, context, reporter
        self.config, self.roles = steps.config, steps.roles
        self.step = self.first_step = 0

    def rows_read(self) -> dict[str, RowsRead]:
        """Return, by operator name, the function that computes the rows which the operator reads.

        The functions ask the roles, so they are called only when the sample lengths are
        known.
        """
        return {
            "reward": self._reward,
            "ref_log_probs": self._reference,
            "old_log_probs": self._old_log_probs,
            "score_norms": self._scored,
            "implicit_rewards": self._implicit,
            "values": self._critic,
            "advantages": self._trained,
        }

    def readers(self, flow: DataFlow) -> RowSelection | None:
        """Return the row selection for a step on the ranks of this role group.

        Returns:
            None if an operator, the environment or the algorithm reads all samples on every rank.
        """
        config, operators = (
            self.config,
            [operator.name for operator in flow.plan.operators],
        )
        here = [
            operator.name
            for operator in flow.plan.operators
            if not {*operator.roles}.isdisjoint(self.context.world.roles)
        ]
        algorithm, reads = config.algorithm, self.rows_read()
        # Episodes and responses of a rollout function are produced as one batch, which
        # every rank gets whole.
        made_together = (
            config.environment.name is not None or config.rollout.function is not None
        )
        looks_at_all = (
            made_together
            or algorithm.dynamic_sampling.metric is not None
            or self._reads_all
        )
        # These losses depend on tokens or samples of the whole batch.
        selects = "selected" in policy_losses.get(algorithm.policy_loss_name).inputs
        selects = (
            selects or algorithm.top_entropy is not None or algorithm.positive_coef > 0
        )
        estimator = advantage_estimators.get(algorithm.advantage_name)
        if (
            looks_at_all
            or selects
            or not estimator.of_groups
            or not OF_HELD.issuperset(operators)
        ):
            return None
        readers = [reads[name] for name in here if name in reads]
        return RowSelection(
            self.context, lambda lengths: join_rows(rows(lengths) for rows in readers)
        )

    def readers_of_validation(self) -> RowSelection:
        """Return the row selection for a validation: rows to score, and the first rows,
        which are written to the records.
        """

        def rows(lengths: SequenceLengths) -> Rows:
            return join_rows(
                [
                    self._reward(lengths),
                    self._written(lengths, self.config.trainer.save_samples),
                ]
            )

        return RowSelection(self.context, rows)

    def _written(self, lengths: SequenceLengths, count: int) -> Rows:
        return {self._reporter: range(min(count, len(lengths)))}

    def _reward(self, outline: SequenceLengths) -> Rows:
        return self._on("reward", self.roles.reward.rows(outline))

    def _reference(self, outline: SequenceLengths) -> Rows:
        assert self.roles.reference is not None
        return self._on("reference", self.roles.reference.rows(outline))

    def _old_log_probs(self, outline: SequenceLengths) -> Rows:
        # The first step after a start always computes log-probs, to compare them with
        # the engine's.
        wanted = (
            self.config.shares_backbone
            or self._steps.needs_log_probs(self.step)
            or self.step == self.first_step
        )
        return self._scored(outline) if wanted else {}

    def _scored(self, outline: SequenceLengths) -> Rows:
        """Return the rows that each actor rank scores. Every island scores all samples."""
        return self._on("actor", self.roles.actor.rows(outline))

    def _implicit(self, outline: SequenceLengths) -> Rows:
        assert self.roles.implicit is not None
        return self._on("actor", self.roles.implicit.rows(outline))

    def _values(self, outline: SequenceLengths) -> Rows:
        critic = self.roles.critic
        assert critic is not None
        return self._on("critic", critic.rows(outline))

    def _critic(self, outline: SequenceLengths) -> Rows:
        critic = self.roles.critic
        assert critic is not None
        return join_rows(
            [self._values(outline), self._updates("critic", local(critic), outline)]
        )

    def _trained(self, outline: SequenceLengths) -> Rows:
        """Return the rows that each actor rank trains on, and the rows that the reporter writes to the records."""
        # A filter or an estimator that reads tokens needs all samples on every rank of
        # the actor.
        if self._reads_all:
            return dict.fromkeys(
                self.context.placement.ranks["actor"], range(len(outline))
            )
        count = (
            len(outline)
            if self.config.trainer.store_rollouts
            else self.config.trainer.save_samples
        )
        return join_rows(
            [
                self._written(outline, count),
                self._updates("actor", local(self.roles.actor), outline),
            ]
        )

    @property
    def _reads_all(self) -> bool:
        """Return whether the advantage computation reads tokens of all samples."""
        return (
            self.config.algorithm.rollout_filter is not None
            or not TOKENS.isdisjoint(self._estimator_reads)
        )

    @property
    def _estimator_reads(self) -> frozenset[str]:
        estimator = advantage_estimators.get(self.config.algorithm.advantage_name)
        return frozenset(estimator.inputs) | frozenset(estimator.optional_inputs)

    def _updates(self, role: str, trained: Updated, outline: SequenceLengths) -> Rows:
        # Every island plans the same updates and trains on its own part of each
        # mini-batch.
        return join_rows(
            dict(
                zip(
                    ranks,
                    rows_of_updates(trained, outline, self.step, part),
                    strict=True,
                )
            )
            for part, ranks in enumerate(self._worlds(role))
        )

    def _on(self, role: str, rows: Sequence[Sequence[int]]) -> Rows:
        """Assign rows to the ranks of a role. If islands have their own copy of the role, each works on all samples."""
        return join_rows(
            dict(zip(ranks, rows, strict=True)) for ranks in self._worlds(role)
        )

    def _worlds(self, role: str) -> Sequence[Sequence[int]]:
        """Return the ranks of a role, as one group per island if the role shares the actor's ranks."""
        placement = self.context.placement
        return (
            placement.islands
            if placement.colocated(role, "actor")
            else (placement.ranks[role],)
        )


@dataclass(frozen=True)
class Measured:
    """Metrics and samples of a step, for the records."""

    metrics: dict[str, float]
    rollouts: RolloutBatch
    scores: Scores


class Executor(Protocol):
    """One rank's roles and the metrics of its steps. Every rank of the job calls the same methods in the same order.

    Attributes:
        roles: this rank's part of every role.
        step: operators of a step.
        flow: compiled flow of the operators.
        stages: reports what this rank is doing.
        context: this rank's place in the job.
        routing: assignment of samples to ranks.
        dialogue: lets running calls ask the program.
        control: process group of all ranks of the job, or None for the default group.
        generates: whether this rank has an engine.
        makes_samples: whether this rank generates or scores.
    """

    roles: Roles
    step: RLStep
    flow: DataFlow
    stages: Stages
    context: JobContext
    routing: SampleRouting
    dialogue: Dialogue
    control: dist.ProcessGroup | None = None
    generates: bool = True
    makes_samples: bool = True
    _values: Mapping[str, Any]  # samples of the last step, for the records

    def start(self, done: int) -> None:
        """Begin a run of which `done` steps are completed."""
        self.routing.first_step = done

    def begin_step(self, step: int) -> None:
        """Start to measure a step."""

    def begin_samples(self, step: int, prompts: Prompts) -> None:
        """Record that the engines begin the samples of a step. Called before its prompts are taken."""
        return

    def end_samples(self, step: int, rollouts: RolloutBatch) -> None:
        """Record the samples that the engines generated for a step, which may be ahead of training."""
        return

    def end_scores(self, step: int, scores: Scores) -> None:
        """Record the rewards of a step's samples."""
        return

    def begin_sync(self) -> None:
        """Record that the engines are about to receive new weights."""
        return

    def keep_samples(self, rollouts: RolloutBatch, scores: Scores) -> None:
        """Keep the step's samples for the records."""
        self._values = {"rollouts": rollouts, "scores": scores}

    def end_step(self, step: int) -> None:
        """Collect the metrics of the step."""

    def join_islands(self, role: str, step: int) -> None:
        """Sum what the islands of a role send in its next updates. This happens on the coordinator's rank only."""
        return

    def measured(self, done: int) -> Measured | None:
        """Return metrics and samples of the last of `done` steps, or None on ranks that do not have them."""

    @property
    def held_out_readers(self) -> RowSelection | None:
        """Return the row selection for scoring and recording a validation. None: every rank gets all responses."""
        return None

    def share(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return, on every rank, the metrics that the reporter has. Collective over all ranks."""

    def prepare_updates(
        self, counts: Mapping[str, UpdateCounts], resumed_from: Path | None
    ) -> None:
        """Prepare this rank's models for decisions over their updates.

        Args:
            counts: counts of updates from the checkpoint, by the model's name in it.
            resumed_from: folder of the checkpoint that the run resumed from, or None.
        """
        rules = Rules.from_config(self.step.config)
        for name, trainable in self.trained.items():
            trainable.name, trainable.rules = name, rules
            trainable.counts = counts.get(name, UpdateCounts())

    def collect(self, state: dict[str, Any]) -> dict[str, Any]:
        """Merge each rank's part of a checkpoint's state. The result is the same on all ranks."""

    def own_files(self) -> dict[str, bytes]:
        """Return the files of a checkpoint that only this rank writes, by name."""
        return {}

    @property
    def trained(self) -> dict[str, TrainableModel]:
        """Return this rank's trained models, by the role's name in a checkpoint."""
        return self.roles.trained

    @property
    def saved(self) -> dict[str, TrainableModel]:
        """Return those of `trained` that this rank saves."""
        return self.trained

    @property
    def exported(self) -> dict[str, TrainingModel]:
        """Return the models that this rank exports, by the name of their folder."""
        return self.roles.exported

    def write_timeline(self, records: Records, run_dir: Path) -> None:
        """Write the spans of this rank's stages as a timeline file."""

    def settle(self, records: Records, run_dir: Path) -> None:
        """Wait for pending communication after the last step, and merge all ranks' timelines."""


class Colocated(Executor):
    """Executor of a run with all roles on all ranks."""

    def __init__(
        self,
        builder: Builder,
        stages: Stages,
        console: Console,
        replayed: RolloutFolder | None,
        context: JobContext,
    ) -> None:
        self.config, self.stages = builder.config, stages
        own_agents = self.config.environment.agents == "own"
        self.roles = (agents_roles if own_agents else make_roles)(
            builder, generates=replayed is None
        )
        make_step = AgentsStep if own_agents else RLStep
        self.step = make_step(
            self.config, self.roles, replayed, warn=console.warn, span=stages
        )
        self.flow = self.step.flow()
        self.context = context
        self.routing = SampleRouting(self.step, context, reporter(context.placement))
        self._readers = self.routing.readers(self.flow)
        self._values: Mapping[str, Any] = {}
        self.dialogue = Dialogue()

    def begin_step(self, step: int) -> None:
        self.step.stored, self.routing.step = None, step
        self.step.metrics = {}
        self.step.readers = self._readers
        self.stages.timeline.begin(step)

    def end_step(self, step: int) -> None:
        self.stages.timeline.end(step)
        self.step.end_measuring(step)
        # Validation samples, which are generated between steps, have another row
        # selection.
        self.step.readers = None

    def measured(self, done: int) -> Measured:
        """Return metrics and samples of the step that has just ended."""
        self.stages.status("log")
        batch, times = self._values["rollouts"], self.stages.timeline.step_metrics()
        seconds = times["time/step_ms"] / 1e3
        metrics = {
            # Default for responses that were drawn with the current weights. The step's
            # own metrics override it.
            "rollout/staleness": 0.0,
            **self.step.metrics,
            **times,
            **memory_metrics("actor"),
            "train/step_time_ms": seconds * 1e3,
            "train/tokens_per_sec": float(sum(sequence_lengths(batch).lengths))
            / seconds,
        }
        return Measured(metrics, batch, self._values["scores"])

    @property
    def held_out_readers(self) -> RowSelection | None:
        return self.routing.readers_of_validation()

    def share(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics

    def collect(self, state: dict[str, Any]) -> dict[str, Any]:
        counts = {name: trainable.counts for name, trainable in self.trained.items()}
        return state | {"coordinator": counts_to_state(counts)}

    def write_timeline(self, records: Records, run_dir: Path) -> None:
        if records.keeps:
            records.aside(
                lambda: self.stages.timeline.export(run_dir / "timeline.json")
            )

    def settle(self, records: Records, run_dir: Path) -> None:
        """Do nothing. No communication is pending, and one timeline represents all ranks."""
