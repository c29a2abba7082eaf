"""The roles of a run, as one rank has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megaverl.algorithms import KLController
from megaverl.distributed.worlds import Fabric
from megaverl.rollout.engine import InFlight
from megaverl.trainer.build import Builder
from megaverl.workers import RemoteWorker
from megaverl.workers.critic import Critic
from megaverl.workers.model import TrainingModel
from megaverl.workers.pairs import ImplicitRewardModel
from megaverl.workers.player import Player
from megaverl.workers.policy import Actor, Policy
from megaverl.workers.reward import RewardRole
from megaverl.workers.rollout import AgentRollouts, Rollout
from megaverl.workers.trainable import TrainableModel
from megaverl.workers.weight_sync import SynchronisesWeights, WeightSync

REWARD_MODEL = "reward_model"  # in a checkpoint, and to the coordinator


@dataclass
class Roles:
    """Who takes part in a run; what is on other ranks is a RemoteWorker.

    Attributes:
        rollout: the engines; None in a replay of stored rollouts.
        sync: this rank's part in filling them; None: it has none.
        player: of a run with an environment.
        implicit: PRIME's reward model.
        learned: the reward model that `mix` trains.
        agents: the roles of each agent, where each trains its own (`environment.agents: own`).
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

    @property
    def engines(self) -> Rollout | AgentRollouts:
        """The engines, on a rank that has them.

        Raises:
            RuntimeError: it does not.
        """
        if self.rollout is None or isinstance(self.rollout, RemoteWorker):
            raise RuntimeError("this rank has no rollout: stored ones are replayed, or others generate")
        return self.rollout

    @property
    def in_flight(self) -> InFlight | None:
        """The bounds on what this rank's engine writes at once."""
        return self.rollout.engine.in_flight if isinstance(self.rollout, Rollout | AgentRollouts) else None

    def kl_state(self) -> dict[str, Any]:
        """Of the KL controllers, and of adaptive entropy bonuses, for a checkpoint."""
        if self.agents:
            return {name: own.kl_state() for name, own in self.agents.items()}
        bonus = None if isinstance(self.actor, RemoteWorker) else self.actor.entropy
        return self.kl.state_dict() | ({} if bonus is None else bonus.state_dict())

    def load_kl_state(self, state: dict[str, Any]) -> None:
        """Undo `kl_state`."""
        for name, own in self.agents.items():
            own.load_kl_state(state[name])
        if not self.agents:
            self.kl.load_state_dict(state)
            if not isinstance(self.actor, RemoteWorker) and self.actor.entropy is not None:
                self.actor.entropy.load_state_dict(state)

    @property
    def trained(self) -> dict[str, TrainableModel]:
        """What this rank trains, by the name that a checkpoint has for it."""
        if self.agents:
            return {
                f"{role}_{agent}": trained
                for agent, roles in self.agents.items()
                for role, trained in roles.trained.items()
            }
        found = {} if isinstance(self.actor, RemoteWorker) else {"actor": self.actor.trainable}
        if isinstance(self.critic, Critic):
            found["critic"] = self.critic.trainable
        if (model := self.implicit.trainable if self.implicit else self.learned) is not None:
            found[REWARD_MODEL] = model
        return found

    @property
    def exported(self) -> dict[str, TrainingModel]:
        """The models that this rank exports, by the name of their folder in `hf`."""
        if self.agents:
            return {agent: model for agent, roles in self.agents.items() for model in roles.exported.values()}
        return {} if isinstance(self.actor, RemoteWorker) else {"": self.actor.model}


def make_roles(builder: Builder, fabric: Fabric | None = None, *, generates: bool) -> Roles:
    """This rank's part of every role; every rank of its world takes part.

    Args:
        fabric: of a job whose roles are on ranks of their own; None: every rank has them all.
        generates: False: stored rollouts take the engines' place.
    """
    config = builder.config

    def has(role: str) -> bool:
        return fabric is None or fabric.has(role)

    player = builder.player()
    heads = len(player.agents) if player else 1
    actor = builder.actor(heads) if has("actor") else RemoteWorker("actor")
    rollout: Rollout | RemoteWorker | None = RemoteWorker("rollout") if generates else None
    sync = None
    shares = fabric is None or fabric.placement.colocated("actor", "rollout")
    fills = fabric is None or fabric.rank in fabric.placement.islands[0]
    if generates and not shares and (fills or has("rollout")):  # first: the engines start while others are made
        sync, engine = builder.remote_rollout(None if isinstance(actor, RemoteWorker) else actor.model)
        rollout = engine or rollout
    reference: Policy | RemoteWorker | None = None
    if config.uses_reference:
        model = None if isinstance(actor, RemoteWorker) else actor.model
        reference = builder.reference(model) if has("reference") else RemoteWorker("reference")
    if not isinstance(actor, RemoteWorker):
        builder.teach(actor, reference)
    learned = builder.learned_reward() if config.mixes_reward_model and has("actor") else None
    critic: Critic | RemoteWorker | None = None
    if config.uses_critic:
        critic = builder.critic(heads) if has("critic") else RemoteWorker("critic")
    reward = builder.reward(learned, models_are_here=has("reward"))
    implicit = builder.implicit_reward() if config.estimator_reads("implicit_rewards") and has("actor") else None
    if generates and shares and not isinstance(actor, RemoteWorker):
        rollout = builder.rollout(actor.model)
        sync = rollout.sync
    if config.reshard.overlap and isinstance(sync, WeightSync) and not isinstance(actor, RemoteWorker):
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
    )
