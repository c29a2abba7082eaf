"""Independent PPO: several agents with their own actor and critic, trained on the same episodes.

Source: IPPO, arXiv 2011.09533. Every agent treats the others as part of its
environment, and runs PPO on what it observed, generated and was rewarded for. Enabled
by `environment.agents: own`. With `shared`, all agents are one actor
(`AdvantageComputer.assign_each`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from megaverl.config import Config
from megaverl.config.grids import is_placed, resolve_placement, role_grids, used_roles
from megaverl.data.batch import RolloutBatch
from megaverl.dataflow import DataFlow, Operator
from megaverl.dataflow.plan import CompiledFlow, Places
from megaverl.errors import ConfigError
from megaverl.rollout.engine import Engine
from megaverl.rollout.environments import agents_of
from megaverl.trainer.build import Builder
from megaverl.trainer.elastic_agent import default_nproc
from megaverl.trainer.roles import Roles
from megaverl.trainer.schedule import RolloutFolder
from megaverl.trainer.step import RLStep
from megaverl.workers.reward import Scores
from megaverl.workers.rollout import AgentRollouts, Rollout


def agents_roles(builder: Builder, *, generates: bool) -> Roles:
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


@dataclass
class AgentsStep(RLStep):
    """Operators of a step with one rollout, followed by a training step of every agent on its own samples."""

    agents: dict[str, RLStep] = field(default_factory=dict)
    # Metrics by agent, for the agents that the running step has trained.
    _trained: dict[str, dict[str, float]] = field(default_factory=dict)
    _last_step: int = -1

    def flow(self, places: Places | None = None) -> DataFlow:
        """Compile the flow: rollout, reward, then one operator for each agent."""
        flow = DataFlow()
        flow.add_operator(
            Operator(
                "rollout",
                self.generate,
                ("prompts", "step"),
                ("rollouts",),
                role="rollout",
            )
        )
        flow.add_operator(
            Operator("reward", self.score, ("rollouts",), ("scores",), role="reward")
        )
        for number, agent in enumerate(agents_of(str(self.config.environment.name))):
            inputs = ("rollouts", "scores", "step")
            update = partial(self.train_agent, agent, number)
            flow.add_operator(
                Operator(f"agent_{agent}", update, inputs, (), role="actor")
            )
        return self.compiled(flow, places)

    def train_agent(
        self, agent: str, number: int, rollouts: RolloutBatch, scores: Scores, step: int
    ) -> None:
        """Compute the agent's advantages and update its critic and actor on its own samples.

        Args:
            number: position of the agent in the game, as in `agent_ids`.
        """
        if agent not in self.agents:
            # Created on first use, because the flow is compiled before the roles exist.
            self.agents[agent] = RLStep(
                self.config, self.roles.agents[agent], warn=self.warn
            )
        engines = self.roles.rollout
        assert isinstance(engines, AgentRollouts)
        if step != self._last_step:
            self._last_step = step
            self._trained.clear()
            # The updates of all agents in a step count as one new version of the
            # weights.
            engines.weight_version += 1
        agent_step = self.agents[agent]
        rows = (rollouts.agent_ids == number).nonzero()[:, 0].tolist()
        agent_step.metrics = {}
        done = {"rollouts": own_samples(rollouts, rows), "scores": scores.select(rows)}
        agent_step.flow().run(self.span, done, prompts=[], step=step)
        # The flow has loaded this agent's new weights into the engine. None makes the
        # next generation load weights again.
        engines.current = None
        agent_step.metrics["reward/mean"] = float(scores.total[rows].nanmean())
        self._trained[agent] = agent_step.metrics
        self.metrics |= {
            f"{agent}/{name}": value for name, value in agent_step.metrics.items()
        }
        self.metrics |= self._means()

    def _means(self) -> dict[str, float]:
        """Return the means over the agents that the step has trained, for the console and trackers."""
        means: dict[str, float] = {}
        for metrics in self._trained.values():
            for name, value in metrics.items():
                # Reward metrics of all samples are measured already.
                if not name.startswith("reward/"):
                    means[name] = means.get(name, 0.0) + value / len(self._trained)
        return means


def plan_of(config: Config, world_size: int | None = None) -> CompiledFlow:
    """Return the compiled flow of the trainer for this configuration, without creating any role.

    Args:
        world_size: number of ranks of the job, for roles on separate ranks. None: `run.nproc`, or as many as needed.
    """
    places = None
    if is_placed(config):
        size = world_size or config.run.nproc or default_nproc(config, "train")
        grids = role_grids(config, used_roles(config, "train"))
        places = resolve_placement(config.placement, grids, size).ranks
    replay = config.trainer.replay_rollouts
    nobody = cast(Roles, None)  # the flow accesses the roles only when it runs
    make_step = AgentsStep if config.environment.agents == "own" else RLStep
    return (
        make_step(config, nobody, RolloutFolder(replay) if replay else None)
        .flow(places)
        .plan
    )


def own_samples(rollouts: RolloutBatch, rows: list[int]) -> RolloutBatch:
    """Return one agent's samples as a batch without agent ids."""
    batch = rollouts.select(rows).trim()
    return RolloutBatch(
        {name: tensor for name, tensor in batch.tensors.items() if name != "agent_ids"},
        batch.columns,
    )
