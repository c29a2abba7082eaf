"""State of a run on one rank: its roles, the metrics of running steps, and its part of a checkpoint.

With asynchronous rollouts, ranks that only generate or score run ahead of training by
whole steps (`schedule.Schedule`). Metrics and samples therefore belong to a step, not
to the moment at which they are made.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megaverl.config import Config
from megaverl.controller.dialogue import Dialogue
from megaverl.controller.serving import run_blocking
from megaverl.data.batch import RolloutBatch
from megaverl.data.distributed_batch import RowSelection
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.data.streaming import Prompts
from megaverl.distributed.collectives import broadcast_json, reduce_json, together
from megaverl.distributed.job_context import JobContext
from megaverl.monitoring.console import Console
from megaverl.platform.host_memory import trim_heap
from megaverl.trainer.global_model import (
    GlobalModel,
    GlobalModelLink,
    ReplicaIsland,
)
from megaverl.trainer.group_metrics import CollectedMetrics, SharedMetrics, StepMetrics
from megaverl.trainer.islands import (
    Island,
    IslandUpdates,
    island_file,
    island_name,
    place_of,
    reporting_ranks,
)
from megaverl.trainer.job import Stages, reporter
from megaverl.trainer.partial_rollouts import PARTIAL_FILE, InFlightUpdates
from megaverl.trainer.roles import Roles
from megaverl.trainer.sample_routing import SampleRouting
from megaverl.trainer.saving import Records
from megaverl.trainer.schedule import Schedule
from megaverl.trainer.step import RLStep
from megaverl.trainer.step_flow import make_flow
from megaverl.trainer.stored_rollouts import RolloutFolder, StoredRollouts
from megaverl.trainer.waiting_samples import WaitingSamples
from megaverl.weights.reshard import HIDDEN
from megaverl.workers.decisions import (
    Decision,
    GradientReport,
    Rules,
    UpdateCounts,
    counts_to_state,
)
from megaverl.workers.gradient_replica import GradientReplica
from megaverl.workers.model import TrainingModel
from megaverl.workers.optimizers import MegatronGradients, MegatronTrainable
from megaverl.workers.reward import Scores
from megaverl.workers.trainable import TrainableModel

# Steps after which freed host memory goes back to the operating system.
TRIM_EVERY = 10


@dataclass(frozen=True)
class Measured:
    """Metrics and samples of a step, for the records."""

    metrics: dict[str, float]
    rollouts: RolloutBatch
    scores: Scores


class RunState:
    """State of a run on one rank. Every rank of the job calls the same methods in the same order.

    Args:
        context: this rank's place in the job.
        roles: this rank's part of every role.
        replayed: folder of stored rollouts that replace the engines, or None.

    Attributes:
        step: operators of a step.
        flow: compiled flow of the operators.
        stages: reports what this rank is doing.
        routing: assignment of samples to ranks.
        dialogue: lets running calls ask the program.
        generates: whether this rank has an engine.
        makes_samples: whether this rank generates or scores.
    """

    def __init__(
        self,
        config: Config,
        roles: Roles,
        context: JobContext,
        stages: Stages,
        console: Console,
        replayed: RolloutFolder | None = None,
    ) -> None:
        placement = context.placement
        self.config, self.context, self.stages = config, context, stages
        self.roles = roles
        self.dialogue = Dialogue()
        self.step = RLStep(config, self.roles, replayed, warn=console.warn)
        self.is_shared = placement.is_colocated
        self.flow = make_flow(self.step, None if self.is_shared else placement.ranks)
        self.reporter = reporter(placement)
        self.routing = SampleRouting(self.step, context, self.reporter)
        # With roles on separate ranks, the program assigns the rows (`Run.assign`).
        self._readers = self.routing.readers(self.flow) if self.is_shared else None
        self.generates = context.has("rollout")
        self.makes_samples = self.generates or context.has("reward")
        self._is_ahead = Schedule.of(config, placement).engines_ahead > 0
        self.waiting = WaitingSamples(config, context)
        self.step_metrics: StepMetrics = CollectedMetrics(context, self.reporter)
        if self.is_shared:
            is_reporter = context.rank == self.reporter
            self.step_metrics = SharedMetrics(writes_timeline=is_reporter)
        # Ranks outside of all islands use the number of the first island.
        self.island = next(
            (n for n, ranks in enumerate(placement.islands) if context.rank in ranks),
            0,
        )
        self._takes_local_steps = config.coordinator.islands_every > 1
        if self.island and self._takes_local_steps:
            # The engine has the first island's weights. This island's weights may
            # differ from them.
            self.step.trust_engine()
        self._done = 0  # steps completed on all ranks
        # Since the engines finished their last samples.
        self._idle_since = time.perf_counter()
        self._measured: dict[int, dict[str, float]] = {}
        # Samples of the last step, on the ranks that keep them for the records.
        self._samples: tuple[RolloutBatch, Scores]

    # --- this rank's models -------------------------------------------------------------------------------------------

    @property
    def trained(self) -> dict[str, TrainableModel]:
        """Return this rank's trained models, by the role's name in a checkpoint."""
        # Replicas have no state but the weights, which the global model sends them.
        if self._replicas:
            return {
                role: trainable
                for role, trainable in self.roles.trained.items()
                if role not in self._replicas
            }
        # Islands with local steps have different weights, so each is saved under its
        # own name.
        number = self.island if self._takes_local_steps else 0
        return {
            island_name(
                role, number if number and self._on_islands(role) else 0
            ): trainable
            for role, trainable in self.roles.trained.items()
        }

    @property
    def saved(self) -> dict[str, TrainableModel]:
        """Return the models that this rank saves. Islands that join every update are
        identical, so only the first one saves.
        """
        return {} if self.island and not self._takes_local_steps else self.trained

    @property
    def exported(self) -> dict[str, TrainingModel]:
        """Return the models that this rank exports, by the name of their folder."""
        is_first = self.context.rank in self.context.placement.islands[0]
        return self.roles.exported if is_first else {}

    def _on_islands(self, role: str) -> bool:
        return self.context.placement.colocated(place_of(role), "actor")

    @property
    def _replicas(self) -> dict[str, GradientReplica]:
        """Return this rank's models whose optimizers are on the coordinator's ranks, by role."""
        return {
            role: trainable
            for role, trainable in self.roles.trained.items()
            if isinstance(trainable, GradientReplica)
        }

    def prepare_updates(
        self, counts: Mapping[str, UpdateCounts], resumed_from: Path | None
    ) -> None:
        """Prepare this rank's models for decisions over their updates, and for the islands' exchange.

        Args:
            counts: counts of updates from the checkpoint, by the model's name in it.
            resumed_from: folder of the checkpoint that the run resumed from, or None.

        Raises:
            CheckpointError: the state of an island is missing from the checkpoint, or of another grid.
        """
        config, placement = self.config, self.context.placement
        rules = Rules.from_config(config)
        for name, trainable in self.trained.items():
            trainable.rules = rules
            trainable.counts = counts.get(name, UpdateCounts())
        has_islands = len(placement.islands) > 1
        global_models = self._link_models()
        for role, trainable in self.roles.trained.items():
            trainable.name = role
            if role in global_models:
                continue
            if reporters := reporting_ranks(config, placement, role):
                trainable.ask = partial(self._ask, self.context.rank in reporters)
            if isinstance(trainable, GradientReplica):
                trainable.counts = counts.get(role, UpdateCounts())
            elif has_islands and self._on_islands(role):
                trainable.islands = Island(
                    self.context, trainable, config.coordinator, trainable.counts.steps
                )
        self._global_models = global_models
        self._island_updates = IslandUpdates(
            config, self.context, counts, global_models
        )
        # A missing or wrong file on one rank is raised on all ranks.
        if resumed_from is not None and has_islands:
            with together(self.context.control):
                for role, island in self._islands.items():
                    island.load_state(
                        resumed_from / island_file(role, self.context.rank)
                    )

    def _link_models(self) -> dict[str, GlobalModel]:
        """Connect replicas with their global models, and send them the weights.

        Collective over the ranks of the islands and the coordinator.

        Returns:
            Global models of this rank, by role.
        """
        global_models: dict[str, GlobalModel] = {}
        if not self.config.aggregates_gradients:
            return global_models
        is_global = bool(self.roles.global_models)
        for role, trainable in self.roles.trained.items():
            if not is_global and role not in self._replicas:
                continue
            assert isinstance(trainable, MegatronGradients)
            with trainable.present():
                link = GlobalModelLink(
                    self.context,
                    role,
                    trainable,
                    self.config.reshard,
                    self.config.reshard_timeout,
                )
                link.send_weights()
            # The transfer at the start belongs to no step.
            link.take_counts()
            if isinstance(trainable, GradientReplica):
                trainable.islands = ReplicaIsland(self.context, trainable, link)
            elif isinstance(trainable, MegatronTrainable):
                global_models[role] = GlobalModel(self.context, trainable, link)
        return global_models

    def _ask(self, reports: bool, report: GradientReport) -> Decision:
        """Return the program's decision about an update of this rank.

        Args:
            reports: whether this rank reports for its role.
        """
        return run_blocking(self.dialogue.ask(report if reports else None, Decision))

    @property
    def _islands(self) -> dict[str, Island]:
        """Return this rank's parts of islands, by role."""
        islands = {role: trainable.islands for role, trainable in self.trained.items()}
        return {
            role: island
            for role, island in islands.items()
            if isinstance(island, Island)
        }

    # --- during a step ------------------------------------------------------------------------------------------------

    def start(self, done: int) -> None:
        """Begin a run of which `done` steps are completed."""
        self.routing.first_step = done
        self._done, self.stages.step = done, None

    def begin_step(self, step: int) -> None:
        """Start to measure a step."""
        self.routing.step = step
        self.step.stored, self.step.metrics = None, {}
        self.step.readers = self._readers
        self.stages.timeline.begin(step)

    def end_step(self, step: int) -> None:
        """Collect the metrics of the step, and drop stored samples that have now been trained on."""
        self.stages.timeline.end(step)
        self.step.end_measuring(step)
        # Validation samples, which are generated between steps, have another row
        # selection.
        self.step.readers = None
        self._done = step + 1
        self.waiting.forget(self._done)
        if step >= self.config.algorithm.critic_warmup_steps:
            # Each training step after the critic's warm-up gives the engines one new
            # weight version.
            self.step.newest_version += 1
        for model in self._global_models.values():
            for name, value in model.link.take_counts().items():
                self.step.metrics[name] = self.step.metrics.get(name, 0.0) + value
        metrics = self.step.metrics | self.stages.timeline.step_metrics()
        # Resharding is measured on the engines' ranks, which receive the weights.
        if not self.generates:
            metrics = {
                name: value
                for name, value in metrics.items()
                if name == HIDDEN
                or not (name.startswith("reshard/") or name == "time/reshard_ms")
            }
        self._measured[step] = self.step_metrics.measure(metrics, step)
        if self._done % TRIM_EVERY == 0:
            trim_heap()

    def join_islands(self, role: str, step: int) -> None:
        """Sum what the islands of a role send in its next updates. This happens on the coordinator's rank only."""
        self._island_updates.serve(role, step)

    @contextmanager
    def sampling(self, step: int) -> Iterator[None]:
        """Attribute metrics and stages inside to the samples of a step, which may be ahead of the one that trains."""
        with self.step.measuring(step), self.stages.in_step(step):
            yield

    def begin_samples(self, step: int, prompts: Prompts) -> None:
        """Record the prompts' position, and the weights that the samples will be trained from.

        Called when the engines begin the samples of a step, before its prompts are taken.
        """
        groups = self.step.in_progress
        if isinstance(groups, InFlightUpdates) and self.roles.sync is not None:
            # The engines run ahead of training. This is the number of updates that will
            # be made before the step trains.
            num_updates = max(
                0, step - max(self._done, self.config.algorithm.critic_warmup_steps)
            )
            groups.trains_from = self.roles.sync.weight_version + num_updates
        if self.waiting.is_here and not self.is_shared:
            # Saved before the prompts are taken, because a resumed run takes the
            # prompts of untrained steps again, even if their responses are restored.
            self.waiting.begin(step, prompts.state_dict())

    def end_samples(self, step: int, rollouts: RolloutBatch) -> None:
        """Measure staleness and waiting time of the samples, and keep samples that are ahead of training."""
        if not self.is_shared:
            self.step.metrics |= self.waiting.metrics(
                step - self._done, self.step.metrics
            )
        if self._keeps_waiting:
            version = self.roles.engines.weight_version
            self.waiting.keep(
                StoredRollouts(step, version, rollouts, metrics=self.step.metrics)
            )
        self._idle_since = time.perf_counter()

    def end_scores(self, step: int, scores: Scores) -> None:
        """Record the rewards of a step's samples."""
        # Bytes that arrived for scoring belong to the step that was scored, not to the
        # step that trains.
        self.step_metrics.book(step)
        if self._keeps_waiting:
            self.waiting.add_scores(step, scores, self.step.metrics)

    def begin_sync(self) -> None:
        """Count the time for which the engines waited for new weights."""
        if self.generates:
            self.waiting.paused += time.perf_counter() - self._idle_since

    @property
    def _keeps_waiting(self) -> bool:
        """Return whether this rank keeps samples that are generated ahead, to save them in a checkpoint."""
        is_ahead = self._is_ahead and self.step.replayed is None
        return self.waiting.is_here and is_ahead

    # --- after a step -------------------------------------------------------------------------------------------------

    @property
    def held_out_readers(self) -> RowSelection | None:
        """Return the row selection for scoring and recording a validation. None: every rank gets all responses."""
        return self.routing.readers_of_validation() if self.is_shared else None

    def keep_samples(self, rollouts: RolloutBatch, scores: Scores) -> None:
        """Keep the step's samples for the records."""
        self._samples = rollouts, scores

    def measured(self, done: int) -> Measured | None:
        """Return metrics and samples of the last of `done` steps, or None on ranks that do not have them."""
        self.stages.status("log")
        metrics = self.step_metrics.collect(self._measured.pop(done - 1))
        if not metrics:
            return None
        batch, scores = self._samples
        num_tokens = float(sum(sequence_lengths(batch).lengths))
        metrics["train/tokens_per_sec"] = (
            num_tokens / metrics["train/step_time_ms"] * 1e3
        )
        return Measured(metrics, batch, scores)

    def share(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return, on every rank, the metrics that the reporter has. Collective over all ranks."""
        return dict(broadcast_json(metrics, self.reporter, self.context.control))

    # --- checkpoints and shutdown -------------------------------------------------------------------------------------

    def collect(
        self, of_reporter: Mapping[str, Any], of_engines: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Merge the parts of a checkpoint's state, each from the rank that owns it. Every rank gets the result.

        Args:
            of_reporter: part of the rank that keeps the records.
            of_engines: part of the engines' first rank.
        """
        part: dict[str, Any] = {}
        if self.context.rank == self.reporter:
            part |= of_reporter
        if self.context.rank == self.context.placement.ranks["rollout"][0]:
            part |= of_engines
            part["ahead"] = self.waiting.facts
            # The engines may be ahead. The resumed run continues with the prompts of
            # the first step that has not been trained on.
            if (sampler := self.waiting.sampler(self._done)) is not None:
                part["sampler"] = sampler
        if self.context.group_rank == 0:
            counts = {name: trainable.counts for name, trainable in self.saved.items()}
            part["coordinator"] = counts_to_state(counts)
        return dict(reduce_json(part, _merge_states, self.context.control))

    def own_files(self) -> dict[str, bytes]:
        """Return the files of a checkpoint that only this rank writes, by name.

        They are the state of its islands, unfinished responses, and samples that wait
        for training.
        """
        files = {
            island_file(role, self.context.rank): island.state()
            for role, island in self._islands.items()
        }
        groups = self.step.in_progress
        if self.waiting.is_here and groups is not None and groups.groups:
            files[PARTIAL_FILE] = groups.to_bytes()
        return files | self.waiting.files

    def write_timeline(self, records: Records, run_dir: Path) -> None:
        """Write the spans of this rank's stages as a timeline file."""
        records.aside(
            lambda: self.step_metrics.write_timeline(self.stages.timeline, run_dir)
        )

    def settle(self, records: Records, run_dir: Path) -> None:
        """Wait for pending communication after the last step, and merge all ranks' timelines."""
        self.write_timeline(records, run_dir)
        records.aside(lambda: self.step_metrics.join_timelines(run_dir))


def _merge_states(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the parts of a checkpoint's state. Each role group has the counts of its own models."""
    merged = {name: value for part in parts for name, value in part.items()}
    counts: dict[str, dict[str, int]] = {}
    for part in parts:
        for key, of_models in part.get("coordinator", {}).items():
            counts[key] = counts.get(key, {}) | of_models
    return merged | {"coordinator": counts}
