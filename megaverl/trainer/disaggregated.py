"""Executor for roles on separate ranks.

Each role group runs the operators of its roles at its own pace and exchanges batches
and results with the others. After a step, the engines receive the new weights and the
reporter receives the metrics of all role groups.

With asynchronous rollouts, a role group that only generates or scores may run ahead of
training. The schedule fixes by how many steps before the run (`schedule.Schedule`), so
two runs are bitwise identical.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megaverl.controller.dialogue import Dialogue
from megaverl.controller.serving import run_blocking
from megaverl.data.batch import RolloutBatch
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.data.streaming import Prompts
from megaverl.distributed.collectives import broadcast_json, reduce_json, together
from megaverl.monitoring.console import Console
from megaverl.trainer.build import Builder
from megaverl.trainer.executor import (
    Executor,
    Measured,
    SampleRouting,
)
from megaverl.trainer.global_model import (
    GlobalModel,
    GlobalModelLink,
    ReplicaIsland,
)
from megaverl.trainer.islands import (
    Island,
    IslandUpdates,
    island_file,
    island_name,
    place_of,
    reporting_ranks,
)
from megaverl.trainer.job import Job, Stages, reporter
from megaverl.trainer.partial_rollouts import PARTIAL_FILE, InFlightUpdates
from megaverl.trainer.roles import make_roles
from megaverl.trainer.saving import Records, WorldMetrics
from megaverl.trainer.schedule import RolloutFolder, Schedule, WaitingSamples
from megaverl.trainer.step import RLStep
from megaverl.weights.reshard import HIDDEN
from megaverl.workers.decisions import (
    Decision,
    GradientReport,
    UpdateCounts,
    counts_to_state,
)
from megaverl.workers.gradient_replica import GradientReplica
from megaverl.workers.model import TrainingModel
from megaverl.workers.optimizers import MegatronGradients, MegatronTrainable
from megaverl.workers.reward import Scores
from megaverl.workers.trainable import TrainableModel


class Disaggregated(Executor):
    """Executor of a placement with several role groups."""

    def __init__(
        self,
        builder: Builder,
        job: Job,
        stages: Stages,
        console: Console,
        replayed: RolloutFolder | None,
    ) -> None:
        config = builder.config
        self.config, self.placement = config, job.context.placement
        self.context = job.context
        self.control, self.stages = self.context.control, stages
        self.dialogue = Dialogue()
        self.reporter = reporter(self.placement)
        self.roles = make_roles(builder, self.context, generates=replayed is None)
        self.step = RLStep(config, self.roles, replayed, warn=console.warn, span=stages)
        self.flow = self.step.flow(self.placement.ranks)
        self.routing = SampleRouting(self.step, self.context, self.reporter)
        self.lag = Schedule.of(config, self.placement).lag(self.context.rank)
        self.waiting = WaitingSamples(config, self.context)
        # Ranks outside of all islands use the number of the first island.
        self.island = next(
            (
                n
                for n, ranks in enumerate(self.placement.islands)
                if self.context.rank in ranks
            ),
            0,
        )
        # Islands take local steps.
        self._decides_alone = config.coordinator.islands_every > 1
        if self.island and self._decides_alone:
            # The engine has the first island's weights. This island's weights may
            # differ from them.
            self.step.trust_engine()
        self.generates = self.context.has("rollout")
        self.makes_samples = self.generates or self.context.has("reward")
        self._done = 0  # steps completed on all ranks
        # Since the engines finished their last samples.
        self._idle_since = time.perf_counter()
        self._measured: dict[int, dict[str, float]] = {}
        # Samples of the last step, on the reporter.
        self._values: Mapping[str, Any] = {}
        self.reports = WorldMetrics(self.context, self.reporter)

    # --- this rank's models -------------------------------------------------------------------------------------------

    @property
    def trained(self) -> dict[str, TrainableModel]:
        # Replicas have no state but the weights, which the global model sends them.
        if self._replicas:
            return {
                role: trainable
                for role, trainable in self.roles.trained.items()
                if role not in self._replicas
            }
        # Islands with local steps have different weights, so each is saved under its
        # own name.
        number = self.island if self._decides_alone else 0
        return {
            island_name(role, number if self._on_islands(role) else 0): trainable
            for role, trainable in self.roles.trained.items()
        }

    @property
    def saved(self) -> dict[str, TrainableModel]:
        """Return the models that this rank saves. Islands that join every update are
        identical, so only the first one saves.
        """
        return {} if self.island and not self._decides_alone else self.trained

    @property
    def exported(self) -> dict[str, TrainingModel]:
        return (
            self.roles.exported
            if self.context.rank in self.placement.islands[0]
            else {}
        )

    def _on_islands(self, role: str) -> bool:
        return self.placement.colocated(place_of(role), "actor")

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

        Raises:
            CheckpointError: the state of an island is missing from the checkpoint, or of another grid.
        """
        super().prepare_updates(counts, resumed_from)
        config, islands = self.config, len(self.placement.islands)
        global_models = self._link_models()
        for role, trainable in self.roles.trained.items():
            trainable.name = role
            if role in global_models:
                continue
            if reporters := reporting_ranks(config, self.placement, role):
                trainable.ask = partial(self._ask, self.context.rank in reporters)
            if isinstance(trainable, GradientReplica):
                trainable.counts = counts.get(role, UpdateCounts())
            elif islands > 1 and self._on_islands(role):
                trainable.islands = Island(
                    self.context, trainable, config.coordinator, trainable.counts.steps
                )
        self._global_models = global_models
        self._island_updates = IslandUpdates(
            config, self.context, counts, global_models
        )
        # A missing or wrong file on one rank is raised on all ranks.
        if resumed_from is not None:
            with together(self.control):
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
        timeout = timedelta(
            minutes=self.config.reshard.timeout_minutes
            or self.config.run.timeout_minutes
        )
        is_global = bool(self.roles.global_models)
        for role, trainable in self.roles.trained.items():
            if not is_global and role not in self._replicas:
                continue
            assert isinstance(trainable, MegatronGradients)
            with trainable.present():
                link = GlobalModelLink(
                    self.context, role, trainable, self.config.reshard, timeout
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
        super().start(done)
        self._done, self.stages.step = done, None

    def begin_step(self, step: int) -> None:
        self.routing.step = step
        self.step.stored, self.step.metrics = None, {}
        self.stages.timeline.begin(step)

    def end_step(self, step: int) -> None:
        """Collect the metrics of the step, and drop stored samples that have now been trained on."""
        self.stages.timeline.end(step)
        self.step.end_measuring(step)
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
        if not self.context.has("rollout"):
            of_reshard = [
                name
                for name in metrics
                if name.startswith("reshard/") or name == "time/reshard_ms"
            ]
            metrics = {
                name: value
                for name, value in metrics.items()
                if name not in of_reshard or name == HIDDEN
            }
        self._measured[step] = self.reports.of_this_rank(metrics, step)

    def join_islands(self, role: str, step: int) -> None:
        self._island_updates.serve(role, step)

    def begin_samples(self, step: int, prompts: Prompts) -> None:
        """Record the prompts' position, and the weights that the samples will be trained from."""
        groups = self.step.in_progress
        if isinstance(groups, InFlightUpdates) and self.roles.sync is not None:
            # The engines run ahead of training. This is the number of updates that will
            # be made before the step trains.
            num_updates = max(
                0, step - max(self._done, self.config.algorithm.critic_warmup_steps)
            )
            groups.trains_from = self.roles.sync.weight_version + num_updates
        if self.waiting.is_here:
            # Saved before the prompts are taken, because a resumed run takes the
            # prompts of untrained steps again, even if their responses are restored.
            self.waiting.begin(step, prompts.state_dict())

    def end_samples(self, step: int, rollouts: RolloutBatch) -> None:
        """Measure staleness and waiting time of the samples, and keep samples that are ahead of training."""
        self.step.metrics |= self.waiting.metrics(step - self._done, self.step.metrics)
        if self._keeps_waiting:
            self.waiting.keep(
                step,
                self.roles.engines.weight_version,
                {"rollouts": rollouts},
                self.step.metrics,
            )
        self._idle_since = time.perf_counter()

    def end_scores(self, step: int, scores: Scores) -> None:
        # Bytes that arrived for scoring belong to the step that was scored, not to the
        # step that trains.
        self.reports.book(step)
        if self._keeps_waiting:
            self.waiting.add_scores(step, scores, self.step.metrics)

    def begin_sync(self) -> None:
        """Count the time for which the engines waited for these weights."""
        if self.context.has("rollout"):
            self.waiting.add_pause(time.perf_counter() - self._idle_since)

    @property
    def _keeps_waiting(self) -> bool:
        """Return whether this rank keeps samples that are generated ahead, to save them in a checkpoint."""
        return self.waiting.is_here and self.lag > 0 and self.step.replayed is None

    # --- after a step -------------------------------------------------------------------------------------------------

    def measured(self, done: int) -> Measured | None:
        """Send the metrics of each role group to the reporter. Return metrics and samples there, and None elsewhere."""
        metrics = self.reports.of_all(self._measured.pop(done - 1))
        if self.context.rank != self.reporter:
            return None
        batch = self._values["rollouts"]
        num_tokens = float(sum(sequence_lengths(batch).lengths))
        metrics["train/tokens_per_sec"] = (
            num_tokens / metrics["train/step_time_ms"] * 1e3
        )
        return Measured(metrics, batch, self._values["scores"])

    def share(self, metrics: dict[str, float]) -> dict[str, float]:
        return dict(broadcast_json(metrics, self.reporter, self.control))

    # --- checkpoints and shutdown -------------------------------------------------------------------------------------

    def collect(self, state: dict[str, Any]) -> dict[str, Any]:
        """Merge the parts of a checkpoint's state, each from the rank that owns it."""
        part: dict[str, Any] = {}
        if self.context.rank == self.reporter:
            of_reporter = (
                "next_step",
                "kl",
                "tokenizer",
                "best",
                "metrics_bytes",
                "cut_off",
            )
            part = {name: state[name] for name in of_reporter}
        if self.context.rank == self.placement.ranks["rollout"][0]:
            part |= {
                name: state[name] for name in ("weight_version", "generation_budget")
            }
            part["ahead"] = self.waiting.facts
            part["partial_groups"] = state["partial_groups"]
            # The engines may be ahead. The resumed run continues with the prompts of
            # the first step that has not been trained on.
            part["sampler"] = self.waiting.sampler(self._done) or state["sampler"]
        if self.context.world_rank == 0:
            counts = {name: trainable.counts for name, trainable in self.saved.items()}
            part["coordinator"] = counts_to_state(counts)
        return dict(reduce_json(part, _merge_states, self.control))

    def own_files(self) -> dict[str, bytes]:
        """Return the state of this rank's islands, unfinished responses, and samples that wait for training."""
        islands = {
            island_file(role, self.context.rank): island.state()
            for role, island in self._islands.items()
        }
        groups = self.step.in_progress
        if self.waiting.is_here and groups is not None and groups.groups:
            with TemporaryDirectory() as folder:
                groups.writer()(Path(folder) / PARTIAL_FILE)
                islands[PARTIAL_FILE] = (Path(folder) / PARTIAL_FILE).read_bytes()
        return islands | self.waiting.files

    def write_timeline(self, records: Records, run_dir: Path) -> None:
        records.aside(
            lambda: self.reports.write_timeline(self.stages.timeline, run_dir)
        )

    def settle(self, records: Records, run_dir: Path) -> None:
        self.write_timeline(records, run_dir)
        records.aside(lambda: self.reports.join_timelines(run_dir))


def _merge_states(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the parts of a checkpoint's state. Each world has the counts of its own models."""
    merged = {name: value for part in parts for name, value in part.items()}
    counts: dict[str, dict[str, int]] = {}
    for part in parts:
        for key, of_models in part.get("coordinator", {}).items():
            counts[key] = counts.get(key, {}) | of_models
    return merged | {"coordinator": counts}
