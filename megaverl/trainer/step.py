"""One training step of PPO or GRPO, as a flow of operators on the roles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from megaverl.algorithms import KLController, masked_mean
from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.data.stream import Prompts
from megaverl.dataflow import DataFlow, Operator
from megaverl.dataflow.plan import Places
from megaverl.errors import TrainingStopped
from megaverl.roles.credit import Credit
from megaverl.roles.critic import Critic
from megaverl.roles.implicit_reward import ImplicitRewardModel
from megaverl.roles.own_functions import kept_by
from megaverl.roles.player import Player
from megaverl.roles.policy import Actor, Policy
from megaverl.roles.reward import RewardRole, Scores
from megaverl.roles.rollout import Rollout
from megaverl.roles.trainable import TrainableModel
from megaverl.trainer.generate import Metrics, generate, greedy_scores, score
from megaverl.trainer.mix import Mix
from megaverl.trainer.refill import refill
from megaverl.trainer.stored_rollouts import RolloutFolder, StoredRollouts


@dataclass
class Roles:
    """Who takes part in a run. A replay of stored rollouts has no engine."""

    actor: Actor
    rollout: Rollout | None
    reward: RewardRole
    critic: Critic | None
    reference: Policy | None
    kl: KLController
    player: Player | None = None  # of a run with an environment
    implicit: ImplicitRewardModel | None = None  # PRIME's
    learned: TrainableModel | None = None  # the reward model that `mix` trains


@dataclass
class RLStep:
    """The operators of a step. `metrics` holds what the running step has measured so far.

    Attributes:
        replayed: stored rollouts, which take the engine's place.
        stored: those of the running step.
    """

    config: Config
    roles: Roles
    replayed: RolloutFolder | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    stored: StoredRollouts | None = None
    credit: Credit = field(init=False)
    _has_compared: bool = False

    def __post_init__(self) -> None:
        self.credit = Credit(self.config.algorithm)

    def flow(self, places: Places | None = None) -> DataFlow:
        """Compiled for `run(prompts=..., step=...)`, where the roles are.

        What a configuration does not use (critic, reference) is no operator of its flow. The roles are only needed
        when it runs.
        """
        flow = DataFlow()
        source = self.generate if self.replayed is None else self.replay
        flow.add_operator(Operator("rollout", source, ("prompts", "step"), ("rollouts",), role="rollout"))
        flow.add_operator(Operator("reward", self.score, ("rollouts",), ("scores",), role="reward"))
        flow.add_operator(Operator("old_log_probs", self.old_log_probs, ("rollouts", "step"), role="actor"))
        inputs = ["rollouts", "scores", "old_log_probs"]
        if self.config.uses_reference:
            flow.add_operator(Operator("ref_log_probs", self.ref_log_probs, ("rollouts",), role="reference"))
            inputs.append("ref_log_probs")
        if self.config.uses_critic:
            flow.add_operator(Operator("values", self.values, ("rollouts",), role="critic"))
            inputs.append("values")
        if self.config.estimator_reads("greedy_rewards"):
            flow.add_operator(Operator("greedy_rewards", self.greedy_rewards, ("rollouts", "step"), role="rollout"))
            inputs.append("greedy_rewards")
        if self.config.estimator_reads("score_norms"):
            flow.add_operator(Operator("score_norms", self.score_norms, ("rollouts",), role="actor"))
            inputs.append("score_norms")
        if self.config.estimator_reads("implicit_rewards"):
            takes = ("rollouts", "scores", "ref_log_probs")
            flow.add_operator(Operator("implicit_rewards", self.implicit_rewards, takes, role="actor"))
            inputs.append("implicit_rewards")
        flow.add_operator(Operator("advantages", self.advantages, tuple(inputs), ("experience",), role="actor"))
        if self.config.uses_critic:
            flow.add_operator(Operator("critic_update", self.update_critic, ("experience", "step"), (), role="critic"))
        flow.add_operator(
            Operator("actor_update", self.update_actor, ("experience", "step"), ("updated",), role="actor")
        )
        if self.replayed is None:
            flow.add_operator(Operator("reshard", self.reshard, ("updated",), (), role=("actor", "rollout")))
        if self.config.mix:
            before = ("reshard",) if self.replayed is None else ()
            Mix(self.config, lambda: self.roles, self._record).add_to(flow, before=before)
        return flow.compile(given=("prompts", "step"), places=places)

    def gathered(
        self, span: Callable[[str], AbstractContextManager[Any]], stream: Prompts, step: int
    ) -> dict[str, Any]:
        """With dynamic sampling a step's `rollouts` and `scores`, from as many rounds as it takes; else nothing."""
        if self.config.algorithm.dynamic_sampling.metric is None or self.replayed is not None:
            return {}
        rounds = DataFlow()
        given = ("prompts", "step", "first_group")
        rounds.add_operator(Operator("rollout", self.generate, given, ("rollouts",), role="rollout"))
        rounds.add_operator(Operator("reward", self.score, ("rollouts",), ("scores",), role="reward"))
        rounds.compile(given)

        def one_round(prompts: Sequence[PromptRecord], first_group: int) -> tuple[RolloutBatch, Scores, Metrics]:
            values = rounds.run(span, prompts=prompts, step=step, first_group=first_group)
            return values["rollouts"], values["scores"], dict(self.metrics)

        batch, scores, metrics = refill(self.config, stream, one_round, step)
        self.metrics |= metrics
        return {"rollouts": batch, "scores": scores}

    def generate(self, prompts: Sequence[PromptRecord], step: int, first_group: int = 0) -> RolloutBatch:
        """`group_size` responses to every prompt."""
        roles = self.roles
        assert roles.rollout is not None, "a replay generates nothing"
        batch, metrics = generate(
            self.config, roles.rollout, prompts, step, first_group=first_group, player=roles.player
        )
        self.metrics |= metrics
        if roles.rollout.engine.in_flight is not None:
            self.metrics["rollout/sequences_in_flight"] = float(roles.rollout.engine.in_flight.number)
        if self.config.rollout.async_rollout:  # how old each token is when it is trained on
            versions = torch.full_like(batch.generated_ids, roles.rollout.weight_version)
            batch = batch.with_(weight_versions=versions.where(batch.response_mask, -1))
        return batch

    def replay(self, prompts: Sequence[PromptRecord], step: int) -> RolloutBatch:
        """Responses that another run generated for this step."""
        assert self.replayed is not None
        self.stored = self.replayed.read(step)
        self.metrics |= self.stored.metrics
        return self.stored.batch

    def score(self, rollouts: RolloutBatch) -> Scores:
        """Rewards of all responses; in a replay those of the run that generated them."""
        if self.stored is not None and self.stored.scores is not None:
            return self.stored.scores
        scores, metrics = score(self.roles.reward, rollouts)
        self.metrics |= metrics
        return scores

    def old_log_probs(self, rollouts: RolloutBatch, step: int) -> torch.Tensor | None:
        """The actor's log-probs at the start of the update; None where its own forward pass gives the same.

        Also taken by the first step after a start, where they show whether the first reshard was right. A resumed
        run does not train on these, as a run that was never interrupted would not have had them.
        """
        actor, kl = self.roles.actor, self.config.algorithm.kl
        needed = not actor.is_on_policy or kl.place == "reward" or step == 0
        if not needed and self._has_compared:
            return None
        log_probs = actor.log_probs(rollouts)
        difference = (log_probs - rollouts.rollout_log_probs).abs().masked_fill(~rollouts.response_mask, 0.0)
        self._record_difference(masked_mean(difference, rollouts.response_mask), float(difference.max()))
        self._has_compared = True
        return log_probs if needed else None

    def ref_log_probs(self, rollouts: RolloutBatch) -> torch.Tensor:
        """The reference's log-probs."""
        assert self.roles.reference is not None
        return self.roles.reference.log_probs(rollouts)

    def values(self, rollouts: RolloutBatch) -> torch.Tensor:
        """The critic's values, before any update of this step."""
        assert self.roles.critic is not None
        return self.roles.critic.values(rollouts)

    def greedy_rewards(self, rollouts: RolloutBatch, step: int) -> torch.Tensor:
        """[B]: the reward of the greedy response to each sample's prompt."""
        assert self.roles.rollout is not None, "a replay generates nothing"
        scores = greedy_scores(self.config, self.roles.rollout, self.roles.reward, rollouts, step)
        self.metrics["reward/greedy_mean"] = float(scores.total.mean())
        return scores.total

    def score_norms(self, rollouts: RolloutBatch) -> torch.Tensor:
        """The squared gradients of the actor's log-probs by its logits."""
        return self.roles.actor.score_norms(rollouts)

    def implicit_rewards(self, rollouts: RolloutBatch, scores: Scores, ref_log_probs: torch.Tensor) -> torch.Tensor:
        """[B, R]: PRIME's rewards of tokens, from a model that has just learned the outcomes of these responses."""
        assert self.roles.implicit is not None
        self._record("reward_model", self.roles.implicit.update(rollouts, ref_log_probs, scores.correct))
        rewards = self.roles.implicit.rewards(rollouts, ref_log_probs)
        self.metrics["reward/implicit_mean"] = masked_mean(rewards, rollouts.response_mask)
        return rewards

    def advantages(
        self,
        rollouts: RolloutBatch,
        scores: Scores,
        old_log_probs: torch.Tensor | None,
        ref_log_probs: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        greedy_rewards: torch.Tensor | None = None,
        score_norms: torch.Tensor | None = None,
        implicit_rewards: torch.Tensor | None = None,
    ) -> RolloutBatch:
        """Everything that the updates need, in one batch."""
        if self.config.algorithm.rollout_filter is not None:
            keep = kept_by(self.config.algorithm.rollout_filter, rollouts, scores)
            rollouts = rollouts.with_(response_mask=rollouts.response_mask & keep.unsqueeze(1))
            self.metrics["rollout/filtered_fraction"] = 1.0 - float(keep.float().mean())
        tensors = {"rewards": scores.total}
        given = {"old_log_probs": old_log_probs, "ref_log_probs": ref_log_probs, "values": values}
        tensors |= {name: tensor for name, tensor in given.items() if tensor is not None}
        weights = self.roles.reward.weights(scores)
        extra = {
            "greedy_rewards": greedy_rewards,
            "score_norms": score_norms,
            "implicit_rewards": implicit_rewards,
            "component_rewards": torch.stack(list(scores.components.values()), dim=1),
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
        self._record("critic", self.roles.critic.update(experience, step=step))

    def update_actor(self, experience: RolloutBatch, step: int) -> bool:
        """The actor's updates; False while only the critic warms up."""
        if step < self.config.algorithm.critic_warmup_steps:
            return False
        if self.roles.rollout is not None:
            self.roles.rollout.source_changes()
        metrics = self.roles.actor.update(experience, step=step, kl_coef=self.roles.kl.coef)
        if "logprob_diff_mean" in metrics:
            self._record_difference(metrics.pop("logprob_diff_mean"), metrics.pop("logprob_diff_max"))
        self._record("actor", metrics)
        return True

    def reshard(self, updated: bool) -> None:
        """The engine gets the new weights."""
        if not updated or self.roles.rollout is None:
            return
        stats = self.roles.rollout.reshard()
        self.metrics |= {
            "reshard/seconds": stats.seconds,
            "reshard/bytes_received": float(stats.bytes_received),
            "reshard/bytes_local": float(stats.bytes_local),
        }

    def trust_engine(self) -> None:
        """Do not compare its log-probs with those of the actor here."""
        self._has_compared = True

    def _record(self, role: str, metrics: dict[str, float]) -> None:
        self.metrics |= {f"{role}/{name}": value for name, value in metrics.items()}

    def _record_difference(self, mean: float, largest: float) -> None:
        """Engine against Megatron, for the same tokens: both have the same weights, so only rounding may differ."""
        self.metrics |= {"rollout/logprob_diff_mean": mean, "rollout/logprob_diff_max": largest}
        if self._has_compared or self.roles.rollout is None:
            return
        limit, mean_limit = logprob_limits(self.config, self.roles.actor.model.config.params_dtype)
        if not (largest <= limit and mean <= mean_limit):
            raise TrainingStopped(
                f"the first reshard is wrong: the log-probs that {self.config.rollout.engine} reports and those that "
                f"Megatron computes for the same tokens differ by up to {largest:.3g} (mean {mean:.3g}); allowed are "
                f"{limit:.3g} (mean {mean_limit:.3g}). Sampling fields such as top_k or penalties that only the engine "
                "applies do this as well. If the difference is only rounding, raise rollout.logprob_tolerance."
            )


def logprob_limits(config: Config, dtype: torch.dtype) -> tuple[float, float]:
    """Largest and mean difference that the first reshard may show."""
    if config.rollout.logprob_tolerance is not None:
        return config.rollout.logprob_tolerance, math.inf
    return (1e-3, math.inf) if dtype == torch.float32 else (1.0, 0.05)
