"""Independent PPO: several agents with their own actor and critic, trained on the same episodes.

Source: IPPO, arXiv 2011.09533. Every agent treats the others as part of its
environment, and runs PPO on what it observed, generated and was rewarded for. Enabled
by `environment.agents: own`. With `shared`, all agents are one actor
(`AdvantageComputer.assign_each`).

    program                  agents                       actor.NAME, critic.NAME, weights.NAME
    GameAgent.train  ---->   select_rollouts, select_scores
                     ---------------------------------->  the calls of `program.train_on`
                     ---->   end_training
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megaverl.controller.core import Controller
from megaverl.controller.groups import WorkerGroup, remote
from megaverl.controller.references import Ref
from megaverl.data.batch import RolloutBatch
from megaverl.trainer.program import send_weights, train_on
from megaverl.trainer.role_groups import (
    AGENT,
    ActorGroup,
    CriticGroup,
    ReferenceGroup,
    Run,
    Samples,
)
from megaverl.trainer.role_workers import (
    ActorWorker,
    CriticWorker,
    ReferenceWorker,
    WeightsWorker,
)
from megaverl.trainer.run_state import RunState
from megaverl.trainer.sample_rows import SampleStore, SampleValue
from megaverl.trainer.step import RLStep
from megaverl.workers.reward import Scores
from megaverl.workers.rollout import AgentRollouts


class AgentsGroup(WorkerGroup):
    """All ranks, for the samples and the metrics of each agent."""

    @remote
    def select_rollouts(
        self, rollouts: Ref[RolloutBatch], agent: str, step: int
    ) -> Ref[RolloutBatch]:
        """Begin the training of an agent in a step. Return its own responses."""

    @remote
    def select_scores(
        self, rollouts: Ref[RolloutBatch], scores: Ref[Scores], agent: str
    ) -> Ref[Scores]:
        """Return the rewards of an agent's own responses."""

    @remote
    def end_training(self, scores: Ref[Scores], agent: str) -> None:
        """Record the metrics of an agent's training.

        Args:
            scores: rewards of the agent's own responses.
        """


@dataclass(frozen=True)
class GameAgent:
    """Agent of a game, as the program of a run sees it.

    Attributes:
        run: the run, in which actor, critic and reference are those of this agent.

    Example:
        await run.agents["first"].train(rollouts, scores, step)
    """

    name: str
    run: Run
    group: AgentsGroup

    async def train(
        self, rollouts: Ref[RolloutBatch], scores: Ref[Scores], step: int
    ) -> None:
        """Train the agent on its own samples and advantages, then update its engine's weights."""
        own_rollouts = await self.group.select_rollouts(rollouts, self.name, step)
        own_scores = await self.group.select_scores(rollouts, scores, self.name)
        updates = await train_on(self.run, step, Samples(own_rollouts, own_scores))
        await send_weights(self.run, step, updates)
        await self.group.end_training(own_scores, self.name)


def make_agents(
    run: Run, names: list[str], controller: Controller
) -> Mapping[str, GameAgent]:
    """Create the handles of a game's agents. Every rank has all of them."""
    ranks = range(controller.num_ranks)
    group = AgentsGroup("agents", ranks, controller)
    agents = {}
    for name in names:
        actor = ActorGroup(f"actor.{name}", ranks, controller)
        actor.weights = f"weights.{name}"
        critic = CriticGroup(f"critic.{name}", ranks, controller)
        reference = ReferenceGroup(f"reference.{name}", ranks, controller)
        own_run = replace(
            run,
            actor=actor,
            critic=None if run.critic is None else critic,
            reference=None if run.reference is None else reference,
        )
        agents[name] = GameAgent(name, own_run, group)
    return agents


def make_agent_workers(state: RunState, store: SampleStore) -> dict[str, object]:
    """Create the workers of every agent's roles, under the names that `make_agents` calls."""
    step = state.step
    operators = {
        name: RLStep(step.config, own_roles, warn=step.warn)
        for name, own_roles in state.roles.agents.items()
    }
    workers: dict[str, object] = {"agents": AgentsWorker(state, store, operators)}
    for name, own_operators in operators.items():
        workers |= {
            f"actor.{name}": ActorWorker(state, store, own_operators),
            f"critic.{name}": CriticWorker(state, store, own_operators),
            f"reference.{name}": ReferenceWorker(state, store, own_operators),
            f"weights.{name}": WeightsWorker(state, store, own_operators),
        }
    return workers


class AgentsWorker:
    """Worker that selects each agent's samples and records its metrics, on one rank (`AgentsGroup`).

    Args:
        state: this rank's roles and the metrics of the running step.
        store: converts values of the program to batches.
        operators: operators of a step by agent, in the order of the game's agents.
    """

    def __init__(
        self, state: RunState, store: SampleStore, operators: Mapping[str, RLStep]
    ) -> None:
        self._state, self._store, self._operators = state, store, operators
        # Metrics by agent, for the agents that the running step has trained.
        self._trained: dict[str, dict[str, float]] = {}
        self._last_step = -1
        self._began = 0.0  # when the training of the current agent began

    def select_rollouts(
        self, rollouts: SampleValue, agent: str, step: int
    ) -> SampleValue:
        """Begin the training of an agent in a step. Return its own responses."""
        if step != self._last_step:
            self._last_step = step
            self._trained.clear()
            # The updates of all agents in a step count as one new version of the
            # weights.
            self._engines.weight_version += 1
        self._operators[agent].metrics = {}
        self._began = time.perf_counter()
        batch = self._store.batch(rollouts)
        own_batch = batch.select(self._rows(batch, agent)).trim()
        tensors = {
            name: tensor
            for name, tensor in own_batch.tensors.items()
            if name != "agent_ids"
        }
        return self._store.give(RolloutBatch(tensors, own_batch.columns))

    def select_scores(
        self, rollouts: SampleValue, scores: Scores, agent: str
    ) -> Scores:
        """Return the rewards of an agent's own responses."""
        return scores.select(self._rows(self._store.batch(rollouts), agent))

    def end_training(self, scores: Scores, agent: str) -> None:
        """Record the metrics of an agent's training, and their means over the agents for the console and trackers."""
        # The engine has received this agent's new weights. None makes the next
        # generation load weights again.
        self._engines.current = None
        metrics = self._operators[agent].metrics
        metrics["reward/mean"] = float(scores.total.nanmean())
        self._trained[agent] = metrics
        measured = self._state.step.metrics
        # The training consists of several stages, so no span of the timeline has its
        # duration.
        seconds = time.perf_counter() - self._began
        measured[f"time/{AGENT}{agent}_ms"] = seconds * 1e3
        measured |= {f"{agent}/{name}": value for name, value in metrics.items()}
        means: dict[str, float] = {}
        for metrics in self._trained.values():
            for name, value in metrics.items():
                # Reward metrics of all samples are measured already.
                if not name.startswith("reward/"):
                    means[name] = means.get(name, 0.0) + value / len(self._trained)
        measured |= means

    @property
    def _engines(self) -> AgentRollouts:
        engines = self._state.roles.rollout
        assert isinstance(engines, AgentRollouts)
        return engines

    def _rows(self, batch: RolloutBatch, agent: str) -> list[int]:
        number = list(self._operators).index(agent)
        rows: list[int] = (batch.agent_ids == number).nonzero()[:, 0].tolist()
        return rows
