"""Roles on ranks of their own: each world goes through the steps by itself, and all agree in between.

A rank runs the operators of its roles; batches and results come and go over the fabric. After `done` steps the engines
get the new weights and the reporter everybody's metrics. With asynchronous rollouts a world that only generates or
scores is allowed to be ahead of that by some steps: how many is settled before the run (`schedule.Schedule`), so that
two runs are the same to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megaverl.coordinator import Coordinator, CoordinatorClient, Progress
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.data.streaming import Prompts
from megaverl.dataflow import in_one_order
from megaverl.dataflow.carrier import TensorChannel
from megaverl.dataflow.plan import CompiledFlow, Edge
from megaverl.dataflow.streaming import StreamingCarrier
from megaverl.distributed.collectives import barrier, broadcast_json, reduce_json, together
from megaverl.errors import ConfigError
from megaverl.monitoring.console import Console
from megaverl.trainer.build import Builder
from megaverl.trainer.executor import (
    SELECTIVE,
    AfterOperator,
    Executor,
    Measured,
    SampleRouting,
    rules_of,
    shares_of,
    speakers_of,
)
from megaverl.trainer.islands import Island, IslandUpdates, island_file, island_name, participants, place_of
from megaverl.trainer.job import Job, Stages, reporter
from megaverl.trainer.partial_rollouts import PARTIAL_FILE, InFlightUpdates
from megaverl.trainer.roles import REWARD_MODEL, make_roles
from megaverl.trainer.saving import Records, WorldMetrics
from megaverl.trainer.schedule import RolloutFolder, Schedule, StoredRollouts, WaitingSamples
from megaverl.trainer.step import RLStep
from megaverl.trainer.validation import Evaluation, Validation
from megaverl.weights.reshard import HIDDEN
from megaverl.workers.model import TrainingModel
from megaverl.workers.reward import Scores
from megaverl.workers.trainable import TrainableModel
from megaverl.workers.weight_sync import WeightSync


class Disaggregated(Executor):
    """A placement with several worlds.

    Args:
        agree_until: takes part in what follows every step up to a number of them, which other ranks are at.
        is_given: a program gives the samples of each step, on every rank.

    Raises:
        ConfigError: a program's own loop, and engines that are to be ahead of training, or samples scored in shares.
    """

    def __init__(
        self,
        builder: Builder,
        job: Job,
        stages: Stages,
        console: Console,
        replayed: RolloutFolder | None,
        agree_until: Callable[[int], object],
        is_given: bool,
    ) -> None:
        config = builder.config
        ahead = config.rollout.async_rollout
        if is_given and (ahead or config.trainer.score_shares > 1):
            raise ConfigError(
                f"{'rollout.async_rollout' if ahead else 'trainer.score_shares'}: a loop of one's own generates and "
                "trains in turn. Leave it out, or use RLTrainer(...).train()."
            )
        self.config, self.placement = config, job.fabric.placement
        self.fabric = replace(job.fabric, rows=None)  # but for the flow's edges that can bear it
        self.control, self.stages = self.fabric.control, stages
        self._liveness, self._agree_until, self._is_given = job.liveness, agree_until, is_given
        self.reporter = reporter(self.placement)
        self.carrier = StreamingCarrier(
            job.fabric,
            known=(Scores,),
            selective=SELECTIVE,
            speakers=speakers_of(config, self.placement),
            samples_per_step=config.samples_per_step,
            ahead=config.rollout.async_rollout and config.rollout.max_staleness > 0,
            shares=shares_of(config),
        )
        self._channel = TensorChannel(self.fabric)
        self.roles = make_roles(builder, self.fabric, generates=replayed is None)
        self.step = RLStep(config, self.roles, replayed, warn=console.warn, span=stages, is_given=is_given)
        self.flow = self.step.flow(self.placement.ranks)
        if is_given:
            stages.timeline.roles |= {"rollout": "rollout"} if self.fabric.has("rollout") else {}
        else:
            self.carrier.follow(self.flow.plan.edges)
            self.step.outlet = self.carrier if self.carrier.speakers else None
        here = [edge for edge in self.flow.plan.edges if self.fabric.rank in edge.dest]
        in_shares = [operator for edge in here for operator in self.carrier.in_shares(edge)]
        self.routing = SampleRouting(self.step, self.fabric, self.reporter, in_shares)
        self.carrier.reads, self.carrier.share_reads = self.routing.of_operators(), self.routing.of_shares()
        self.schedule = Schedule.of(config, self.placement)
        self.lag = self.schedule.lag(self.fabric.rank)
        self.carrier.in_order = between_devices(self.flow.plan, self.schedule)
        self.waiting = WaitingSamples(config, self.fabric)
        self.island = next((n for n, ranks in enumerate(self.placement.islands) if self.fabric.rank in ranks), 0)
        self._decides_alone = config.coordinator.islands_every > 1  # islands that take steps of their own
        if self.island and self._decides_alone:
            self.step.trust_engine()  # it has the first island's weights, from which this one's may have gone
        self.makes_samples = self.fabric.has("rollout") or self.fabric.has("reward")
        self._done = 0  # steps that are behind all ranks
        self._idle_since = time.perf_counter()  # the engines, since they have finished the last samples
        self._measured: dict[int, dict[str, float]] = {}
        self._values: Mapping[str, Any] = {}  # of the last step, on the reporter
        self.reports = WorldMetrics(self.fabric, self.reporter)

    # --- what this rank has ---------------------------------------------------------------------------------------

    @property
    def trained(self) -> dict[str, TrainableModel]:
        own = self.island if self._decides_alone else 0
        return {
            island_name(role, own if self._on_islands(role) else 0): trainable
            for role, trainable in self.roles.trained.items()
        }

    @property
    def saved(self) -> dict[str, TrainableModel]:
        """Islands that take every step together are the same: one of them is saved."""
        return {} if self.island and not self._decides_alone else self.trained

    @property
    def exported(self) -> dict[str, TrainingModel]:
        return self.roles.exported if self.fabric.rank in self.placement.islands[0] else {}

    def _on_islands(self, role: str) -> bool:
        return self.placement.colocated(place_of(role), "actor")

    def coordinate(self, progress: Progress, resumed_from: Path | None) -> None:
        config, islands = self.config, len(self.placement.islands)
        roles, reporters = participants(config, self.placement)
        self.coordinator = Coordinator(
            self.fabric, reporters, rules_of(config), progress=progress, liveness=self._liveness
        )
        self.clients: dict[str, CoordinatorClient] = {}
        for role in [role for role in roles if self.fabric.has(place_of(role))]:
            trainable = self.roles.trained[role]
            name = island_name(role, self.island if self._decides_alone and self._on_islands(role) else 0)
            client = CoordinatorClient(self.coordinator, name, progress, trainable.scheduler.num_steps)
            trainable.coordinator = self.clients[role] = client
            if islands > 1 and self._on_islands(role):
                self.clients[role].share = 1.0 if self._decides_alone else 1.0 / islands
                trainable.islands = Island(self.fabric, trainable, config.coordinator, progress.steps.get(name, 0))
        self._island_updates = IslandUpdates(config, self.fabric, progress)
        if resumed_from is not None:
            with together(self.control):
                for role, island in self._islands.items():
                    island.load_state(resumed_from / island_file(role, self.fabric.rank))

    @property
    def _islands(self) -> dict[str, Island]:
        """This rank's part of islands, by role."""
        found = {role: trainable.islands for role, trainable in self.trained.items()}
        return {role: island for role, island in found.items() if isinstance(island, Island)}

    # --- a step ---------------------------------------------------------------------------------------------------

    def begins_after(self, step: int) -> int:
        return self.schedule.begins_after(step, self.lag)

    def run(self, step: int, prompts: Prompts, given: StoredRollouts | None, after: AfterOperator) -> None:
        self.routing.step = self.carrier.step = step
        self.step.metrics = {}
        if isinstance(groups := self.step.in_progress, InFlightUpdates):
            updates = max(0, step - max(self._done, self.config.algorithm.critic_warmup_steps))
            groups.trains_from = (self.roles.sync.weight_version if self.roles.sync else 0) + updates
            groups.take_weights = partial(self._agree_inside, self.schedule.in_flight_after(step, self.lag))
        if isinstance(self.roles.sync, WeightSync):
            self.roles.sync.announce = partial(self.waiting.announce, step + 1)
        self._choose_partners(step)
        self._island_updates.serve(step)
        if self.waiting.is_here:
            self.waiting.begin(step, prompts.state_dict())
        moving: dict[str, Any] = {"carrier": self.carrier, "before_wait": partial(self._before_wait, step)}
        self.step.begin(step, prompts.epoch if self.fabric.has("rollout") else None)
        with self.stages.timeline.step(step):
            done, taken = self._starts_from(step, prompts, given, moving)
            values = self.flow.run(self.stages, done, leave_out=("reshard",), **moving, prompts=taken, step=step)
        metrics = self.reports.of_this_rank(self.step.metrics | self.stages.timeline.step_metrics(), step)
        if self.fabric.rank == self.reporter:
            self._values = {name: values[name] for name in ("rollouts", "scores")}  # devices let go of what trained
            metrics |= self.coordinator.costs()
        if self.fabric.has("rollout"):
            metrics["train/epoch"] = prompts.epoch
            metrics |= self.waiting.metrics(step - self._done, metrics)
        self._measured[step] = metrics
        if self._keeps_waiting:
            self.waiting.keep(step, self.roles.engines.weight_version, values, metrics)

    def begin_step(self, step: int) -> None:
        self.routing.step = step
        self.step.stored, self.step.metrics = None, {}
        self._choose_partners(step)
        self.stages.timeline.begin(step)

    def end_step(self, step: int) -> None:
        self.stages.timeline.end(step)
        self.step.end_measuring(step)
        self._done = step + 1
        self.waiting.forget(self._done)
        if step >= self.config.algorithm.critic_warmup_steps:
            self.step.newest_version += 1
        metrics = self.step.metrics | self.stages.timeline.step_metrics()
        if not self.fabric.has("rollout"):  # what is received is measured where it arrives
            of_reshard = [name for name in metrics if name.startswith("reshard/") or name == "time/reshard_ms"]
            metrics = {name: value for name, value in metrics.items() if name not in of_reshard or name == HIDDEN}
        metrics = self.reports.of_this_rank(metrics, step)
        if self.fabric.rank == self.reporter:
            metrics |= self.coordinator.costs()
        self._measured[step] = metrics

    def begin_samples(self, step: int, prompts: Prompts) -> None:
        if self.waiting.is_here:
            self.waiting.begin(step, prompts.state_dict())

    def end_samples(self, step: int, rollouts: RolloutBatch) -> None:
        self.step.metrics |= self.waiting.metrics(step - self._done, self.step.metrics)
        if self._keeps_waiting:
            self.waiting.keep(step, self.roles.engines.weight_version, {"rollouts": rollouts}, self.step.metrics)
        self._idle_since = time.perf_counter()

    def end_scores(self, step: int, scores: Scores) -> None:
        self.reports.book(step)
        if self._keeps_waiting:
            self.waiting.add_scores(step, scores, self.step.metrics)

    def begin_sync(self) -> None:
        if self.fabric.has("rollout"):
            self.waiting.add_pause(time.perf_counter() - self._idle_since)

    @property
    def _keeps_waiting(self) -> bool:
        """Return whether this rank keeps samples that are generated ahead, for a checkpoint."""
        return self.waiting.is_here and self.lag > 0 and self.step.replayed is None

    def _choose_partners(self, step: int) -> None:
        """Tell the coordinator's clients which roles update at the same time, so that one decision covers them."""
        split = self.config.uses_critic and not self.placement.colocated("actor", "critic")
        for role, client in self.clients.items():
            both = split and step >= self.config.algorithm.critic_warmup_steps
            client.partners = tuple({"actor", "critic"} - {role}) if both and role != REWARD_MODEL else ()

    def _starts_from(
        self, step: int, prompts: Prompts, given: StoredRollouts | None, moving: dict[str, Any]
    ) -> tuple[dict[str, Any], Sequence[PromptRecord]]:
        """What of a step is there before its flow runs, and the prompts that it takes.

        With dynamic sampling that is what its rounds have given, on the ranks that take part in them.
        """
        if self._is_given:
            assert given is not None, "a program gives them"
            self.step.metrics |= given.metrics
            done = given.values
            if not self.fabric.has("reward"):  # scores come from the ranks of rewards, even where they were given
                done.pop("scores", None)
            return done, []
        if self.config.algorithm.dynamic_sampling.metric is None or self.step.replayed is not None:
            return {}, prompts.take(self.config.data.prompts_per_step)
        ranks = self.placement.ranks
        if self.fabric.rank not in (*ranks["rollout"], *ranks["reward"]):
            return {}, []
        return self.step.gathered(prompts, step, ranks, **moving), []

    def _before_wait(self, step: int, edge: Edge) -> None:
        """What comes from a world that is less ahead comes after the agreements that it is at."""
        lag = min(self.schedule.lag(rank) for rank in edge.source)
        engines = self.schedule.in_flight and set(edge.source) & set(self.placement.ranks["rollout"])
        self._agree_inside(self.schedule.in_flight_after(step, lag) if engines else step - lag)
        if self.carrier.streams(edge):
            each = self._score_some if "reward" in edge.takers else lambda *part: None
            self.carrier.arrive(edge, self.stages, each, partial(self._score_share, step))

    def _agree_inside(self, done: int) -> None:
        """Inside a step, take part in what follows those up to a number of them."""
        held, doing = self.step.metrics, self.stages.step
        self._agree_until(done)
        self.step.metrics, self.stages.step = held, doing

    def _score_share(self, step: int, operators: Sequence[str], rows: range, share: RolloutBatch) -> None:
        for operator in operators:
            with self.stages(operator):
                self.step.score_share(operator, rows, share, step)

    def _score_some(self, rows: Sequence[int], part: RolloutBatch) -> None:
        with self.stages("reward"):
            self.step.score_some(rows, part)

    def generate(self, step: int, prompts: Sequence[PromptRecord]) -> RolloutBatch:
        engines = self.placement.ranks["rollout"]
        others = tuple(rank for rank in range(self.placement.size) if rank not in engines)
        if self.fabric.has("rollout"):
            with self.stages("rollout"):
                batch = self.step.generate(prompts, step)
            self._channel.send("drawn", batch, engines, others)
        else:
            with self.stages("wait"):
                batch = self._channel.receive("drawn", engines, others)
        return batch

    # --- after a step ---------------------------------------------------------------------------------------------

    def synchronise(self, done: int, *, starts: bool) -> None:
        self._done, self.stages.step = done, None
        self.stages.status(f"what follows step {done}")
        if starts:
            self.routing.first_step = done
            return
        warm_up = self.config.algorithm.critic_warmup_steps
        if done > warm_up:
            self.step.newest_version += 1
        self.waiting.forget(done)
        self.waiting.wait_for_weights(done, self.stages)
        if self.roles.sync is not None:
            self.step.metrics = {}
            start = time.perf_counter()
            with self.stages("reshard"):
                self.step.reshard(done > warm_up)
            found, measured = self.step.metrics, self._measured[done - 1]
            if self.fabric.has("rollout"):  # what is received is measured where it arrives
                measured |= {**found, "time/reshard_ms": (time.perf_counter() - start) * 1e3}
            elif HIDDEN in found:  # and behind which work it went, where it comes from
                measured[HIDDEN] = found[HIDDEN]

    def agreed(self, done: int) -> None:
        self.carrier.reach(done)

    def measured(self, done: int) -> Measured | None:
        """Every world's first rank tells the reporter what it measured."""
        metrics = self.reports.of_all(self._measured.pop(done - 1))
        if self.fabric.rank != self.reporter:
            return None
        batch = self._values["rollouts"]
        num_tokens = float(sum(sequence_lengths(batch).lengths))
        metrics["train/tokens_per_sec"] = num_tokens / metrics["train/step_time_ms"] * 1e3
        return Measured(metrics, batch, self._values["scores"])

    def evaluate(self, validation: Validation) -> Evaluation | None:
        """The engines' ranks validate; all ranks hear the result."""
        if self.roles.rollout is None:
            return None
        found: list[Any] = []
        with self.stages("validation"):
            has_models = any(entry.path is not None for entry in self.config.reward)
            remote = has_models and not self.fabric.placement.colocated("reward", "rollout")
            if self.fabric.has("rollout"):
                evaluation = validation.evaluate(self.roles, self._score_remotely if remote else None)
                found = [evaluation.metrics, evaluation.samples]
            elif self.fabric.has("reward") and remote:
                self._serve_scores()
        return Evaluation(*broadcast_json(found, self.placement.ranks["rollout"][0], self.control))

    def _score_remotely(self, batch: RolloutBatch) -> Scores:
        """On the engines' ranks: what those of the reward score a batch with, in `_serve_scores`."""
        engines, models = self.placement.ranks["rollout"], self.placement.ranks["reward"]
        channel = TensorChannel(self.fabric, (Scores,))
        channel.send("responses to score", batch, engines, models)
        scores: Scores = channel.receive("their scores", models, engines)
        channel.settle()
        return scores

    def _serve_scores(self) -> None:
        engines, models = self.placement.ranks["rollout"], self.placement.ranks["reward"]
        channel = TensorChannel(self.fabric, (Scores,))
        scores = self.roles.reward.score(channel.receive("responses to score", engines, models))
        self.roles.reward.forget_logged()
        channel.send("their scores", scores, models, engines)
        channel.settle()

    def share(self, metrics: dict[str, float]) -> dict[str, float]:
        return dict(broadcast_json(metrics, self.reporter, self.control))

    # --- checkpoints, and the end ---------------------------------------------------------------------------------

    def collect(self, state: dict[str, Any]) -> dict[str, Any]:
        """Each part from a rank that knows it."""
        barrier(self.control)  # a rank that only coordinates is here before the last update is decided on
        mine: dict[str, Any] = {}
        if self.fabric.rank == self.reporter:
            of_reporter = ("next_step", "kl", "tokenizer", "best", "metrics_bytes", "cut_off")
            mine = {name: state[name] for name in of_reporter}
        if self.fabric.rank == self.placement.ranks["rollout"][0]:
            mine |= {name: state[name] for name in ("weight_version", "generation_budget")}
            mine["ahead"] = self.waiting.facts
            mine["partial_groups"] = state["partial_groups"]
            mine["sampler"] = self.waiting.sampler(self._done) or state["sampler"]
        if self.fabric.rank == self.placement.coordinator:
            mine["coordinator"] = self.coordinator.progress.to_dict()
        return dict(reduce_json(mine, lambda parts: {k: v for part in parts for k, v in part.items()}, self.control))

    def own_files(self) -> dict[str, bytes]:
        """What the islands of this rank must find again; and samples that wait for training."""
        islands = {island_file(role, self.fabric.rank): island.state() for role, island in self._islands.items()}
        groups = self.step.in_progress
        if self.waiting.is_here and groups is not None and groups.groups:
            with TemporaryDirectory() as folder:
                groups.writer()(Path(folder) / PARTIAL_FILE)
                islands[PARTIAL_FILE] = (Path(folder) / PARTIAL_FILE).read_bytes()
        return islands | self.waiting.files

    def write_timeline(self, records: Records, run_dir: Path) -> None:
        records.aside(lambda: self.reports.write_timeline(self.stages.timeline, run_dir))

    def settle(self, records: Records, run_dir: Path) -> None:
        self._channel.settle()
        self.carrier.settle()
        self.coordinator.close()
        self.write_timeline(records, run_dir)
        records.aside(lambda: self.reports.join_timelines(run_dir))


