"""How far each world of a split run may be ahead of training: settled before the run, so that two runs are the same."""

from __future__ import annotations

from dataclasses import dataclass

from megaverl.config import Config
from megaverl.distributed.placement import ResolvedPlacement

# What may run ahead of training, and how many hands its work goes through from the rollout on. The critic may value the
# samples of a step while the actor is still at the one before; for its own update it waits.
AHEAD = {"rollout": 0, "reward": 1, "reference": 1}


@dataclass(frozen=True)
class Schedule:
    """After how many steps of training a world begins its part of a step; steps count from 0.

    Attributes:
        placement: who has which roles.
        max_staleness: steps that rollouts may be ahead; 0 where they take turns with training.
        save_interval, validate_every: after so many steps the run saves, or validates, and nobody is ahead; 0: never.
        in_rounds: samples are made in rounds of generating and scoring (dynamic sampling): engines and rewards begin a
            step together, and see no other weights until its rounds are over.
    """

    placement: ResolvedPlacement
    max_staleness: int
    save_interval: int
    validate_every: int
    in_rounds: bool = False

    @classmethod
    def of(cls, config: Config, placement: ResolvedPlacement) -> Schedule:
        rollout = config.rollout
        limit = rollout.max_staleness if rollout.async_rollout else 0
        in_rounds = config.algorithm.dynamic_sampling.metric is not None and config.trainer.replay_rollouts is None
        return cls(placement, limit, config.checkpoint.save_interval or 0, config.trainer.validate_every, in_rounds)

    def lag(self, rank: int) -> int:
        """How many steps a rank's world may be ahead of training."""
        own, makers = self._own_lag(rank), ("rollout", "reward")
        if not self.in_rounds or not {*makers} & set(self.placement.roles_of(rank)):
            return own
        return min(own, *(self._own_lag(self.placement.ranks[role][0]) for role in makers))

    def _own_lag(self, rank: int) -> int:
        roles = set(self.placement.roles_of(rank)) - {"coordinator"}
        if not self.max_staleness or not roles or not roles <= {*AHEAD, "critic"}:
            return 0
        if "critic" in roles:
            return 1
        hands = AHEAD | ({"reward": 0} if self.in_rounds else {})
        return max(0, self.max_staleness - min(hands[role] for role in roles))

    def begins_after(self, step: int, lag: int) -> int:
        """How many steps are behind all when a world of this lag begins its part of `step`."""
        return max(step - lag, self._last_barrier(step, lag))

    def _last_barrier(self, step: int, lag: int) -> int:
        """The last meeting before `step` that nobody may run ahead of."""
        return max((done for done in range(max(0, step - lag), step + 1) if self._is_barrier(done)), default=0)

    def _is_barrier(self, done: int) -> bool:
        return any(every and done % every == 0 for every in (self.save_interval, self.validate_every))
