"""One rank's roles and what it measures: where all roles share all ranks (`Colocated`), or where they have ranks of
their own (`disaggregated.Disaggregated`). And which samples of a step each rank of a role reads; they alone go to it,
where nothing on it reads all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from megaverl.algorithms import advantage_estimators, policy_losses
from megaverl.config import Config
from megaverl.coordinator import CoordinatorClient, LocalCoordinator, Progress, Rules
from megaverl.data.batch import RolloutBatch
from megaverl.data.held_rows import Readers
from megaverl.data.prefix_packing import SequenceLengths, sequence_lengths
from megaverl.data.streaming import Prompts
from megaverl.dataflow import DataFlow
from megaverl.distributed.worlds import Fabric
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
from megaverl.workers.micro_batches import Updated, rows_of_updates
from megaverl.workers.model import TrainingModel
from megaverl.workers.reward import Scores
from megaverl.workers.trainable import TrainableModel

# Operators that say what they read of the rollouts; any other (`mix`, a user's own) reads all of it.
SELECTIVE = ("reward", "ref_log_probs", "old_log_probs", "score_norms", "implicit_rewards", "values", "advantages")
TOKENS = frozenset({"input_ids", "generated_ids"})
# Operators that work with a rank's own samples alone; any other wants all of them on every rank.
OF_HELD = frozenset({*SELECTIVE, "rollout", "critic_update", "actor_update", "reshard"} - {"implicit_rewards"})


# Lengths of a step's samples -> which of them each rank reads.
RowsRead = Callable[[SequenceLengths], Rows]


class SampleRouting:
    """Decides which samples of a step each rank works on, from what its roles will do with them.

    Args:
        reporter: the rank that keeps the run's records.

    Attributes:
        step: the running one, counted from 0.
        first_step: of this start of the run.
    """

    def __init__(self, steps: RLStep, fabric: Fabric, reporter: int) -> None:
        self._steps, self.fabric, self._reporter = steps, fabric, reporter
        self.config, self.roles = steps.config, steps.roles
        self.step = self.first_step = 0

    def rows_read(self) -> dict[str, RowsRead]:
        """Return what operators read, by name; the roles are asked when the lengths are known."""
        return {
            "reward": self._reward,
            "ref_log_probs": self._reference,
            "old_log_probs": self._old_log_probs,
            "score_norms": self._scored,
            "implicit_rewards": self._implicit,
            "values": self._critic,
            "advantages": self._trained,
        }

    def readers(self, flow: DataFlow) -> Readers | None:
        """Who works on which samples of a step, of the ranks of this world; None where something reads all."""
        config, operators = self.config, [each.name for each in flow.plan.operators]
        here = [each.name for each in flow.plan.operators if not {*each.roles}.isdisjoint(self.fabric.world.roles)]
        algorithm, reads = config.algorithm, self.rows_read()
        made_together = config.environment.name is not None or config.rollout.function is not None
        looks_at_all = made_together or algorithm.dynamic_sampling.metric is not None or self._reads_all
        selects = "selected" in policy_losses.get(algorithm.policy_loss_name).inputs
        selects = selects or algorithm.top_entropy is not None or algorithm.positive_coef > 0
        estimator = advantage_estimators.get(algorithm.advantage_name)
        if looks_at_all or selects or not estimator.of_groups or not OF_HELD.issuperset(operators):
            return None
        some = [reads[name] for name in here if name in reads]
        return Readers(self.fabric, lambda lengths: join_rows(rows(lengths) for rows in some))

    def readers_of_validation(self) -> Readers:
        """Who scores which responses of a validation; and the first of them are written down."""

        def rows(lengths: SequenceLengths) -> Rows:
            return join_rows([self._reward(lengths), self._written(lengths, self.config.trainer.save_samples)])

        return Readers(self.fabric, rows)

    def _written(self, lengths: SequenceLengths, count: int) -> Rows:
        return {self._reporter: range(min(count, len(lengths)))}

    def _reward(self, outline: SequenceLengths) -> Rows:
        return self._on("reward", self.roles.reward.rows(outline))

    def _reference(self, outline: SequenceLengths) -> Rows:
        assert self.roles.reference is not None
        return self._on("reference", self.roles.reference.rows(outline))

    def _old_log_probs(self, outline: SequenceLengths) -> Rows:
        wanted = self.config.shares_backbone or self._steps.needs_log_probs(self.step) or self.step == self.first_step
        return self._scored(outline) if wanted else {}

    def _scored(self, outline: SequenceLengths) -> Rows:
        """Every island scores all samples."""
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
        return join_rows([self._values(outline), self._updates("critic", local(critic), outline)])

    def _trained(self, outline: SequenceLengths) -> Rows:
        """What the updates train on, and what is written down."""
        if self._reads_all:
            return dict.fromkeys(self.fabric.placement.ranks["actor"], range(len(outline)))
        count = len(outline) if self.config.trainer.store_rollouts else self.config.trainer.save_samples
        return join_rows([self._written(outline, count), self._updates("actor", local(self.roles.actor), outline)])

    @property
    def _reads_all(self) -> bool:
        """Whether tokens of all samples are looked at where they are weighed."""
        return self.config.algorithm.rollout_filter is not None or not TOKENS.isdisjoint(self._estimator_reads)

    @property
    def _estimator_reads(self) -> frozenset[str]:
        estimator = advantage_estimators.get(self.config.algorithm.advantage_name)
        return frozenset(estimator.inputs) | frozenset(estimator.optional_inputs)

    def _updates(self, role: str, trained: Updated, outline: SequenceLengths) -> Rows:
        return join_rows(
            dict(zip(ranks, rows_of_updates(trained, outline, self.step, part), strict=True))
            for part, ranks in enumerate(self._worlds(role))
        )

    def _on(self, role: str, rows: Sequence[Sequence[int]]) -> Rows:
        """Where each island has all of a role, each works on all samples."""
        return join_rows(dict(zip(ranks, rows, strict=True)) for ranks in self._worlds(role))

    def _worlds(self, role: str) -> Sequence[Sequence[int]]:
        """The ranks of a role; of each island where it is on those."""
        placement = self.fabric.placement
        return placement.islands if placement.colocated(role, "actor") else (placement.ranks[role],)


@dataclass(frozen=True)
class Measured:
    """What a step has left for the records."""

    metrics: dict[str, float]
    rollouts: RolloutBatch
    scores: Scores


class Executor(Protocol):
    """This rank's roles and what its steps measure. Every rank of the job calls the same methods in the same order.

    Attributes:
        roles: this rank's part of every role.
        step: the operators. flow: those of a step, compiled.
        stages: what this rank is doing. fabric: its place in the job. routing: who works on which samples.
        control: all ranks of the job; None: the default group.
        generates: this rank has an engine.
        makes_samples: this rank generates or scores.
    """

    roles: Roles
    step: RLStep
    flow: DataFlow
    stages: Stages
    fabric: Fabric
    routing: SampleRouting
    control: dist.ProcessGroup | None = None
    generates: bool = True
    makes_samples: bool = True
    _values: Mapping[str, Any]  # samples of the last step, for the records

    def start(self, done: int) -> None:
        """Begin a run that has `done` steps behind it."""
        self.routing.first_step = done

    def begin_step(self, step: int) -> None:
        """Start to measure a step."""

    def begin_samples(self, step: int, prompts: Prompts) -> None:
        """Note that the engines begin the samples of a step, before its prompts are taken."""
        return

    def end_samples(self, step: int, rollouts: RolloutBatch) -> None:
        """Note what the engines have generated for a step, which may be ahead of training."""
        return

    def end_scores(self, step: int, scores: Scores) -> None:
        """Note the rewards of a step's samples."""
        return

    def begin_sync(self) -> None:
        """Note that the engines are about to receive new weights."""
        return

    def keep_samples(self, rollouts: RolloutBatch, scores: Scores) -> None:
        """Keep what the records need of the step's samples."""
        self._values = {"rollouts": rollouts, "scores": scores}

    def end_step(self, step: int) -> None:
        """Take what the step has measured."""

    def join_islands(self, step: int) -> None:
        """Add up what islands of the actor send in the updates of a step, on the coordinator's rank."""
        return

    def measured(self, done: int) -> Measured | None:
        """What the last of `done` steps has left; None on ranks that do not have it."""

    @property
    def held_out_readers(self) -> Readers | None:
        """Who scores, and writes down, which responses of a validation; None: every rank gets all of them."""
        return None

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
    """All roles on all ranks."""

    def __init__(
        self, builder: Builder, stages: Stages, console: Console, replayed: RolloutFolder | None, fabric: Fabric
    ) -> None:
        self.config, self.stages = builder.config, stages
        own_agents = self.config.environment.agents == "own"
        self.roles = (agents_roles if own_agents else make_roles)(builder, generates=replayed is None)
        make_step = AgentsStep if own_agents else RLStep
        self.step = make_step(self.config, self.roles, replayed, warn=console.warn, span=stages)
        self.flow = self.step.flow()
        self.fabric = fabric
        self.routing = SampleRouting(self.step, fabric, reporter(fabric.placement))
        self._readers = self.routing.readers(self.flow)
        self._values: Mapping[str, Any] = {}

    def begin_step(self, step: int) -> None:
        self.step.stored, self.routing.step = None, step
        self.step.metrics = {}
        self.step.readers = self._readers
        self.stages.timeline.begin(step)

    def end_step(self, step: int) -> None:
        self.stages.timeline.end(step)
        self.step.end_measuring(step)
        self.step.readers = None

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
            "train/tokens_per_sec": float(sum(sequence_lengths(batch).lengths)) / seconds,
        }
        return Measured(metrics, batch, self._values["scores"])

    @property
    def held_out_readers(self) -> Readers | None:
        return self.routing.readers_of_validation()

    def share(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics

    def coordinate(self, progress: Progress, resumed_from: Path | None) -> None:
        self._coordinator = LocalCoordinator(list(self.trained), rules_of(self.config), progress)
        for role, trainable in self.trained.items():
            place = trainable.scheduler.num_steps
            trainable.coordinator = CoordinatorClient(self._coordinator, role, progress, place)

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