def between_devices(plan: CompiledFlow, schedule: Schedule) -> frozenset[Edge]:
    """The edges of a step's flow whose values may go through NCCL, where a message waits for those before it, and may
    hold its sender until the receiver is there.

    All ranks go through those of one step in one order (`in_one_order`), also with operators of one's own, and islands
    join their gradients inside of operators. Of two steps the agreement between them, in which every rank takes part,
    keeps those of the later one apart: who is ahead holds what it sends until it has taken part (`Carrier.reach`), and
    who receives has, before it waits (`_before_wait`), if it or a sender is not ahead. Nobody comes to an agreement
    before it is through the steps before, and what is ahead of it waits for nothing but agreements that are behind.
    Engines and rules give what lies on hosts: their edges hold nobody.
    """
    own, worlds = {"rollout", "reward", "greedy", "greedy_rewards"}, schedule.placement.worlds
    lags = {rank: lag for world in worlds for lag in [schedule.lag(world.ranks[0])] for rank in world.ranks}

    def meets(edge: Edge) -> bool:
        return not min(lags[rank] for rank in edge.source) or not max(lags[rank] for rank in edge.dest)

    edges = [edge for edge in plan.edges if edge.maker not in own and meets(edge)]
    return in_one_order(plan, edges, ("reshard",))
