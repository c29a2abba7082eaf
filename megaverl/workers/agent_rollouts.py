"""Several actors and one engine: whoever writes next gets its weights into the engine first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch.distributed as dist

from megaverl.rollout.engine import Engine, Generation, Sampling, of_some
from megaverl.weights.reshard import ReshardStats
from megaverl.workers.rollout import Rollout
from megaverl.workers.weight_sync import WeightSync


class AgentRollouts:
    """The rollouts of all agents, over the same engine, each with its own actor to take weights from.

    Nothing of the engine may share storage with an actor (`reshard.alias: never`): it holds one agent's weights after
    the other's. A change of agents costs one reshard.

    Attributes:
        weight_version: how often the agents' weights have changed, together.
        current: the agent whose weights the engine holds; None: those of nobody, or old ones.
    """

    def __init__(self, rollouts: Mapping[str, Rollout]) -> None:
        self.rollouts = dict(rollouts)
        self.weight_version = 0
        self.current: str | None = None

    @property
    def engine(self) -> Engine:
        return next(iter(self.rollouts.values())).engine

    @property
    def world(self) -> dist.ProcessGroup:
        return next(iter(self.rollouts.values())).world

    def source_changes(self) -> None:
        """To be called before the actors' weights change."""
        self.current = None
        for agent in self.rollouts:
            self._sync(agent).source_changes()

    def reshard(self) -> ReshardStats:
        """The first agent's weights, checked; the others' follow when it is their turn."""
        self.weight_version += 1
        first = next(iter(self.rollouts))
        self.current = first
        return self._sync(first).reshard()

    def of(self, agent: str) -> Rollout:
        """The engine with this agent's weights in it."""
        if self.current != agent:
            self._sync(agent).reshard()
            self.current = agent
        return self.rollouts[agent]

    def _sync(self, agent: str) -> WeightSync:
        sync = self.rollouts[agent].sync
        assert sync is not None, "every agent's weights come from its actor"
        return sync

    @contextmanager
    def awake(self) -> Iterator[None]:
        """As `Rollout.awake`, for every agent."""
        with ExitStack() as stack:
            for rollout in self.rollouts.values():
                stack.enter_context(rollout.awake())
            yield

    def generate_as(
        self,
        agents: Sequence[str],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        conversations: Sequence[int],
    ) -> list[Generation]:
        """One response per prompt, each written by its agent; all of one agent at a time."""
        found: dict[int, Generation] = {}
        # whose weights are there already begins
        for agent in sorted(set(agents), key=lambda name: (name != self.current, list(self.rollouts).index(name))):
            mine = [number for number, other in enumerate(agents) if other == agent]
            prompts_of, seeds_of = [prompts[n] for n in mine], [seeds[n] for n in mine]
            kept_at = [conversations[n] for n in mine]
            written = self.of(agent).generate(prompts_of, of_some(sampling, mine), seeds_of, conversations=kept_at)
            found |= dict(zip(mine, written, strict=True))
        return [found[number] for number in range(len(prompts))]
