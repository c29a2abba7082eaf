"""Roles of a run on one rank, and `mix`: additional updates on the responses of a training step.

Each entry of `mix` is an operator of the step's flow, after the actor's update and
before the reshard. An entry trains on the best responses (rejection sampling), on pairs
of the best and the worst response (preference loss or learned reward), or on reference
answers (supervised).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megaverl.algorithms import KLController, count_denominators
from megaverl.config import Config
from megaverl.config.run import MixConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.preferences import best_and_worst, best_of_each, pairs_of
from megaverl.dataflow import DataFlow, Operator
from megaverl.distributed.worlds import JobContext
from megaverl.errors import DataError
from megaverl.rollout.engine import InFlight
from megaverl.trainer.build import Builder
from megaverl.workers import RemoteWorker, local
from megaverl.workers.critic import Critic
from megaverl.workers.micro_batches import Weighting, cross_entropy, micro_batches_for
from megaverl.workers.model import TrainingModel
from megaverl.workers.pairs import (
    ImplicitRewardModel,
    PreferenceUpdates,
    RewardModelUpdates,
    as_metrics,
)
from megaverl.workers.player import Player
from megaverl.workers.policy import Actor, Policy
from megaverl.workers.reward import RewardRole, Scores
from megaverl.workers.rollout import AgentRollouts, Rollout
from megaverl.workers.trainable import TrainableModel
from megaverl.workers.weight_sync import SynchronisesWeights, WeightSync

REWARD_MODEL = "reward_model"  # name in a checkpoint and for the coordinator


@dataclass
class Roles:
    """Participants of a run on one rank. A role on other ranks is a `RemoteWorker`.

    Attributes:
        rollout: the engines, or None in a replay of stored rollouts.
        sync: this rank's part in transferring weights to the engines, or None if it has no part.
        player: plays episodes, in a run with an environment.
        implicit: PRIME's reward model.
        learned: reward model that `mix` trains.
        agents: roles of each agent, if each trains its own (`environment.agents: own`).
        global_models: on the coordinator's ranks with `coordinator.aggregates: gradients`, the models that have the
            optimizers of the replicas on islands, by role.
    """

    actor: Actor | RemoteWorker
    rollout: Rollout | AgentRollouts | RemoteWorker | None
    reward: RewardRole
    critic: Critic | RemoteWorker | None
    reference: Policy | RemoteWorker | None
    kl: KLController
    sync: SynchronisesWeights | None = None
    player: Player | None = None
    implicit: ImplicitRewardModel | None = None
    learned: TrainableModel | None = None
    agents: dict[str, Roles] = field(default_factory=dict)
    global_models: dict[str, TrainableModel] = field(default_factory=dict)

    @property
    def engines(self) -> Rollout | AgentRollouts:
        """Return the engines on a rank that has them.

        Raises:
            RuntimeError: this rank has no engines.
        """
        if self.rollout is None or isinstance(self.rollout, RemoteWorker):
            raise RuntimeError(
                "this rank has no rollout engine: the run replays rollouts, or other ranks generate"
            )
        return self.rollout

    @property
    def in_flight(self) -> InFlight | None:
        """Return the bounds on how many sequences this rank's engine decodes at once, or None without an engine."""
        return (
            self.rollout.engine.in_flight
            if isinstance(self.rollout, Rollout | AgentRollouts)
            else None
        )

    def kl_state(self) -> dict[str, Any]:
        """Return the state of KL controllers and adaptive entropy bonuses, for a checkpoint."""
        if self.agents:
            return {
                name: agent_roles.kl_state()
                for name, agent_roles in self.agents.items()
            }
        bonus = None if isinstance(self.actor, RemoteWorker) else self.actor.entropy
        return self.kl.state_dict() | ({} if bonus is None else bonus.state_dict())

    def load_kl_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `kl_state` returned."""
        for name, agent_roles in self.agents.items():
            agent_roles.load_kl_state(state[name])
        if not self.agents:
            self.kl.load_state_dict(state)
            if (
                not isinstance(self.actor, RemoteWorker)
                and self.actor.entropy is not None
            ):
                self.actor.entropy.load_state_dict(state)

    @property
    def trained(self) -> dict[str, TrainableModel]:
        """Return this rank's trained models, by their names in a checkpoint."""
        if self.agents:
            return {
                f"{role}_{agent}": trained
                for agent, roles in self.agents.items()
                for role, trained in roles.trained.items()
            }
        if self.global_models:
            return self.global_models
        trained_models = (
            {}
            if isinstance(self.actor, RemoteWorker)
            else {"actor": self.actor.trainable}
        )
        if isinstance(self.critic, Critic):
            trained_models["critic"] = self.critic.trainable
        if (
            model := self.implicit.trainable if self.implicit else self.learned
        ) is not None:
            trained_models[REWARD_MODEL] = model
        return trained_models

    @property
    def exported(self) -> dict[str, TrainingModel]:
        """Return the models that this rank exports, by the name of their folder in `hf`."""
        if self.agents:
            return {
                agent: model
                for agent, roles in self.agents.items()
                for model in roles.exported.values()
            }
        return {} if isinstance(self.actor, RemoteWorker) else {"": self.actor.model}


