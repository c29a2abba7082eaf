"""The loop where roles have ranks of their own: each world goes through the steps by itself, and all meet in between.

A rank runs the operators of its roles; batches and results come and go over the fabric. The meeting after `done` steps
brings the engines the new weights, the reporter everybody's metrics, and all ranks one mind: validate, save, leave.
With asynchronous rollouts a world that only generates or scores is allowed to be ahead of that meeting by some steps:
how many is settled before the run, so that two runs are the same to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaverl.checkpoint.commit import Committer
from megaverl.config import Config
from megaverl.coordinator import Coordinator, CoordinatorCommits, Judge, Progress, Seat
from megaverl.coordinator.island_exchange import serve_join
from megaverl.dataflow import DataFlow
from megaverl.dataflow.carrier import Carrier
from megaverl.dataflow.plan import Edge
from megaverl.errors import MegaverlError
from megaverl.fabric.post import Sent, broadcast_json, receive_json, send_json
from megaverl.metrics.console import Console
from megaverl.metrics.memory import memory_metrics
from megaverl.metrics.timeline import merge_traces
from megaverl.metrics.tracker import Tracker
from megaverl.parallel.collectives import together
from megaverl.placement import World
from megaverl.roles.apart import Elsewhere, FilledByOthers
from megaverl.roles.reward import Scores
from megaverl.roles.rollout import Rollout
from megaverl.roles.trainable import TrainableModel
from megaverl.trainer.build import Builder
from megaverl.trainer.evaluate import Evaluation
from megaverl.trainer.export import export_model
from megaverl.trainer.islands import Island, meetings, serve_update
from megaverl.trainer.job import Job, reporter
from megaverl.trainer.readers import readers_of
from megaverl.trainer.rl import RLTrainer, rules_of
from megaverl.trainer.samples import append_samples, forget_samples, sample_records
from megaverl.trainer.step import Roles

# What may run ahead of training, and how many hands its work goes through from the rollout on. The critic may value the
# samples of a step while the actor is still at the one before; for its own update it waits.
AHEAD = {"rollout": 0, "reward": 1, "reference": 1}


# What a rank measures of itself: the reporter's own is shown.
OF_A_RANK = ("time/wait_ms", "time/step_ms", "time/other_ms")


class SplitTrainer(RLTrainer):
    """As `RLTrainer`, on a placement with several worlds."""

    def __init__(self, config: Config, console: Console, job: Job) -> None:
        self.fabric = job.fabric
        self.placement = job.fabric.placement
        self.reporter = reporter(self.placement)
        self.carrier = Carrier(job.fabric, known=(Scores,), readers=readers_of(config, self.placement))
        super().__init__(config, console, Builder(config, fabric=job.fabric), job)
        self.keeps_records = self.fabric.rank == self.reporter
        self.timeline.rank = self.fabric.rank
        self.lag = self._lag(self.fabric.rank)
        if self.island and config.coordinator.islands_every > 1:
            self.step.trust_engine()  # it has the first island's weights, from which this one's may have gone
        self.last = config.trainer.steps  # where the run ends; sooner if it is asked to leave
        self.leaving = ""
        self._measured: dict[int, dict[str, float]] = {}
        self._values: Mapping[str, Any] = {}  # of the last step, on the reporter
        self._told = Sent()
        self._met_at = time.perf_counter()
        self._met = 0  # steps before the last meeting
        self._tracking: Tracker | None = None

    # --- what this rank has ---------------------------------------------------------------------------------------

    def committer(self) -> Committer:
        return CoordinatorCommits(self.fabric)

    def make_roles(self, builder: Builder, *, generates: bool) -> Roles:
        config, has = self.config, self.fabric.has

        def here(role: str, make: Any) -> Any:
            return make() if has(role) else Elsewhere(role)

        actor, player = here("actor", builder.actor), builder.player()
        heads = len(player.agents) if player else 1
        model = actor.model if has("actor") else None
        rollout: Any = Elsewhere("rollout")
        if generates and self.placement.colocated("actor", "rollout"):
            rollout = here("rollout", lambda: builder.rollout(model))
        elif generates and (self.fabric.rank in self.placement.islands[0] or has("rollout")):
            rollout = builder.rollout_apart(model)
        elif has("actor"):
            rollout = FilledByOthers("rollout")
        return Roles(
            actor=actor,
            critic=here("critic", lambda: builder.critic(heads)) if config.uses_critic else None,
            reference=here("reference", lambda: builder.reference(model)) if config.uses_reference else None,
            reward=builder.reward(),
            kl=builder.kl_controller(),
            player=player,
            rollout=rollout if generates else None,
        )

    def make_flow(self) -> DataFlow:
        return self.step.flow(self.placement.ranks)

    @property
    def engines(self) -> Rollout | None:
        fills = self.fabric.rank in self.placement.islands[0]
        return self.roles.rollout if fills or self.fabric.has("rollout") else None

    @property
    def trained(self) -> dict[str, TrainableModel]:
        roles: dict[str, TrainableModel] = {}
        own = self.island if self.config.coordinator.islands_every > 1 else 0
        if self.fabric.has("actor"):
            roles[island_name("actor", own)] = self.roles.actor.trainable
        if self.roles.critic is not None and self.fabric.has("critic"):
            shared = self.placement.colocated("critic", "actor")
            roles[island_name("critic", own if shared else 0)] = self.roles.critic.trainable
        return roles

    @property
    def saved(self) -> dict[str, TrainableModel]:
        """Islands that take every step together are the same: one of them is saved."""
        return {} if self.island and self.config.coordinator.islands_every == 1 else self.trained

    def _lag(self, rank: int) -> int:
        """How many steps a rank's world may be ahead of training."""
        rollout, roles = self.config.rollout, set(self.placement.roles_of(rank)) - {"coordinator"}
        if not rollout.async_rollout or not roles or not roles <= {*AHEAD, "critic"}:
            return 0
        if "critic" in roles:
            return min(1, rollout.max_staleness)
        return max(0, rollout.max_staleness - min(AHEAD[role] for role in roles))

    def appoint(self, progress: Progress) -> None:
        placement, config = self.placement, self.config
        alone = config.coordinator.islands_every > 1  # islands that take steps of their own decide by themselves
        roles = ["actor", *(["critic"] if config.uses_critic else [])]
        seats = [
            Seat(island_name(role, number) if alone else role, world.ranks[0], number)
            for role in roles
            for number, world in enumerate(world for world in placement.worlds if role in world.roles)
        ]
        rules, liveness = rules_of(config), self.job.liveness if self.job else None
        self.coordinator = Coordinator(self.fabric, seats, rules, progress=progress, liveness=liveness)
        self.judges = {}
        for role in [role for role in roles if self.fabric.has(role)]:
            trainable: TrainableModel = getattr(self.roles, role).trainable
            name = island_name(role, self.island if alone and placement.colocated(role, "actor") else 0)
            trainable.judge = self.judges[role] = Judge(self.coordinator, name, progress)
            if len(placement.islands) > 1 and placement.colocated(role, "actor"):
                self.judges[role].share = 1.0 if alone else 1.0 / len(placement.islands)
                trainable.islands = Island(self.fabric, trainable, config.coordinator, progress.steps.get(name, 0))
        self._joined = dict(progress.steps)
        self._load_islands()

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
        if self.keeps_records:
            forget_samples(self.run_dir / "samples.jsonl", self.next_step)
            if self.stored is not None:
                self.stored.forget(self.next_step)
        tracker = self._tracker()
        try:
            result = self._turns(tracker)
        except MegaverlError:
            self.saving.commit_written()
            raise
        finally:
            if tracker is not None:
                tracker.close()
            self._write_aside(self._export_timeline)
        self._write_aside(self._join_timelines)
        if self.config.checkpoint.export_hf and self.fabric.rank in self.placement.islands[0]:
            self.stages.note("export")
            export_model(self.roles.actor.model, self.builder, self.run_dir / "hf")
            self.console.print(f"model written to {self.run_dir / 'hf'}")
        return result

    def _turns(self, tracker: Tracker | None) -> dict[str, float]:
        """This world's part of every step, and the meetings in between."""
        self._tracking = tracker
        self._met = self.next_step
        result = self._meet(self._met, starts=True)
        turn = self._met
        while turn < self.last:
            result = self._meet_until(max(turn - self.lag, self._last_barrier(turn))) or result
            if turn < self.last:
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
        self._meet_until(step - min(self._lag(rank) for rank in edge.source))
        self.step.metrics, self.stages.step = held, doing

    def _last_barrier(self, turn: int) -> int:
        """The last meeting before `turn` that nobody may run ahead of: there the run saves, or validates."""
        return max((done for done in range(max(0, turn - self.lag), turn + 1) if self._is_barrier(done)), default=0)

    def _is_barrier(self, done: int) -> bool:
        save, validate = self.config.checkpoint.save_interval, self.config.trainer.validate_every
        return bool(save and done % save == 0) or bool(validate and done % validate == 0)

    def _turn(self, step: int) -> None:
        """This rank's operators of a step."""
        self.stages.step = step + 1
        self.step.metrics = {}
        apart = self.config.uses_critic and not self.placement.colocated("actor", "critic")
        for role, judge in self.judges.items():  # who updates at the same time is decided on together
            both = apart and step >= self.config.algorithm.critic_warmup_steps
            judge.partners = tuple({"actor", "critic"} - {role}) if both else ()
        prompts = self.prompts.take(self.config.data.prompts_per_step)
        if self.fabric.rank == self.placement.coordinator and len(self.placement.islands) > 1:
            self._serve_islands(step)
        with self.timeline.step(step):
            values = self.flow.run(
                self.stages,
                mover=self.carrier,
                leave_out=("reshard",),
                before_wait=partial(self._before_wait, step),
                prompts=prompts,
                step=step,
            )
        metrics = {**self.step.metrics, **self.timeline.step_metrics()}
        for name in [name for name in metrics if name.startswith("busy/")]:
            share = metrics.pop(name)
            if self.fabric.has(name.removeprefix("busy/")):  # in seconds, until the whole step's are known
                metrics[name] = share * metrics["time/step_ms"] / 1e3
        if self.keeps_records:
            metrics |= memory_metrics("actor")
            self._values = values
        if self.fabric.has("rollout"):
            metrics["train/epoch"] = self.prompts.epoch
            metrics["rollout/staleness"] = float(step - self.next_step)
        self._measured[step] = metrics

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
        trainer, tracker, result = self.config.trainer, self._tracking, {}
        self.next_step, self.stages.step = done, None
        self.stages.note(f"the meeting after step {done}")
        if not starts:
            self._sync_weights(done)
            result = self._report(done, tracker)
        last = done == trainer.steps
        is_due = bool(trainer.validate_every) and (done % trainer.validate_every == 0 or last)
        is_best = False
        if (trainer.validate_at_start and done == 0) if starts else is_due:
            before = self.best.step
            result = self._validate(tracker, done) or result
            is_best = self.best.step != before
        self.saving.look()
        if not starts and self.saving.is_due(done, last=last, is_best=is_best):
            self._save(done, best=is_best, wait=last)
        if not last:
            self._perhaps_leave(done)
        return result

    def _perhaps_leave(self, done: int) -> None:
        """All hear of a signal that any rank has got; what is under way by then is trained on first.

        Raises:
            Leaving: the run was asked to leave, and has saved.
        """
        if not self.leaving and (signal := self.leave.agreed(self.fabric.control)):
            self.leaving = signal
            ahead = max(self._lag(rank) for rank in range(self.placement.size))
            self.last = min(self.last, done + ahead)
        if self.leaving and done == self.last:
            self._leave(self.leaving, None)

    def _sync_weights(self, done: int) -> None:
        """The engines get the weights that `done` steps have made."""
        if self.engines is not None:
            self.step.metrics = {}
            with self.stages("reshard"):
                self.step.reshard(done - 1 >= self.config.algorithm.critic_warmup_steps)
            self._measured[done - 1] |= self.step.metrics

    def _report(self, done: int, tracker: Tracker | None) -> dict[str, float]:
        """Every world's first rank tells the reporter what it measured in the step that is over."""
        fabric, firsts = self.fabric, [world.ranks[0] for world in self.placement.worlds]
        mine = self._measured.pop(done - 1)
        if not self.keeps_records:
            if fabric.rank in firsts:
                self._told.forget_done()
                self._told.add(send_json(fabric, "metrics", self.reporter, mine))
            return {}
        metrics: dict[str, float] = {}
        for rank in firsts:
            if rank != self.reporter:
                theirs = receive_json(fabric, "metrics", rank)
                metrics |= {name: value for name, value in theirs.items() if name not in OF_A_RANK}
        seconds, now = time.perf_counter() - self._met_at, time.perf_counter()
        self._met_at = now
        metrics |= mine
        metrics["train/step_time_ms"] = seconds * 1e3
        batch, scores = self._values["rollouts"], self._values["scores"]
        metrics["train/tokens_per_sec"] = float(batch.sequence_lengths.sum()) / seconds
        for name in [name for name in metrics if name.startswith("busy/")]:
            metrics[name] = min(1.0, metrics[name] / seconds)
        if tracker is not None:
            tracker.log(done, metrics)
            records = sample_records(batch, scores, self.roles.reward, self.config.trainer.save_samples)
            self._write_aside(lambda: append_samples(self.run_dir / "samples.jsonl", done, records))
        if self.stored is not None:
            self.step.metrics = metrics
            self.stored.append(self._rollouts(done - 1, self._values))
        self.console.step(done, self.config.trainer.steps, metrics)
        self.history.append((done, metrics))
        return metrics

    def _validate(self, tracker: Tracker | None, done: int) -> dict[str, float] | None:
        """The engines' ranks validate; all ranks hear the result."""
        if self.validation_data is None or not self.config.trainer.validate_every or self.roles.rollout is None:
            return None
        found: list[Any] = []
        with self.stages("validation"):
            if self.fabric.has("rollout"):
                evaluation = self.evaluate()
                with together():
                    self.roles.rollout.engine.reset_prefix_cache()
                found = [evaluation.metrics, evaluation.samples]
        metrics, samples = broadcast_json(self.fabric, self.placement.ranks["rollout"][0], found)
        self._note_validation(tracker, done, Evaluation(metrics, samples))
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
            mine |= {name: whole[name] for name in ("sampler", "weight_version")}
        if self.fabric.rank == self.placement.coordinator:
            mine["coordinator"] = whole["coordinator"]
        parts = self.saving.store.committer.collect(mine)
        return {name: value for part in parts for name, value in part.items()}

    def own_files(self) -> dict[str, bytes]:
        """What the islands of this rank must find again."""
        return {
            island_file(role, self.fabric.rank): trainable.islands.state()
            for role, trainable in self.trained.items()
            if isinstance(trainable.islands, Island)
        }

    def _load_islands(self) -> None:
        for role, trainable in self.trained.items():
            if self.resumed_from is not None and isinstance(trainable.islands, Island):
                path = self.resumed_from / island_file(role, self.fabric.rank)
                if path.exists():  # saved with as many islands, on the same ranks
                    trainable.islands.load_state(path.read_bytes())

    def _export_timeline(self) -> None:
        if self.fabric.rank == self.fabric.world.ranks[0]:
            self.timeline.export(self._timeline_of(self.fabric.world))

    def _join_timelines(self) -> None:
        """Those of all worlds, side by side in one trace."""
        dist.barrier(self.fabric.control)
        if self.keeps_records:
            traces = [self._timeline_of(world) for world in self.placement.worlds]
            merge_traces(traces, self.run_dir / "timeline.json")

    def _timeline_of(self, world: World) -> Path:
        return self.run_dir / "timelines" / f"{world.name}.json"


def island_name(role: str, number: int) -> str:
    """What an island's part of a role is called, where it is not that of all."""
    return f"{role}.{number}" if number else role


def island_file(role: str, rank: int) -> str:
    return f"island_{role}_{rank}.safetensors"
