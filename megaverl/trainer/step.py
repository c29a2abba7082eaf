"""Operators of one training step of PPO or GRPO: what a rank computes in each call of the program."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megaverl.algorithms import check_finite, masked_mean
from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.data.distributed_batch import RowSelection, gather_samples, select_samples
from megaverl.distributed.job_context import default_group
from megaverl.rewards.trl import TrainerState
from megaverl.rollout.engine import (
    Sampling,
    SamplingOptions,
    SavedWork,
    drawing,
    select_options,
)
from megaverl.rollout.sampling_rules import sampling_of
from megaverl.trainer.arriving_samples import SampleSender
from megaverl.trainer.mix import Mix
from megaverl.trainer.partial_rollouts import (
    GroupsInProgress,
    InFlightUpdates,
    PartialRollouts,
)
from megaverl.trainer.roles import Roles
from megaverl.trainer.stored_rollouts import RolloutFolder, StoredRollouts
from megaverl.workers import local
from megaverl.workers.advantage_computer import AdvantageComputer, kept_by
from megaverl.workers.critic import VALUES, ActorCritic
from megaverl.workers.log_prob_check import LogProbDifference, check_first_comparison
from megaverl.workers.responses import (
    Draws,
    expand_to_samples,
    greedy_responses,
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
    """Operators of a training step on one rank's roles.

    Attributes:
        replayed: folder of stored rollouts that replace the engine.
        metrics: metrics of the running step so far.
        stored: replayed rollouts of the running step.
        newest_version: latest weight version of the engines, on this rank or another.
        outlet: receives samples as they are finished, or None if samples are delivered all at once.
        waiting: by step, samples that were generated before an interruption.
        warn: shows a warning to the user.
        readers: row selection by which each rank receives its samples, or None if every rank receives all.
        in_progress: groups that continue over an update (`rollout.partial`, `rollout.in_flight_updates`).
        epochs: by step that a program has begun, the number of passes over the data before it.
    """

    config: Config
    roles: Roles
    replayed: RolloutFolder | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    stored: StoredRollouts | None = None
    newest_version: int = 0
    outlet: SampleSender | None = None
    waiting: dict[int, StoredRollouts] = field(default_factory=dict)
    warn: Callable[[str], None] = print
    readers: RowSelection | None = None
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
        """Redirect `metrics` to those of the samples of `step`, which may be ahead of the step that trains."""
        of_training = self.metrics
        self.metrics = self._measured.setdefault(step, {})
        try:
            yield
        finally:
            self._measured[step] = self.metrics
            self.metrics = of_training

    def measured(self, step: int) -> dict[str, float]:
        """Return the metrics of a step's samples together with those of the step that trains."""
        return self._measured.get(step, {}) | self.metrics

    def end_measuring(self, step: int) -> None:
        """Merge the metrics of the samples of `step` into `metrics`, at the end of the step."""
        self.epochs.pop(step, None)
        self.metrics = self._measured.pop(step, {}) | self.metrics

    @property
    def mix(self) -> Mix:
        """Return the additional updates of the step (`mix`)."""
        return Mix(self.config, self.roles, self._record)

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts that the next step takes."""
        return (
            self.config.data.prompts_per_step
            if self.in_progress is None
            else self.in_progress.room
        )

    def generate(
        self, prompts: Sequence[PromptRecord], step: int, first_group: int = 0
    ) -> RolloutBatch:
        """Generate `group_size` responses to every prompt, or episodes from it.

        Args:
            first_group: index of the first prompt among all prompts of the step. Groups are numbered and samples are
                seeded by this index.
        """
        # These samples were generated before an interruption and have not been trained
        # on.
        if (restored := self._take_waiting(step)) is not None:
            return restored
        # The counters of saved work, such as cached prompt tokens, start from zero in
        # each generation.
        self.roles.engines.engine.saved_work = SavedWork()
        if isinstance(self.in_progress, PartialRollouts):
            # The staleness of partial rollouts is measured from the weights that
            # generate now.
            self.newest_version = self.roles.engines.weight_version
            batch, metrics = self.in_progress.run(self.roles.engines, prompts, step)
            self.metrics |= metrics
            return self.own_rows(batch)
        config, engines, start = self.config, self.roles.engines, time.perf_counter()
        draws = Draws(
            config.run.seed,
            step,
            config.algorithm.group_size,
            first_group,
            config.algorithm.opponent_beta,
        )
        sampling = self._sampling(prompts, draws)

        def finished(number: int, sample: RolloutBatch) -> None:
            """Send one finished sample while the engine still generates others."""
            assert self.outlet is not None
            self.outlet.give(
                number,
                self._dated(
                    sample.with_(**drawing(select_options(sampling, [number]), 1))
                ),
            )

        on_finished = finished if self.outlet is not None else None
        function = config.rollout.function
        batch = responses(
            engines,
            prompts,
            sampling,
            draws,
            self.roles.player,
            function,
            on_finished,
            self.readers,
        )
        own_sampling = (
            sampling
            if batch.held is None
            else select_options(sampling, batch.held.rows)
        )
        batch = batch.with_(**drawing(own_sampling, len(batch)))
        self.metrics |= rollout_metrics(
            batch, time.perf_counter() - start, engines.weight_version, draws
        )
        if self.roles.player is not None:
            self.metrics |= self.roles.player.fault_metrics()
        self.metrics |= engines.engine_metrics()
        return self._dated(batch)

    def begin_responses(self, prompts: Sequence[PromptRecord], step: int) -> None:
        """Generate the first part of each response. The engines may receive new weights afterwards."""
        assert isinstance(self.in_progress, InFlightUpdates), (
            "rollout.in_flight_updates is off"
        )
        if step not in self.waiting:
            self.roles.engines.engine.saved_work = SavedWork()
            self.in_progress.begin(self.roles.engines, prompts, step)

    def finish_responses(self, step: int) -> RolloutBatch:
        """Generate the second part of each response. Return all responses.

        Responses that an interrupted run had finished are returned without generating.
        """
        assert isinstance(self.in_progress, InFlightUpdates), (
            "rollout.in_flight_updates is off"
        )
        if (restored := self._take_waiting(step)) is not None:
            return restored
        batch, metrics = self.in_progress.finish(self.roles.engines)
        self.metrics |= metrics
        return batch

    def _take_waiting(self, step: int) -> RolloutBatch | None:
        """Return the samples that an interrupted run generated for a step, or None."""
        stored = self.waiting.pop(step, None)
        if stored is None:
            return None
        self.metrics |= stored.metrics
        return stored.batch

    def _sampling(self, prompts: Sequence[PromptRecord], draws: Draws) -> Sampling:
        """Return the sampling options of the responses: one for all, or one for each response."""
        sampling = sampling_of(
            self.config.rollout, [len(prompt.token_ids) for prompt in prompts]
        )
        if isinstance(sampling, SamplingOptions):
            return sampling
        # Samples are numbered by group, so each prompt's options are repeated for all
        # samples of its group.
        return [options for options in sampling for _ in range(draws.group_size)]

    def _dated(self, batch: RolloutBatch) -> RolloutBatch:
        """Add the version of the weights that drew each token, if rollouts are asynchronous."""
        if not self.config.rollout.async_rollout or self.roles.sync is None:
            return batch
        versions = torch.full_like(batch.generated_ids, self.roles.sync.weight_version)
        # -1 marks padding, which no weights generated.
        return batch.with_(weight_versions=versions.where(batch.response_mask, -1))

    def replay(self, prompts: Sequence[PromptRecord], step: int) -> RolloutBatch:
        """Return the responses that another run generated for this step."""
        assert self.replayed is not None
        self.stored = self.replayed.read(step)
        self.metrics |= self.stored.metrics
        return self.own_rows(self.stored.batch)

    def own_rows(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the samples that this rank receives, of a batch that every rank has in full."""
        return batch if self.readers is None else self.readers.select(batch)

    def read_replayed(self, step: int) -> None:
        """Read the stored rewards of a replayed step, on a rank that has not read the step's responses."""
        if self.replayed is not None and (
            self.stored is None or self.stored.step != step
        ):
            self.stored = self.replayed.read(step)

    def begin(self, step: int, epoch: float | None) -> None:
        """Notify reward functions that a step begins.

        Args:
            epoch: number of passes over the data, or None if this rank does not know it.
        """
        self.roles.reward.begin(TrainerState(step, self.config.trainer.steps, epoch))

    def score(self, rollouts: RolloutBatch, *, is_round: bool = False) -> Scores:
        """Return the rewards of all responses. A replay returns the stored rewards of the original run.

        Args:
            is_round: the responses are one round of dynamic sampling. Then only the time of scoring is recorded here,
                summed over rounds; the engines' ranks record the rewards of all rounds.
        """
        if self.stored is not None and self.stored.scores is not None:
            return self.stored.scores
        start = time.perf_counter()
        scores = self.roles.reward.score(rollouts)
        # An episode with several conversations counts once, and an opponent's responses
        # do not count.
        shown = once(
            rollouts,
            scores,
            has_opponents=self.config.algorithm.opponent_beta is not None,
        )
        measured = score_metrics(
            shown, time.perf_counter() - start + self._early_seconds
        )
        if is_round:
            latency = (
                self.metrics.get("reward/latency_ms", 0.0)
                + measured["reward/latency_ms"]
            )
            measured = {"reward/latency_ms": latency}
        self.metrics |= measured
        self.metrics |= (
            self.roles.reward.service_costs() | self.roles.reward.logged_metrics()
        )
        self._early_seconds = 0.0
        return scores

    def score_some(self, rows: Sequence[int], part: RolloutBatch) -> None:
        """Score some samples while others are still being generated. `score` reuses these rewards.

        Args:
            rows: numbers of the samples in the step.
        """
        start = time.perf_counter()
        self.roles.reward.score_some(part, rows, self.config.samples_per_step)
        self._early_seconds += time.perf_counter() - start

    def old_log_probs(self, rollouts: RolloutBatch, step: int) -> torch.Tensor | None:
        """Return the actor's log-probs [B, R] before the update, or None if the
        update's own forward pass gives the same.

        They are also computed in the first step after a start, to check the first
        reshard. A resumed run does not train on these, because an uninterrupted run
        would not have computed them.
        """
        if not self.wants_log_probs(step):
            return None
        return self._compared(rollouts, self.roles.actor.log_probs(rollouts), step)

    def log_probs_and_values(
        self, rollouts: RolloutBatch, step: int
    ) -> dict[str, torch.Tensor | None]:
        """Return `old_log_probs`, `values` and `last_values` from one forward pass of a shared backbone."""
        actor = local(self.roles.actor)
        assert isinstance(actor, ActorCritic), "critic.share_backbone is off"
        if not self.wants_log_probs(step):
            values, last_values = actor.values(rollouts)
            return {"old_log_probs": None, "values": values, "last_values": last_values}
        log_probs, values, last_values = actor.log_probs_and_values(rollouts)
        compared = self._compared(rollouts, log_probs, step)
        return {"old_log_probs": compared, "values": values, "last_values": last_values}

    def needs_log_probs(self, step: int) -> bool:
        """Return whether the step trains on old log-probs because its own forward pass gives other values."""
        return (
            not self.roles.actor.is_on_policy
            or self.config.algorithm.kl.place == "reward"
            or step == 0
        )

    def wants_log_probs(self, step: int) -> bool:
        """Return whether the step computes old log-probs, to train on them or to compare them with the engine's."""
        return self.needs_log_probs(step) or not self._has_compared

    def _compared(
        self, rollouts: RolloutBatch, log_probs: torch.Tensor, step: int
    ) -> torch.Tensor | None:
        """Compare log-probs with the engine's, and return them if the step trains on them, else None.

        The first comparison after a start checks the first reshard and warns if the
        difference is too large.
        """
        if oldest_version(rollouts, self.newest_version) < self.newest_version:
            # After an interruption, samples may be drawn with older weights. They
            # cannot reveal errors of this reshard.
            self.trust_engine()
        # The engine's log-probs are in host memory.
        difference, for_metrics = LogProbDifference(), log_probs.cpu()
        if (held := rollouts.held) is None:
            difference.add(
                for_metrics - rollouts.rollout_log_probs, rollouts.response_mask
            )
        else:
            # Several ranks may hold a sample. It counts only on the rank that reports
            # for it.
            reported = rollouts.select(held.own)
            difference.add(
                for_metrics[held.own] - reported.rollout_log_probs,
                reported.response_mask,
            )
            difference = difference.over_ranks(default_group())
        stats = difference.stats()
        self.metrics |= stats.metrics()
        is_first, model = (
            not self._has_compared and self.replayed is None,
            self.roles.actor.model,
        )
        if is_first and (
            warning := check_first_comparison(
                stats, self.config, model.dtype, model.spec
            )
        ):
            self.warn(warning)
        self._has_compared = True
        return log_probs if self.needs_log_probs(step) else None

    def ref_log_probs(self, rollouts: RolloutBatch) -> torch.Tensor:
        """Return the reference's log-probs, [B, R]."""
        assert (reference := self.roles.reference) is not None
        log_probs = reference.log_probs(rollouts)
        self._record("reference", reference.report())
        return log_probs

    def values(self, rollouts: RolloutBatch) -> dict[str, torch.Tensor]:
        """Return the critic's values before any update of this step: `values` [B, R] and `last_values` [B].

        `last_values` are the values at the end of truncated responses.
        """
        critic = local(self.roles.critic)
        assert critic is not None
        values, last_values = critic.values(rollouts)
        return {"values": values, "last_values": last_values}

    def greedy(self, rollouts: RolloutBatch, step: int) -> RolloutBatch:
        """Generate the greedy response to each group's prompt."""
        assert isinstance(self.roles.rollout, Rollout), (
            "neither a replay nor agents of their own have greedy responses"
        )
        return greedy_responses(self.config, self.roles.rollout, rollouts, step)

    def greedy_rewards(self, greedy: RolloutBatch) -> torch.Tensor:
        """Return the reward of each greedy response, [groups]."""
        scores = self.roles.reward.score(greedy)
        self.metrics["reward/greedy_mean"] = float(scores.total.nanmean())
        return scores.total

    def score_norms(self, rollouts: RolloutBatch) -> torch.Tensor:
        """Return the squared gradient of each log-prob with respect to the actor's logits."""
        return self.roles.actor.score_norms(rollouts)

    def implicit_rewards(
        self, rollouts: RolloutBatch, scores: Scores, ref_log_probs: torch.Tensor
    ) -> torch.Tensor:
        """Train PRIME's reward model on the outcomes, then return its reward for each token, [B, R]."""
        assert self.roles.implicit is not None
        if not bool(scores.scored.all()):
            # Responses without a reward have no outcome to learn from.
            known = select_samples(rollouts, scores.scored).unsqueeze(1)
            rollouts = rollouts.with_(response_mask=rollouts.response_mask & known)
        self._record(
            "reward_model",
            self.roles.implicit.update(rollouts, ref_log_probs, scores.correct),
        )
        rewards = self.roles.implicit.rewards(rollouts, ref_log_probs)
        self.metrics["reward/implicit_mean"] = masked_mean(
            rewards, rollouts.response_mask.to(rewards.device)
        )
        return rewards

    def advantages(
        self,
        rollouts: RolloutBatch,
        scores: Scores,
        *,
        old_log_probs: torch.Tensor | None = None,
        ref_log_probs: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        last_values: torch.Tensor | None = None,
        greedy_rewards: torch.Tensor | None = None,
        score_norms: torch.Tensor | None = None,
        implicit_rewards: torch.Tensor | None = None,
    ) -> RolloutBatch:
        """Compute advantages. Return one batch with all fields that the updates need."""
        if self.config.algorithm.rollout_filter is not None:
            keep = kept_by(self.config.algorithm.rollout_filter, rollouts, scores)
            rollouts = rollouts.with_(
                response_mask=rollouts.response_mask & keep.unsqueeze(1)
            )
            self.metrics["rollout/filtered_fraction"] = 1.0 - float(keep.float().mean())
        # Unscored responses have NaN rewards by design, so only scored ones are
        # checked.
        check_finite("rewards", scores.total[scores.scored])
        rewards = select_samples(rollouts, scores.total)
        greedy = None
        if greedy_rewards is not None:
            greedy = expand_to_samples(greedy_rewards, rollouts)
            # A group without a baseline has no advantage.
            rewards = rewards.where(~greedy.isnan(), torch.nan)
        tensors = {"rewards": rewards}
        if self.config.algorithm.positive_coef:
            tensors["desirable"] = select_samples(rollouts, scores.correct)
        if last_values is not None and self.config.algorithm.bootstrap_truncated:
            self.metrics["train/last_value_mean"] = float(
                gather_samples(rollouts, last_values).mean()
            )
        optional = {
            "old_log_probs": old_log_probs,
            "ref_log_probs": ref_log_probs,
            "values": values,
            "last_values": last_values,
        }
        tensors |= {
            name: tensor for name, tensor in optional.items() if tensor is not None
        }
        weights = self.roles.reward.weights(scores)
        extra = {
            "greedy_rewards": greedy,
            "score_norms": score_norms,
            "implicit_rewards": implicit_rewards,
            "component_rewards": select_samples(
                rollouts, torch.stack(list(scores.components.values()), dim=1)
            ),
            "component_weights": torch.tensor(
                [weights[name] for name in scores.components]
            ),
        }
        coef = self.roles.kl.coef
        batch, metrics = self.credit.assign_each(
            rollouts.with_(**tensors), kl_coef=coef, extra=extra
        )
        self._record("train", metrics)
        if "kl" in metrics:
            self.metrics["train/kl_coef"] = coef
            self.roles.kl.update(metrics["kl"])
        return batch

    def update_critic(self, experience: RolloutBatch, step: int) -> None:
        """Run the critic's updates."""
        assert self.roles.critic is not None
        self._date(self.roles.critic.trainable, experience)
        self._record("critic", self.roles.critic.update(experience, step=step))

    def update_actor(self, experience: RolloutBatch, step: int) -> bool:
        """Run the actor's updates. Return False while only the critic warms up."""
        if step < self.config.algorithm.critic_warmup_steps:
            return False
        if self.roles.sync is not None:
            # The engine may share tensors with the actor, so an update makes the
            # engine's weights inconsistent.
            self.roles.sync.source_changes()
        self._date(self.roles.actor.trainable, experience)
        metrics = self.roles.actor.update(
            experience, step=step, kl_coef=self.roles.kl.coef
        )
        prefixes = (VALUES, "rollout/")
        self.metrics |= {
            name if name.startswith(prefixes) else f"actor/{name}": v
            for name, v in metrics.items()
        }
        return True

    def update_draft(self, rollouts: RolloutBatch, step: int) -> None:
        """Train the engines' draft model on the responses."""
        assert self.roles.draft is not None
        self._record("draft", self.roles.draft.update(rollouts, step=step))

    def _date(self, trainable: TrainableModel, experience: RolloutBatch) -> None:
        """Set the age of the samples that the next gradients come from."""
        if "weight_versions" in experience:
            trainable.staleness = self.newest_version - oldest_version(
                experience, self.newest_version
            )

    def reshard(self, updated: bool) -> None:
        """Send the actor's new weights to the engines, if the actor was updated, and those of the draft model."""
        if updated and self.roles.sync is not None:
            self.metrics |= self.roles.sync.reshard().metrics()
        # The draft model trains in every step, also while only the critic warms up.
        if self.roles.draft_sync is not None:
            stats = self.roles.draft_sync.reshard()
            self.metrics["draft/reshard_seconds"] = stats.seconds

    def trust_engine(self) -> None:
        """Skip the comparison of the engine's log-probs with those of the actor on this rank."""
        self._has_compared = True

    def _record(self, role: str, metrics: dict[str, float]) -> None:
        self.metrics |= {f"{role}/{name}": value for name, value in metrics.items()}


def oldest_version(batch: RolloutBatch, newest: int) -> int:
    """Return the oldest weight version that generated a token of the batch.

    Returns `newest` if the batch has no versions or no generated token.
    """
    if "weight_versions" not in batch:
        return newest
    # Includes the rows of other ranks, so that all ranks return the same version.
    if batch.held is not None:
        return int(
            batch.held.gather_samples(
                batch.weight_versions.where(batch.response_mask, newest).amin(dim=1)
            ).min()
        )
    if not bool(batch.response_mask.any()):
        return newest
    return int(batch.weight_versions[batch.response_mask].min())