def make_roles(
    builder: Builder, context: JobContext | None = None, *, generates: bool
) -> Roles:
    """Create this rank's part of every role. Collective over the ranks of its role group.

    Args:
        context: context of a job with roles on separate ranks. None: every rank has all roles.
        generates: False if stored rollouts replace the engines.
    """
    config = builder.config

    def has(role: str) -> bool:
        return context is None or context.has(role)

    player = builder.player()
    heads = len(player.agents) if player else 1
    actor = builder.actor(heads) if has("actor") else RemoteWorker("actor")
    rollout: Rollout | RemoteWorker | None = (
        RemoteWorker("rollout") if generates else None
    )
    sync = None
    shares = context is None or context.placement.colocated("actor", "rollout")
    global_models: dict[str, TrainableModel] = {}
    if config.aggregates_gradients and has("coordinator"):
        global_models = builder.global_models(heads)
    # The global model's weights are sent to the engines, or else the first island's.
    if config.aggregates_gradients:
        fills = has("coordinator")
    else:
        fills = context is None or context.rank in context.placement.islands[0]
    source = actor.model if isinstance(actor, Actor) else None
    if "actor" in global_models:
        source = global_models["actor"].model
    # Created first, so that the engines start while the other models are built.
    if generates and not shares and (fills or has("rollout")):
        sync, engine = builder.remote_rollout(source)
        rollout = engine or rollout
    reference: Policy | RemoteWorker | None = None
    if config.uses_reference:
        model = None if isinstance(actor, RemoteWorker) else actor.model
        reference = (
            builder.reference(model) if has("reference") else RemoteWorker("reference")
        )
    if not isinstance(actor, RemoteWorker):
        builder.teach(actor, reference)
    learned = (
        builder.learned_reward() if config.mixes_reward_model and has("actor") else None
    )
    critic: Critic | RemoteWorker | None = None
    if config.uses_critic:
        critic = builder.critic(heads) if has("critic") else RemoteWorker("critic")
    reward = builder.reward(learned, models_are_here=has("reward"))
    implicit = (
        builder.implicit_reward()
        if config.estimator_reads("implicit_rewards") and has("actor")
        else None
    )
    if generates and shares and not isinstance(actor, RemoteWorker):
        rollout = builder.rollout(actor.model)
        sync = rollout.sync
    # With `reshard.overlap` the optimizer hands over weights as soon as they are
    # updated.
    if (
        config.reshard.overlap
        and isinstance(sync, WeightSync)
        and not isinstance(actor, RemoteWorker)
    ):
        actor.trainable.sender = sync
    return Roles(
        actor=actor,
        rollout=rollout,
        reward=reward,
        critic=critic,
        reference=reference,
        kl=builder.kl_controller(),
        sync=sync,
        player=player,
        implicit=implicit,
        learned=learned,
        global_models=global_models,
    )


Metrics = dict[str, float]


