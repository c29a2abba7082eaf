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
from megaverl.monitoring.console import Console
from megaverl.trainer.build import Builder
from megaverl.trainer.job import Job
from megaverl.trainer.rl import Trainer
from megaverl.trainer.saving import export_model
from megaverl.trainer.step import RLStep, Roles
from megaverl.workers.agent_rollouts import AgentRollouts
from megaverl.workers.reward import Scores
from megaverl.workers.rollout import Rollout
from megaverl.workers.trainable import TrainableModel


def trainer_of(config: Config) -> type[Trainer]:
    """The loop that a configuration wants, where all roles share all ranks."""
    return AgentsTrainer if config.environment.agents == "own" else Trainer


class AgentsTrainer(Trainer):
    """As `Trainer`, with roles of its own for every agent of the game; one engine, which they use in turn."""

    def __init__(
        self, config: Config, console: Console, builder: Builder | None = None, job: Job | None = None
    ) -> None:
        apart = config.model_copy(update={"reshard": config.reshard.model_copy(update={"alias": "never"})})
        if builder is not None:
            builder.config = apart
        self.agents: dict[str, RLStep] = {}
        super().__init__(apart, console, builder, job)

    def make_roles(self, builder: Builder, *, generates: bool) -> Roles:
        config, player, reward = self.config, builder.player(), builder.reward()
        if player is None or len(player.agents) < 2 or not generates:
            raise ConfigError(
                f"environment.agents=own: {config.environment.name} has one agent only. Leave it out, or name a game."
            )
        reference = builder.reference() if config.uses_reference else None
        rollouts: dict[str, Rollout] = {}
        for agent in player.agents:
            actor = builder.actor()
            builder.teach(actor, reference)
            engine = next(iter(rollouts.values())).engine if rollouts else None
            rollouts[agent] = builder.rollout(actor.model, engine)
            roles = Roles(
                actor=actor,
                critic=builder.critic() if config.uses_critic else None,
                reference=reference,
                reward=reward,
                kl=builder.kl_controller(),
                rollout=rollouts[agent],
            )
            self.agents[agent] = RLStep(config, roles, warn=self.console.warn)
        first = self.agents[player.agents[0]].roles
        self.seats = AgentRollouts(rollouts)
        seats: Any = self.seats
        kl: Any = AgentKLs({agent: step.roles.kl for agent, step in self.agents.items()})
        return Roles(
            actor=first.actor, critic=first.critic, reference=None, reward=reward, kl=kl, player=player, rollout=seats
        )

    def make_flow(self) -> DataFlow:
        return agents_flow(self.step, tuple(self.agents), self._train_agent)

    def _train_agent(self, agent: str, rollouts: RolloutBatch, scores: Scores, step: int) -> None:
        """The agent's own advantages, critic and actor, on its own samples."""
        own = self.agents[agent]
        rows = (rollouts.agent_ids == list(self.agents).index(agent)).nonzero()[:, 0].tolist()
        own.metrics = {}
        done = {"rollouts": own_samples(rollouts, rows), "scores": scores.select(rows)}
        own.flow().run(self.stages, done, prompts=[], step=step)
        self.seats.seated = None
        if agent == list(self.agents)[-1]:
            self.seats.weight_version += 1
        own.metrics["reward/mean"] = float(scores.total[rows].mean())
        for name, value in own.metrics.items():
            self.step.metrics[f"{agent}/{name}"] = value
            if not name.startswith("reward/"):  # what a person watches: the mean over the agents
                self.step.metrics[name] = self.step.metrics.get(name, 0.0) + value / len(self.agents)

    @property
    def trained(self) -> dict[str, TrainableModel]:
        roles: dict[str, TrainableModel] = {}
        for agent, step in self.agents.items():
            roles[f"actor_{agent}"] = step.roles.actor.trainable
            if step.roles.critic is not None:
                roles[f"critic_{agent}"] = step.roles.critic.trainable
        return roles

    def export(self) -> None:
        for agent, step in self.agents.items():
            export_model(step.roles.actor.model, self.builder, self.run_dir / "hf" / agent)
        self.console.print(f"models written to {self.run_dir / 'hf'}: {', '.join(self.agents)}")


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


class AgentKLs:
    """The KL controllers of all agents, as a checkpoint sees them."""

    def __init__(self, controllers: Mapping[str, KLController]) -> None:
        self.controllers = dict(controllers)

    @property
    def coef(self) -> float:
        """The mean of theirs."""
        return sum(each.coef for each in self.controllers.values()) / len(self.controllers)

    def state_dict(self) -> dict[str, Any]:
        return {agent: each.state_dict() for agent, each in self.controllers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for agent, each in self.controllers.items():
            each.load_state_dict(state[agent])
