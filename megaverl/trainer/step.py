"""One training step of PPO or GRPO, as a flow of operators on the roles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from megaverl.algorithms import check_finite, masked_mean
from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.data.held_rows import Readers, of_all, of_held
from megaverl.dataflow import DataFlow, Operator
from megaverl.dataflow.plan import Places
from megaverl.distributed.worlds import default_group
from megaverl.plugins import call_object
from megaverl.rewards.trl import TrainerState
from megaverl.rollout.engine import Sampling, SamplingOptions, SavedWork, drawing, of_some, sampling_of
from megaverl.trainer.arriving_samples import TakesSamples
from megaverl.trainer.partial_rollouts import GroupsInProgress, InFlightUpdates, PartialRollouts
from megaverl.trainer.roles import Mix, Roles
from megaverl.trainer.schedule import RolloutFolder, StoredRollouts
from megaverl.workers import local
from megaverl.workers.advantage_computer import AdvantageComputer, kept_by
from megaverl.workers.critic import VALUES, ActorCritic
from megaverl.workers.policy import LogProbDifference, check_first_comparison
from megaverl.workers.responses import (
    Draws,
    greedy_responses,
    of_each_sample,
    once,
    responses,
    rollout_metrics,
    score_metrics,
)
from megaverl.workers.reward import Scores
from megaverl.workers.rollout import Rollout
from megaverl.workers.trainable import TrainableModel


@dataclass
class RLStep:
    """The operators of a step. `metrics` holds what the running step has measured so far.

    Attributes:
        replayed, stored: rollouts that take the engine's place; those of the running step.
        newest_version: of the weights that the engines have, wherever they are.
        outlet: takes samples as they are finished; None: they are wanted all at once.
        waiting: by step, samples that were generated before an interruption.
        warn: tells the person who watches the run.
        span: opened around operators, with their names.
        readers: who reads which samples, where each rank gets those that it works on; None: every rank gets all.
        in_progress: groups that go on over an update (`rollout.partial`, `rollout.in_flight_updates`).
        epochs: by step that a program has begun: passes over the data before it.
    """

    config: Config
    roles: Roles
    replayed: RolloutFolder | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    stored: StoredRollouts | None = None
    newest_version: int = 0
    outlet: TakesSamples | None = None
    waiting: dict[int, StoredRollouts] = field(default_factory=dict)
    warn: Callable[[str], None] = print
    span: Callable[[str], AbstractContextManager[Any]] = field(default=lambda name: nullcontext())
    readers: Readers | None = None
    credit: AdvantageComputer = field(init=False)
    in_progress: GroupsInProgress | None = field(init=False, default=None)
    epochs: dict[int, float] = field(default_factory=dict)
    _measured: dict[int, dict[str, float]] = field(default_factory=dict)
    _has_compared: bool = False
    _early_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.credit = AdvantageComputer(self.config.algorithm)
        if self.config.rollout.partial is not None:
            self.in_progress = PartialRollouts(self.config, self._sampling)
        elif self.config.rollout.in_flight_updates:
            self.in_progress = InFlightUpdates(self.config, self._sampling)

    @contextmanager
    def measuring(self, step: int) -> Iterator[None]:
        """Inside, `metrics` are those of a step's samples, which may be ahead of the step that trains."""
        of_training = self.metrics
        self.metrics = self._measured.setdefault(step, {})
        try:
            yield
        finally:
            self._measured[step] = self.metrics
            self.metrics = of_training

    def measured(self, step: int) -> dict[str, float]:
        """Return what was measured of the step that trains, and of its samples."""
        return self._measured.get(step, {}) | self.metrics

    def end_measuring(self, step: int) -> None:
        """Make `metrics` all that was measured of the step that ends."""
        self.epochs.pop(step, None)
        self.metrics = self._measured.pop(step, {}) | self.metrics

    @property
    def mix(self) -> Mix:
        """Further updates of the step."""
        return Mix(self.config, lambda: self.roles, self._record)

    @property
    def num_prompts(self) -> int:
        """Prompts that the next step takes."""
        return self.config.data.prompts_per_step if self.in_progress is None else self.in_progress.room

    def flow(self, places: Places | None = None) -> DataFlow:
        """Compiled for `run(prompts=..., step=...)`, where the roles are.

        What a configuration does not use (critic, reference) is no operator of it. Roles are only needed when it runs.
        """
        flow = DataFlow()
        source = self.generate if self.replayed is None else self.replay
        # what comes out of rounds, or of a folder, is known to the ranks of both
        both = self.replayed is not None or self.config.algorithm.dynamic_sampling.metric is not None
        of_rollout, of_reward = (("reward", "rollout"), ("rollout", "reward")) if both else ("rollout", "reward")
        flow.add_operator(Operator("rollout", source, ("prompts", "step"), ("rollouts",), role=of_rollout))
        flow.add_operator(Operator("reward", self.score, ("rollouts",), ("scores",), role=of_reward))
        of_critic = ("values", "last_values")
        scored = ("old_log_probs", *of_critic) if self.config.shares_backbone else ("old_log_probs",)
        score = self.log_probs_and_values if self.config.shares_backbone else self.old_log_probs
        flow.add_operator(Operator("old_log_probs", score, ("rollouts", "step"), scored, role="actor"))
        inputs = ["rollouts", "scores", *scored]
        if self.config.uses_ref_log_probs:
            flow.add_operator(Operator("ref_log_probs", self.ref_log_probs, ("rollouts",), role="reference"))
            inputs.append("ref_log_probs")
        if self.config.uses_critic:
            flow.add_operator(Operator("values", self.values, ("rollouts",), of_critic, role="critic"))
            inputs += of_critic
        if self.config.estimator_reads("greedy_rewards"):
            flow.add_operator(Operator("greedy", self.greedy, ("rollouts", "step"), role="rollout"))
            flow.add_operator(Operator("greedy_rewards", self.greedy_rewards, ("greedy",), role="reward"))
            inputs.append("greedy_rewards")
        if self.config.estimator_reads("score_norms"):
            flow.add_operator(Operator("score_norms", self.score_norms, ("rollouts",), role="actor"))
            inputs.append("score_norms")
        if self.config.estimator_reads("implicit_rewards"):
            takes = ("rollouts", "scores", "ref_log_probs")
            flow.add_operator(Operator("implicit_rewards", self.implicit_rewards, takes, role="actor"))
            inputs.append("implicit_rewards")
        flow.add_operator(Operator("advantages", self.advantages, tuple(inputs), ("experience",), role="actor"))
        updated = ("experience", "step")
        updates = [Operator("actor_update", self.update_actor, updated, ("updated",), role="actor")]
        if self.config.uses_critic:  # on the same ranks, weights that go at once have all of its time
            is_apart = places is not None and tuple(places["critic"]) != tuple(places["actor"])
            place = len(updates) if self.config.reshard.overlap and not is_apart else 0
            updates.insert(place, Operator("critic_update", self.update_critic, updated, (), role="critic"))
        for update in updates:
            flow.add_operator(update)
        if self.replayed is None:
            flow.add_operator(Operator("reshard", self.reshard, ("updated",), (), role=("actor", "rollout")))
        if self.config.mix:
            self.mix.add_to(flow, before=("reshard",) if self.replayed is None else ())
        return self.compiled(flow, places)

    def compiled(self, flow: DataFlow, places: Places | None = None) -> DataFlow:
        """Ready to run, with the operators that `trainer.operators` adds.

        Raises:
            ConfigError: there is no such function, or the flow cannot be with what it added.
        """
        for name in self.config.trainer.operators:
            call_object(name, "trainer.operators", flow)
        return flow.compile(given=("prompts", "step"), places=places)

    def generate(self, prompts: Sequence[PromptRecord], step: int, first_group: int = 0) -> RolloutBatch:
        """`group_size` responses to every prompt, or episodes from it.

        Args:
            first_group: number of the first prompt among all that the step generates for: groups are named, and
                samples drawn, by it.
        """
        if step in self.waiting:  # made before the run was interrupted, and not trained on
            stored = self.waiting.pop(step)
            self.metrics |= stored.metrics
            return stored.batch
        self.roles.engines.engine.saved_work = SavedWork()
        if isinstance(self.in_progress, PartialRollouts):
            self.newest_version = self.roles.engines.weight_version
            batch, metrics = self.in_progress.run(self.roles.engines, prompts, step)
            self.metrics |= metrics
            return batch if self.readers is None else self.readers.of_whole(batch)
        config, engines, start = self.config, self.roles.engines, time.perf_counter()
        draws = Draws(config.run.seed, step, config.algorithm.group_size, first_group, config.algorithm.opponent_beta)
        sampling = self._sampling(prompts, draws)

        def finished(number: int, sample: RolloutBatch) -> None:
            """It goes on its way while others are still being written."""
            assert self.outlet is not None
            self.outlet.give(number, self._dated(sample.with_(**drawing(of_some(sampling, [number]), 1))))

        hears = finished if self.outlet is not None else None
        function = config.rollout.function
        batch = responses(engines, prompts, sampling, draws, self.roles.player, function, hears, self.readers)
        own = sampling if batch.held is None else of_some(sampling, batch.held.rows)
        batch = batch.with_(**drawing(own, len(batch)))
        self.metrics |= rollout_metrics(batch, time.perf_counter() - start, engines.weight_version, draws)
        self.metrics |= engines.engine_metrics()
        return self._dated(batch)

    def begin_responses(self, prompts: Sequence[PromptRecord], step: int) -> None:
        """Generate the first part of each response, after which the engines may take new weights."""
        assert isinstance(self.in_progress, InFlightUpdates), "rollout.in_flight_updates is off"
        if step not in self.waiting:
            self.roles.engines.engine.saved_work = SavedWork()
            self.in_progress.begin(self.roles.engines, prompts, step)

    def finish_responses(self, step: int) -> RolloutBatch:
        """Generate the rest of each response; return all of them, or those that an interrupted run had finished."""
        assert isinstance(self.in_progress, InFlightUpdates), "rollout.in_flight_updates is off"
        stored = self.waiting.pop(step, None)
        if stored is not None:
            self.metrics |= stored.metrics
            return stored.batch
        batch, metrics = self.in_progress.finish(self.roles.engines)
        self.metrics |= metrics
        return batch

    def _sampling(self, prompts: Sequence[PromptRecord], draws: Draws) -> Sampling:
        """How the responses to prompts are drawn: all alike, or each its own way."""
        sampling = sampling_of(self.config.rollout, [len(prompt.token_ids) for prompt in prompts])
        if isinstance(sampling, SamplingOptions):
            return sampling
        return [each for each in sampling for _ in range(draws.group_size)]

    def _dated(self, batch: RolloutBatch) -> RolloutBatch:
        """How old each token is when it is trained on."""
        if not self.config.rollout.async_rollout or self.roles.sync is None:
            return batch
        versions = torch.full_like(batch.generated_ids, self.roles.sync.weight_version)
        return batch.with_(weight_versions=versions.where(batch.response_mask, -1))

    def replay(self, prompts: Sequence[PromptRecord], step: int) -> RolloutBatch:
        """Responses that another run generated for this step."""
        assert self.replayed is not None
        self.stored = self.replayed.read(step)
        self.metrics |= self.stored.metrics
        return self.stored.batch if self.readers is None else self.readers.of_whole(self.stored.batch)

    def read_replayed(self, step: int) -> None:
        """Read the rewards of a replayed step where nobody has read its responses on this rank."""
        if self.replayed is not None and (self.stored is None or self.stored.step != step):
            self.stored = self.replayed.read(step)

    def begin(self, step: int, epoch: float | None) -> None:
        """Tell reward functions that a step begins. `epoch`: passes over the data; None: not known on this rank."""
        self.roles.reward.begin(TrainerState(step, self.config.trainer.steps, epoch))

    def score(self, rollouts: RolloutBatch) -> Scores:
        """Rewards of all responses; in a replay those of the run that generated them."""
        if self.stored is not None and self.stored.scores is not None:
            return self.stored.scores
        start = time.perf_counter()
        scores = self.roles.reward.score(rollouts)
        shown = once(rollouts, scores, has_opponents=self.config.algorithm.opponent_beta is not None)
        self.metrics |= score_metrics(shown, time.perf_counter() - start + self._early_seconds)
        self.metrics |= self.roles.reward.service_costs() | self.roles.reward.logged_metrics()
        self._early_seconds = 0.0
        return scores

    def score_some(self, rows: Sequence[int], part: RolloutBatch) -> None:
        """Rewards of samples, by their numbers, while others are still being written; `score` has them then."""
        start = time.perf_counter()
        self.roles.reward.score_some(part, rows, self.config.samples_per_step)
        self._early_seconds += time.perf_counter() - start

    def old_log_probs(self, rollouts: RolloutBatch, step: int) -> torch.Tensor | None:
        """The actor's log-probs at the start of the update; None where its own forward pass gives the same.

        Also taken by the first step after a start, where they show whether the first reshard was right. A resumed
        run does not train on these, as a run that was never interrupted would not have had them.
        """
        if not self.wants_log_probs(step):
            return None
        return self._compared(rollouts, self.roles.actor.log_probs(rollouts), step)

    def log_probs_and_values(self, rollouts: RolloutBatch, step: int) -> dict[str, torch.Tensor | None]:
        """`old_log_probs`, and both values of the same backbone, out of one forward pass."""
        actor = local(self.roles.actor)
        assert isinstance(actor, ActorCritic), "critic.share_backbone is off"
        if not self.wants_log_probs(step):
            values, last_values = actor.values(rollouts)
            return {"old_log_probs": None, "values": values, "last_values": last_values}
        log_probs, values, last_values = actor.log_probs_and_values(rollouts)
        compared = self._compared(rollouts, log_probs, step)
        return {"old_log_probs": compared, "values": values, "last_values": last_values}

    def needs_log_probs(self, step: int) -> bool:
        """Whether the step trains on old log-probs: its own forward pass does not give the same."""
        return not self.roles.actor.is_on_policy or self.config.algorithm.kl.place == "reward" or step == 0

    def wants_log_probs(self, step: int) -> bool:
        """Whether the step computes any: it trains on them, or compares them with the engine's."""
        return self.needs_log_probs(step) or not self._has_compared

    def _compared(self, rollouts: RolloutBatch, log_probs: torch.Tensor, step: int) -> torch.Tensor | None:
        """Against the engine's, which the first step after a start does for itself; `old_log_probs` of the step."""
        if oldest_version(rollouts, self.newest_version) < self.newest_version:
            self.trust_engine()  # samples of older weights, after an interruption, say nothing of this reshard
        difference, for_metrics = LogProbDifference(), log_probs.cpu()
        if (held := rollouts.held) is None:
            difference.add(for_metrics - rollouts.rollout_log_probs, rollouts.response_mask)
        else:
            own = rollouts.select(held.own)
            difference.add(for_metrics[held.own] - own.rollout_log_probs, own.response_mask)
            difference = difference.over_ranks(default_group())
        found = difference.stats()
        self.metrics |= found.metrics()
        is_first, model = not self._has_compared and self.replayed is None, self.roles.actor.model
        if is_first and (warning := check_first_comparison(found, self.config, model.dtype, model.spec)):
            self.warn(warning)
        self._has_compared = True
        return log_probs if self.needs_log_probs(step) else None

    def ref_log_probs(self, rollouts: RolloutBatch) -> torch.Tensor:
        """The reference's log-probs."""
        assert (reference := self.roles.reference) is not None
        log_probs = reference.log_probs(rollouts)
        self._record("reference", reference.report())
        return log_probs

    def values(self, rollouts: RolloutBatch) -> dict[str, torch.Tensor]:
        """The critic's values, before any update of this step; also those after responses that were cut off."""
        critic = local(self.roles.critic)
        assert critic is not None
        values, last_values = critic.values(rollouts)
        return {"values": values, "last_values": last_values}

    def greedy(self, rollouts: RolloutBatch, step: int) -> RolloutBatch:
        """The greedy response to each group's prompt."""
        assert isinstance(self.roles.rollout, Rollout), "neither a replay nor agents of their own have greedy responses"
        return greedy_responses(self.config, self.roles.rollout, rollouts, step)

    def greedy_rewards(self, greedy: RolloutBatch) -> torch.Tensor:
        """[groups]: the reward of each."""
        scores = self.roles.reward.score(greedy)
        self.metrics["reward/greedy_mean"] = float(scores.total.nanmean())
        return scores.total

    def score_norms(self, rollouts: RolloutBatch) -> torch.Tensor:
        """The squared gradients of the actor's log-probs by its logits."""
        return self.roles.actor.score_norms(rollouts)

    def implicit_rewards(self, rollouts: RolloutBatch, scores: Scores, ref_log_probs: torch.Tensor) -> torch.Tensor:
        """[B, R]: PRIME's rewards of tokens, from a model that has just learned the outcomes of these responses."""
        assert self.roles.implicit is not None
        if not bool(scores.scored.all()):
            known = of_held(rollouts, scores.scored).unsqueeze(1)
            rollouts = rollouts.with_(response_mask=rollouts.response_mask & known)
        self._record("reward_model", self.roles.implicit.update(rollouts, ref_log_probs, scores.correct))
        rewards = self.roles.implicit.rewards(rollouts, ref_log_probs)
        self.metrics["reward/implicit_mean"] = masked_mean(rewards, rollouts.response_mask.to(rewards.device))
        return rewards

    def advantages(
        self,
        rollouts: RolloutBatch,
        scores: Scores,
        old_log_probs: torch.Tensor | None,
        ref_log_probs: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        last_values: torch.Tensor | None = None,
        greedy_rewards: torch.Tensor | None = None,
        score_norms: torch.Tensor | None = None,
        implicit_rewards: torch.Tensor | None = None,
    ) -> RolloutBatch:
        """Everything that the updates need, in one batch."""
        if self.config.algorithm.rollout_filter is not None:
            keep = kept_by(self.config.algorithm.rollout_filter, rollouts, scores)
            rollouts = rollouts.with_(response_mask=rollouts.response_mask & keep.unsqueeze(1))
            self.metrics["rollout/filtered_fraction"] = 1.0 - float(keep.float().mean())
        check_finite("rewards", scores.total[scores.scored])
        rewards = of_held(rollouts, scores.total)
        greedy = None if greedy_rewards is None else of_each_sample(greedy_rewards, rollouts)
        if greedy is not None:
            rewards = rewards.where(~greedy.isnan(), torch.nan)  # no baseline, no advantage
        tensors = {"rewards": rewards}
        if self.config.algorithm.positive_coef:
            tensors["desirable"] = of_held(rollouts, scores.correct)
        given = dict(old_log_probs=old_log_probs, ref_log_probs=ref_log_probs, values=values, last_values=last_values)
        if last_values is not None and self.config.algorithm.bootstrap_truncated:
            self.metrics["train/last_value_mean"] = float(of_all(rollouts, last_values).mean())
        tensors |= {name: tensor for name, tensor in given.items() if tensor is not None}
        weights = self.roles.reward.weights(scores)
        extra = {
            "greedy_rewards": greedy,
            "score_norms": score_norms,
            "implicit_rewards": implicit_rewards,
            "component_rewards": of_held(rollouts, torch.stack(list(scores.components.values()), dim=1)),
            "component_weights": torch.tensor([weights[name] for name in scores.components]),
        }
        coef = self.roles.kl.coef
        batch, metrics = self.credit.assign_each(rollouts.with_(**tensors), kl_coef=coef, extra=extra)
        self.metrics |= {f"train/{name}": value for name, value in metrics.items()}
        if "kl" in metrics:
            self.metrics["train/kl_coef"] = coef
            self.roles.kl.update(metrics["kl"])
        return batch

    def update_critic(self, experience: RolloutBatch, step: int) -> None:
        """The critic's updates."""
        assert self.roles.critic is not None
        self._date(self.roles.critic.trainable, experience)
        self._record("critic", self.roles.critic.update(experience, step=step))

    def update_actor(self, experience: RolloutBatch, step: int) -> bool:
        """The actor's updates; False while only the critic warms up."""
        if step < self.config.algorithm.critic_warmup_steps:
            return False
        if self.roles.sync is not None:
            self.roles.sync.source_changes()
        self._date(self.roles.actor.trainable, experience)
        metrics = self.roles.actor.update(experience, step=step, kl_coef=self.roles.kl.coef)
        others = (VALUES, "rollout/")
        self.metrics |= {name if name.startswith(others) else f"actor/{name}": v for name, v in metrics.items()}
        return True

    def _date(self, trainable: TrainableModel, experience: RolloutBatch) -> None:
        """Tell the coordinator, with the gradients that follow, how old the samples are."""
        if "weight_versions" in experience and trainable.coordinator is not None:
            trainable.coordinator.oldest = oldest_version(experience, self.newest_version)
            trainable.coordinator.newest = self.newest_version

    def reshard(self, updated: bool) -> None:
        """The engine gets the new weights."""
        if updated and self.roles.sync is not None:
            self.metrics |= self.roles.sync.reshard().metrics()

    def trust_engine(self) -> None:
        """Do not compare its log-probs with those of the actor here."""
        self._has_compared = True

    def _record(self, role: str, metrics: dict[str, float]) -> None:
        self.metrics |= {f"{role}/{name}": value for name, value in metrics.items()}


def oldest_version(batch: RolloutBatch, newest: int) -> int:
    """Of the weights that generated a batch's tokens; where they do not say, or there are none, the newest."""
    if "weight_versions" not in batch:
        return newest
    if batch.held is not None:  # of all samples, so that all ranks say the same
        return int(batch.held.of_all(batch.weight_versions.where(batch.response_mask, newest).amin(dim=1)).min())
    if not bool(batch.response_mask.any()):
        return newest
    return int(batch.weight_versions[batch.response_mask].min())
