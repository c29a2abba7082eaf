"""Several agents, each with an actor and a critic of its own, trained on the same episodes: independent PPO.

IPPO, arXiv 2011.09533: every agent treats the others as part of its environment, and runs PPO on what it saw, wrote and
was paid. `environment.agents: own`; with `shared` the agents are `Trainer`'s one actor, see `Credit.assign_each`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megaverl.algorithms import KLController
from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.dataflow import DataFlow, Operator
from megaverl.errors import ConfigError
from megaverl.rollout.engine import Engine
from megaverl.trainer.build import Builder
from megaverl.trainer.rl import Trainer
from megaverl.trainer.roles import Roles
from megaverl.trainer.step import RLStep
from megaverl.workers.reward import Scores
from megaverl.workers.rollout import AgentRollouts, Rollout


def trainer_of(config: Config) -> type[Trainer]:
    """The loop that a configuration wants, where all roles share all ranks."""
    return AgentsTrainer if config.environment.agents == "own" else Trainer


class AgentsTrainer(Trainer):
    """As `Trainer`, with roles of its own for every agent of the game; one engine, which they use in turn."""

    def make_roles(self, builder: Builder, *, generates: bool) -> Roles:
        roles = agents_roles(builder, generates=generates)
        self.agents = {agent: RLStep(self.config, own, warn=self.console.warn) for agent, own in roles.agents.items()}
        return roles

    def make_flow(self) -> DataFlow:
        return agents_flow(self.step, tuple(self.agents), self._train_agent)

    def _train_agent(self, agent: str, rollouts: RolloutBatch, scores: Scores, step: int) -> None:
        """The agent's own advantages, critic and actor, on its own samples."""
        own = self.agents[agent]
        rows = (rollouts.agent_ids == list(self.agents).index(agent)).nonzero()[:, 0].tolist()
        own.metrics = {}
        done = {"rollouts": own_samples(rollouts, rows), "scores": scores.select(rows)}
        own.flow().run(self.stages, done, prompts=[], step=step)
        engines = self.roles.rollout
        assert isinstance(engines, AgentRollouts)
        engines.current = None
        if agent == list(self.agents)[-1]:
            engines.weight_version += 1
        own.metrics["reward/mean"] = float(scores.total[rows].mean())
        for name, value in own.metrics.items():
            self.step.metrics[f"{agent}/{name}"] = value
            if not name.startswith("reward/"):  # what a person watches: the mean over the agents
                self.step.metrics[name] = self.step.metrics.get(name, 0.0) + value / len(self.agents)


def agents_roles(builder: Builder, *, generates: bool) -> Roles:
    """An actor and a critic for every agent of the game; reference, rewards and engine are everybody's.

    Raises:
        ConfigError: the environment has one agent only, or nothing is generated.
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
    return Roles(
        actor=first.actor,
        critic=first.critic,
        reference=None,
        reward=reward,
        kl=AgentKLs({agent: roles.kl for agent, roles in agents.items()}),
        rollout=engines,
        sync=engines,
        player=player,
        agents=agents,
    )


def agents_flow(step: RLStep, agents: Sequence[str], train: Callable[..., None]) -> DataFlow:
    """One rollout, then every agent's own step on its part of it.

    Args:
        train: called with an agent's name, rollouts, scores and step.
    """
    flow = DataFlow()
    flow.add_operator(Operator("rollout", step.generate, ("prompts", "step"), ("rollouts",), role="rollout"))
    flow.add_operator(Operator("reward", step.score, ("rollouts",), ("scores",), role="reward"))
    for agent in agents:
        inputs = ("rollouts", "scores", "step")
        flow.add_operator(Operator(f"agent_{agent}", partial(train, agent), inputs, (), role="actor"))
    return step.compiled(flow)


def own_samples(rollouts: RolloutBatch, rows: list[int]) -> RolloutBatch:
    """One agent's samples, as if there were no others."""
    batch = rollouts.select(rows).trim()
    return RolloutBatch({name: tensor for name, tensor in batch.tensors.items() if name != "agent_ids"}, batch.columns)


class AgentKLs(KLController):
    """The KL controllers of all agents, as a checkpoint sees them."""

    def __init__(self, controllers: Mapping[str, KLController]) -> None:
        self.controllers = dict(controllers)

    @property
    def coef(self) -> float:  # type: ignore[override]
        """The mean of theirs."""
        return sum(each.coef for each in self.controllers.values()) / len(self.controllers)

    def update(self, kl: float) -> None:
        """Each agent's own step tells its controller."""

    def state_dict(self) -> dict[str, Any]:
        return {agent: each.state_dict() for agent, each in self.controllers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for agent, each in self.controllers.items():
            each.load_state_dict(state[agent])
