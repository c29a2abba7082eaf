"""Roles of a run on one rank, and their creation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from megaverl.algorithms import KLController
from megaverl.distributed.job_context import JobContext
from megaverl.errors import ConfigError
from megaverl.rollout.engine import Engine, InFlight
from megaverl.trainer.build import Builder
from megaverl.workers import RemoteWorker
from megaverl.workers.critic import Critic
from megaverl.workers.draft import DraftTrainer
from megaverl.workers.model import TrainingModel
from megaverl.workers.pairs import ImplicitRewardModel
from megaverl.workers.player import Player
from megaverl.workers.policy import Actor, Policy
from megaverl.workers.reward import RewardRole
from megaverl.workers.rollout import AgentRollouts, Rollout
from megaverl.workers.trainable import TrainableModel
from megaverl.workers.weight_sync import SynchronisesWeights, WeightSync

REWARD_MODEL = "reward_model"  # name in a checkpoint and for the coordinator
DRAFT = "draft"  # likewise
# Models without an entry in `placement`, which train on the actor's ranks.
BESIDE_ACTOR = (REWARD_MODEL, DRAFT)


@dataclass
class Roles:
    """Participants of a run on one rank. A role on other ranks is a `RemoteWorker`.

    Attributes:
        rollout: the engines, or None in a replay of stored rollouts.
        sync: this rank's part in transferring weights to the engines, or None if it has no part.
        player: plays episodes, in a run with an environment.
        implicit: PRIME's reward model.
        learned: reward model that `mix` trains.
        draft: draft model of the engines, on the actor's ranks.
        draft_sync: this rank's part in transferring the draft model's weights, or None if it has no part.
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
    draft: DraftTrainer | None = None
    draft_sync: WeightSync | None = None
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
        if self.draft is not None:
            trained_models[DRAFT] = self.draft.trainable
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


def make_roles(builder: Builder, context: JobContext, *, generates: bool) -> Roles:
    """Create this rank's part of every role. Collective over the ranks of its role group.

    Args:
        generates: False if stored rollouts replace the engines.
    """
    config, has = builder.config, context.has
    if config.environment.agents == "own":
        return _make_agent_roles(builder, generates=generates)
    player = builder.player()
    heads = len(player.agents) if player else 1
    actor = builder.actor(heads) if has("actor") else None
    model = None if actor is None else actor.model
    rollout: Rollout | RemoteWorker | None = (
        RemoteWorker("rollout") if generates else None
    )
    sync = None
    shares = context.placement.colocated("actor", "rollout")
    global_models: dict[str, TrainableModel] = {}
    if config.aggregates_gradients and has("coordinator"):
        global_models = builder.global_models(heads)
    # The global model's weights are sent to the engines, or else the first island's.
    if config.aggregates_gradients:
        fills = has("coordinator")
    else:
        fills = context.rank in context.placement.islands[0]
    source = global_models["actor"].model if "actor" in global_models else model
    # Created first, so that the engines start while the other models are built.
    if generates and not shares and (fills or has("rollout")):
        sync, engine = builder.remote_rollout(source)
        rollout = engine or rollout
    reference: Policy | RemoteWorker | None = None
    if config.uses_reference:
        reference = (
            builder.reference(model) if has("reference") else RemoteWorker("reference")
        )
    if actor is not None:
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
    if generates and shares and model is not None:
        rollout = builder.rollout(model)
        sync = rollout.sync
    draft = draft_sync = None
    if config.draft.train and model is not None:
        draft = builder.draft(model)
    if config.draft.train and sync is not None:
        engine_here = rollout.engine if isinstance(rollout, Rollout) else None
        draft_sync = builder.draft_sync(draft, engine_here)
    # With `reshard.overlap` the optimizer hands over weights as soon as they are
    # updated.
    if config.reshard.overlap and isinstance(sync, WeightSync) and actor is not None:
        actor.trainable.sender = sync
    return Roles(
        actor=actor or RemoteWorker("actor"),
        rollout=rollout,
        reward=reward,
        critic=critic,
        reference=reference,
        kl=builder.kl_controller(),
        sync=sync,
        player=player,
        implicit=implicit,
        learned=learned,
        draft=draft,
        draft_sync=draft_sync,
        global_models=global_models,
    )


def _make_agent_roles(builder: Builder, *, generates: bool) -> Roles:
    """Create an actor and a critic for every agent of the game. Reference, rewards and engine are shared.

    Raises:
        ConfigError: the environment has only one agent, or nothing is generated.
    """
    config, player, reward = builder.config, builder.player(), builder.reward()
    if player is None or len(player.agents) < 2 or not generates:
        raise ConfigError(
            f"environment.agents=own: {config.environment.name} has one agent only. Leave it out, or name a game."
        )
    reference = builder.reference() if config.uses_reference else None
    engine: Engine | None = None
    rollouts: dict[str, Rollout] = {}
    agents: dict[str, Roles] = {}
    for agent in player.agents:
        actor = builder.actor()
        builder.teach(actor, reference)
        # All agents use the engine of the first one. It holds one agent's weights at a
        # time.
        rollout = rollouts[agent] = builder.rollout(actor.model, engine)
        engine = rollout.engine
        agents[agent] = Roles(
            actor=actor,
            critic=builder.critic() if config.uses_critic else None,
            reference=reference,
            reward=reward,
            kl=builder.kl_controller(),
            rollout=rollout,
            sync=rollout.sync,
        )
    first, engines = agents[player.agents[0]], AgentRollouts(rollouts)
    return replace(
        first,
        reference=None,
        rollout=engines,
        sync=engines,
        player=player,
        agents=agents,
    )
