"""The loop where roles have ranks of their own: each world goes through the steps by itself, and all meet in between.

A rank runs the operators of its roles; batches and results come and go over the fabric. The meeting after `done` steps
brings the engines the new weights, the reporter everybody's metrics, and all ranks one mind: validate, save, leave.
With asynchronous rollouts a world that only generates or scores is allowed to be ahead of that meeting by some steps:
how many is settled before the run, so that two runs are the same to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaverl.checkpoint.commit import Committer
from megaverl.config import Config
from megaverl.coordinator import Coordinator, CoordinatorClient, Progress
from megaverl.coordinator.islands import serve_join
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.dataflow import DataFlow
from megaverl.dataflow.plan import Edge
from megaverl.dataflow.streaming import StreamingCarrier
from megaverl.distributed.collectives import broadcast_json, together
from megaverl.monitoring.console import Console
from megaverl.trainer.async_schedule import AsyncSchedule
from megaverl.trainer.build import Builder
from megaverl.trainer.islands import Island, meetings, serve_update
from megaverl.trainer.job import Job, reporter
from megaverl.trainer.placed_roles import island_file, island_name, place_of, seats_of
from megaverl.trainer.reports import Reports
from megaverl.trainer.rl import Trainer, rules_of
from megaverl.trainer.roles import REWARD_MODEL, Roles, make_roles
from megaverl.trainer.sample_routing import SELECTIVE, SampleRouting, speakers_of
from megaverl.trainer.schedule import Schedule
from megaverl.trainer.scored_elsewhere import models_are_remote, score_remotely, serve_scores
from megaverl.trainer.validation import Evaluation
from megaverl.workers.reward import Scores
from megaverl.workers.trainable import TrainableModel


class SplitTrainer(Trainer):
    """As `Trainer`, on a placement with several worlds."""

    def __init__(self, config: Config, console: Console, job: Job) -> None:
        self.fabric = job.fabric
        self.placement = job.fabric.placement
        self.reporter = reporter(self.placement)
        self.carrier = StreamingCarrier(
            job.fabric,
            known=(Scores,),
            selective=SELECTIVE,
            speakers=speakers_of(config, self.placement),
            samples_per_step=config.samples_per_step,
            ahead=config.rollout.async_rollout and config.rollout.max_staleness > 0,
        )
        super().__init__(config, console, Builder(config, fabric=job.fabric), job)
        self.readers = SampleRouting(self.step, self.fabric, self.reporter)
        self.carrier.reads = self.readers.of_operators()
        self.timeline.rank = self.fabric.rank
        self.schedule = Schedule.of(config, self.placement)
        self.lag = self.schedule.lag(self.fabric.rank)
        self.ahead = AsyncSchedule(config, self.fabric)
        if self.island and config.coordinator.islands_every > 1:
            self.step.trust_engine()  # it has the first island's weights, from which this one's may have gone
        self.last = config.trainer.steps
        self._measured: dict[int, dict[str, float]] = {}
        self._values: Mapping[str, Any] = {}  # of the last step, on the reporter
        self.reports = Reports(self.fabric, self.reporter)
        self._met = 0  # steps before the last meeting

    # --- what this rank has ---------------------------------------------------------------------------------------

    def committer(self) -> Committer:
        return Committer(self.fabric.control, self.placement.coordinator)

    def make_roles(self, builder: Builder, *, generates: bool) -> Roles:
        return make_roles(builder, self.fabric, generates=generates)

    def make_flow(self) -> DataFlow:
        flow = self.step.flow(self.placement.ranks)
        self.carrier.follow(flow.plan.edges)
        if self.carrier.speakers:
            self.step.outlet = self.carrier
        return flow

    @property
    def keeps_records(self) -> bool:
        return self.fabric.rank == self.reporter

    @property
    def makes_samples(self) -> bool:
        return self.fabric.has("rollout") or self.fabric.has("reward")

    @property
    def trained(self) -> dict[str, TrainableModel]:
        placement, own = self.placement, self.island if self.config.coordinator.islands_every > 1 else 0
        return {
            island_name(role, own if placement.colocated(place_of(role), "actor") else 0): trainable
            for role, trainable in self.roles.trained.items()
        }

    @property
    def saved(self) -> dict[str, TrainableModel]:
        """Islands that take every step together are the same: one of them is saved."""
        return {} if self.island and self.config.coordinator.islands_every == 1 else self.trained

    def appoint(self, progress: Progress) -> None:
        placement, config = self.placement, self.config
        alone = config.coordinator.islands_every > 1  # islands that take steps of their own decide by themselves
        roles, seats = seats_of(config, placement)
        rules, liveness = rules_of(config), self.job.liveness if self.job else None
        self.coordinator = Coordinator(self.fabric, seats, rules, progress=progress, liveness=liveness)
        self.judges = {}
        for role in [role for role in roles if self.fabric.has(place_of(role))]:
            trainable = self.roles.trained[role]
            name = island_name(role, self.island if alone and placement.colocated(role, "actor") else 0)
            trainable.judge = self.judges[role] = CoordinatorClient(self.coordinator, name, progress)
            if len(placement.islands) > 1 and placement.colocated(role, "actor"):
                self.judges[role].share = 1.0 if alone else 1.0 / len(placement.islands)
                trainable.islands = Island(self.fabric, trainable, config.coordinator, progress.steps.get(name, 0))
        self._joined = dict(progress.steps)
        if self.resumed_from is not None:
            self._load_islands(self.resumed_from)

    @property
    def island(self) -> int:
        """The number of this rank's island; 0 where it is on none."""
        return next((n for n, ranks in enumerate(self.placement.islands) if self.fabric.rank in ranks), 0)

    @property
    def progress(self) -> Progress:
        return self.coordinator.progress if self.fabric.rank == self.placement.coordinator else Progress()

    # --- the loop -------------------------------------------------------------------------------------------------

    def _train(self) -> dict[str, float]:
        self.resume()
        if self.step.replayed is not None:
            with together(self.fabric.control):
                self.step.replayed.check(self.next_step, self.config.trainer.steps, self.config.samples_per_step)
        with self.recording():
            result = self._turns()
        self.records.aside(lambda: self.reports.join_timelines(self.run_dir))
        if self.config.checkpoint.export_hf:
            self.stages.note("export")
            self.export()
        return result

    def write_timeline(self) -> None:
        self.records.aside(lambda: self.reports.write_timeline(self.timeline, self.run_dir))

    def export(self) -> None:
        if self.fabric.rank in self.placement.islands[0]:
            super().export()

    def _turns(self) -> dict[str, float]:
        """This world's part of every step, and the meetings in between."""
        self._met = self.readers.first_step = self.next_step
        result = self._meet(self._met, starts=True)
        turn = self._met
        while turn < self.last:
            result = self._meet_until(self.schedule.begins_after(turn, self.lag)) or result
            self._turn(turn)
            turn += 1
        result = self._meet_until(self.last) or result
        self.carrier.settle()
        self.coordinator.close()
        return result

    def _meet_until(self, done: int) -> dict[str, float]:
        """All meetings up to that after `done` steps, which other worlds are at."""
        result: dict[str, float] = {}
        while self._met < min(done, self.last):
            self._met += 1
            result = self._meet(self._met) or result
        return result

    def _before_wait(self, step: int, edge: Edge) -> None:
        """What comes from a world that is less ahead comes after the meetings that it is at."""
        held, doing = self.step.metrics, self.stages.step
        self._meet_until(step - min(self.schedule.lag(rank) for rank in edge.source))
        self.step.metrics, self.stages.step = held, doing
        if self.carrier.streams(edge):
            self.carrier.arrive(edge, self.stages, self._score_some if "reward" in edge.takers else keep)

    def _score_some(self, rows: Sequence[int], part: RolloutBatch) -> None:
        with self.stages("reward"):
            self.step.score_some(rows, part)

    def _turn(self, step: int) -> None:
        """This rank's operators of a step."""
        self.stages.step, self.readers.step = step + 1, step
        self.step.metrics = {}
        apart = self.config.uses_critic and not self.placement.colocated("actor", "critic")
        for role, judge in self.judges.items():  # who updates at the same time is decided on together
            both = apart and step >= self.config.algorithm.critic_warmup_steps
            judge.partners = tuple({"actor", "critic"} - {role}) if both and role != REWARD_MODEL else ()
        if self.fabric.rank == self.placement.coordinator and len(self.placement.islands) > 1:
            self._serve_islands(step)
        if self.ahead.is_here:
            self.ahead.begin(step, self.prompts.state_dict())
        moving: dict[str, Any] = {"carrier": self.carrier, "before_wait": partial(self._before_wait, step)}
        with self.timeline.step(step):
            done, prompts = self._starts_from(step, moving)
            values = self.flow.run(
                self.stages,
                done,
                leave_out=("reshard",),
                **moving,
                prompts=prompts,
                step=step,
            )
        metrics = self.reports.of_this_rank(self.step.metrics | self.timeline.step_metrics())
        if self.keeps_records:
            self._values = values
            metrics |= self.coordinator.costs()
        if self.fabric.has("rollout"):
            metrics["train/epoch"] = self.prompts.epoch
            metrics |= self.ahead.metrics(step - self.next_step, metrics)
        self._measured[step] = metrics
        if self.ahead.is_here and self.lag and self.step.replayed is None:
            assert self.roles.rollout is not None
            self.ahead.keep(step, self.roles.rollout.weight_version, values, metrics)

    def _starts_from(self, step: int, moving: dict[str, Any]) -> tuple[dict[str, Any], Sequence[PromptRecord]]:
        """What of a step is there before its flow runs, and the prompts that it takes.

        With dynamic sampling that is what its rounds have given, on the ranks that take part in them.
        """
        if self.config.algorithm.dynamic_sampling.metric is None or self.step.replayed is not None:
            return {}, self.prompts.take(self.config.data.prompts_per_step)
        ranks = self.placement.ranks
        if self.fabric.rank not in (*ranks["rollout"], *ranks["reward"]):
            return {}, []
        return self.step.gathered(self.stages, self.prompts, step, ranks, **moving), []

    def _serve_islands(self, step: int) -> None:
        """On the coordinator: everything in which the islands meet in this step, in the order of their updates."""
        config, placement = self.config, self.placement
        updates = config.algorithm.num_epochs * config.algorithm.num_mini_batches
        roles = ["critic"] if config.uses_critic and placement.colocated("critic", "actor") else []
        roles += ["actor"] if step >= config.algorithm.critic_warmup_steps else []
        for role in roles:
            done = self._joined.get(role, 0)
            self._joined[role] = done + updates
            for in_update in meetings(updates, config.coordinator, done):
                if in_update:
                    serve_update(self.fabric)
                else:
                    serve_join(self.fabric)

    # --- where all meet -------------------------------------------------------------------------------------------

    def _meet(self, done: int, *, starts: bool = False) -> dict[str, float]:
        """After `done` steps; every rank of the job takes part. Returns what was measured, on the reporter.

        Raises:
            Leaving: the run was asked to leave, and has saved.
        """
        trainer, result = self.config.trainer, {}
        self.next_step, self.stages.step = done, None
        self.stages.note(f"the meeting after step {done}")
        if not starts:
            self._sync_weights(done)
            result = self._report(done)
        last = done == trainer.steps
        is_best = False
        if (trainer.validate_at_start and done == 0) if starts else self.validation.is_due(done):
            result = self._validate(done) or result
            is_best = self.validation.best.step == done
        self.saving.look()
        if not starts and self.saving.is_due(done, last=last, is_best=is_best):
            self._save(done, best=is_best, wait=last)
        if not last:
            self._perhaps_leave(done)
        return result

    def _perhaps_leave(self, done: int) -> None:
        """All hear of a signal that any rank has got; samples that wait for training are saved with the rest.

        Raises:
            Leaving: the run was asked to leave, and has saved.
        """
        if signal := self.leave.agreed(self.fabric.control):
            self._leave(signal, None)

    def _sync_weights(self, done: int) -> None:
        """The engines get the weights that `done` steps have made."""
        if done > self.config.algorithm.critic_warmup_steps:
            self.step.newest_version += 1
        self.ahead.forget(done)
        self.ahead.wait_for_weights(done, self.stages)
        if self.roles.sync is not None:
            self.step.metrics = {}
            start = time.perf_counter()
            with self.stages("reshard"):
                self.step.reshard(done - 1 >= self.config.algorithm.critic_warmup_steps)
            if self.fabric.has("rollout"):  # what is received is measured where it arrives
                self._measured[done - 1] |= self.step.metrics
                self._measured[done - 1]["time/reshard_ms"] = (time.perf_counter() - start) * 1e3

    def _report(self, done: int) -> dict[str, float]:
        """Every world's first rank tells the reporter what it measured in the step that is over."""
        metrics = self.reports.of_all(self._measured.pop(done - 1))
        if not self.keeps_records:
            return {}
        batch, scores = self._values["rollouts"], self._values["scores"]
        metrics["train/tokens_per_sec"] = float(batch.sequence_lengths.sum()) / metrics["train/step_time_ms"] * 1e3
        self.log_step(done, metrics, batch, scores)
        if self.stored is not None:
            self.step.metrics = metrics
            self.stored.append(self._rollouts(done - 1, self._values))
        return metrics

    def _validate(self, done: int) -> dict[str, float] | None:
        """The engines' ranks validate; all ranks hear the result."""
        if not self.validation.happens or self.roles.rollout is None:
            return None
        found: list[Any] = []
        with self.stages("validation"):
            remote = models_are_remote(self.config, self.fabric)
            if self.fabric.has("rollout"):
                score = partial(score_remotely, self.fabric) if remote else self.roles.reward.score
                evaluation = self.validation.evaluate(self.roles, score)
                found = [evaluation.metrics, evaluation.samples]
            elif self.fabric.has("reward") and remote:
                serve_scores(self.roles.reward, self.fabric)
        metrics, samples = broadcast_json(found, self.placement.ranks["rollout"][0], self.fabric.control)
        self.validation.note(done, Evaluation(metrics, samples))
        return dict(metrics)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _state(self, cut_off: Any) -> dict[str, Any]:
        """Each part from a rank that knows it; the same on all."""
        dist.barrier(self.fabric.control)  # a rank that only coordinates is here before the last update is decided on
        mine: dict[str, Any] = {}
        whole = super()._state(None)
        if self.keeps_records:
            mine = {name: whole[name] for name in ("next_step", "kl", "tokenizer", "best", "metrics_bytes", "cut_off")}
        if self.fabric.rank == self.placement.ranks["rollout"][0]:
            mine |= {name: whole[name] for name in ("weight_version", "generation_budget")}
            mine["ahead"] = self.ahead.facts
            mine["sampler"] = self.ahead.sampler(self.next_step) or whole["sampler"]
        if self.fabric.rank == self.placement.coordinator:
            mine["coordinator"] = whole["coordinator"]
        parts = self.saving.store.committer.collect(mine)
        return {name: value for part in parts for name, value in part.items()}

    def own_files(self) -> dict[str, bytes]:
        """What the islands of this rank must find again; and samples that wait for training."""
        of_islands = {
            island_file(role, self.fabric.rank): trainable.islands.state()
            for role, trainable in self.trained.items()
            if isinstance(trainable.islands, Island)
        }
        return of_islands | self.ahead.files

    def _load_islands(self, folder: Path) -> None:
        """What the islands of this rank left in a checkpoint's folder; every rank of the job takes part."""
        with together(self.fabric.control):
            for role, trainable in self.trained.items():
                if isinstance(trainable.islands, Island):
                    trainable.islands.load_state(folder / island_file(role, self.fabric.rank))


def keep(rows: Sequence[int], part: RolloutBatch) -> None:
    """What is done with samples that come early: they wait for the others."""