class Mix:
    """Additional updates of a run (`mix`).

    Args:
        roles: returns the roles when an update runs. A flow can therefore be compiled without roles.
        record: called with a name and the metrics of each update.
    """

    def __init__(
        self,
        config: Config,
        roles: Callable[[], Roles],
        record: Callable[[str, Metrics], None],
    ) -> None:
        self.config, self._roles, self.record = config, roles, record

    @property
    def actor(self) -> Actor:
        """Return the actor on this rank."""
        return local(self._roles().actor)

    def add_to(self, flow: DataFlow, *, before: Sequence[str]) -> None:
        """Add an operator for each entry to the flow, after the actor's update and before the operators in `before`."""
        for index in range(len(self.config.mix)):
            takes = ("rollouts", "scores", "step")
            operator = Operator(
                self.name_of(index),
                partial(self.update, index),
                takes,
                (),
                role="actor",
            )
            flow.add_operator(operator, after="actor_update", before=before)

    def name_of(self, index: int) -> str:
        """Return the name of an entry's operator."""
        return f"mix_{index}_{self.config.mix[index].update}"

    def update(
        self, index: int, rollouts: RolloutBatch, scores: Scores, step: int
    ) -> None:
        """Run one entry's update if this step is one of its steps. The actor is not
        updated while only the critic warms up.
        """
        entry = self.config.mix[index]
        warms_up = (
            step < self.config.algorithm.critic_warmup_steps
            and entry.update != "reward_model"
        )
        if (step + 1) % entry.every or warms_up:
            return
        if entry.update == "rejection":
            take_step = self._rejection
        else:
            take_step = self._answers if entry.update == "sft" else self._pairs
        self.record(
            f"mix_{entry.update}",
            take_step(entry, rollouts, scores.metric(entry.judge)),
        )

    def _rejection(
        self, entry: MixConfig, rollouts: RolloutBatch, judged: torch.Tensor
    ) -> Metrics:
        """Train with cross-entropy on the best response of every group whose scores differ (RAFT, arXiv 2304.06767)."""
        # A group with equal scores has no best response.
        differing = set(best_and_worst(judged, rollouts.group_ids))
        best = [
            row for row in best_of_each(judged, rollouts.group_ids) if row in differing
        ]
        metrics = (
            answers_update(self.actor, rollouts.select(best), weight=entry.weight)
            if best
            else {}
        )
        return metrics | {"samples": float(len(best))}

    def _pairs(
        self, entry: MixConfig, rollouts: RolloutBatch, judged: torch.Tensor
    ) -> Metrics:
        """Train on the best and the worst response of every group, by `preference.loss` or to rank them."""
        pairs = best_and_worst(judged, rollouts.group_ids)
        metrics = (
            self._pair_updates(entry).update(rollouts.select(pairs)) if pairs else {}
        )
        return metrics | {"samples": float(len(pairs))}

    def _pair_updates(self, entry: MixConfig) -> PreferenceUpdates | RewardModelUpdates:
        config, roles = self.config, self._roles()
        if entry.update == "reward_model":
            assert roles.learned is not None
            section = config.reward_model
            return RewardModelUpdates(
                roles.learned,
                section.loss,
                section.options,
                micro_batch_tokens=section.micro_batch_tokens,
                weight=entry.weight,
            )
        return PreferenceUpdates(
            self.actor.trainable,
            config.preference.loss,
            config.preference.options,
            local(roles.reference) if config.preference_needs_reference else None,
            micro_batch_tokens=self.actor.micro_batch_tokens,
            weight=entry.weight,
        )

    def _answers(
        self, entry: MixConfig, rollouts: RolloutBatch, judged: torch.Tensor
    ) -> Metrics:
        """Train with cross-entropy on the reference answer of every prompt.

        Raises:
            DataError: a reference answer is not text.
        """
        tokenizer = self._roles().reward.tokenizer
        firsts = [
            int((rollouts.group_ids == group).nonzero()[0, 0])
            for group in rollouts.group_ids.unique()
        ]
        prompts, answers = [], []
        for row in firsts:
            answer = rollouts.columns["reference"][row]
            if not isinstance(answer, str):
                raise DataError(
                    f"mix: the answer to {rollouts.columns['prompt'][row]!r:.60} is {type(answer).__name__}, and "
                    "update: sft needs text. Name the right column with data.answer_key."
                )
            prompts.append(
                rollouts.input_ids[row, : int(rollouts.prompt_lengths[row])].tolist()
            )
            answers.append([*tokenizer.encode(answer), tokenizer.eos_token_id])
        metrics = answers_update(
            self.actor, pairs_of(prompts, answers), weight=entry.weight
        )
        return metrics | {"samples": float(len(firsts))}


def answers_update(
    actor: Actor, batch: RolloutBatch, *, weight: float = 1.0
) -> Metrics:
    """Run one optimizer step of the actor on the mean cross-entropy of the masked tokens, times `weight`."""
    mask = batch.response_mask
    weights = Weighting("token_mean").weights(mask, count_denominators(mask)) * weight
    micro = micro_batches_for(
        actor.model, batch, actor.micro_batch_tokens, {"weights": weights}
    )
    return as_metrics(actor.trainable.update(micro, cross_entropy(actor.model)))
