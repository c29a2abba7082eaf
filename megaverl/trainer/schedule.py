"""Schedule of asynchronous rollouts: how far engines and rewards may run ahead of training."""

from __future__ import annotations

from dataclasses import dataclass

from megaverl.config import Config
from megaverl.distributed.placement import ResolvedPlacement


@dataclass(frozen=True)
class Schedule:
    """Staleness schedule: after how many completed steps the engines begin each step.

    Steps count from 0. The schedule is fixed before the run, so that two runs use the
    same weights for each step.

    Attributes:
        engines_ahead, rewards_ahead: number of steps that engines and reward ranks may be ahead of training. With
            dynamic sampling both begin a step together, and receive no new weights until its rounds are complete.
        save_interval, validate_every: number of steps between checkpoints and between validations, or 0 for never.
            Nothing runs ahead of such a step.
    """

    engines_ahead: int
    rewards_ahead: int
    save_interval: int
    validate_every: int

    @classmethod
    def of(cls, config: Config, placement: ResolvedPlacement) -> Schedule:
        """Create the schedule that the configuration implies."""
        rollout = config.rollout
        limit = rollout.max_staleness if rollout.async_rollout else 0
        # A replay does not generate in rounds, so its rewards need not wait for them.
        in_rounds = config.samples_in_rounds and config.trainer.replay_rollouts is None
        engines, rewards = (
            placement.lag(placement.ranks[role][0], limit, in_rounds=in_rounds)
            for role in ("rollout", "reward")
        )
        save_interval = config.checkpoint.save_interval or 0
        return cls(engines, rewards, save_interval, config.trainer.validate_every)

    def begins_after(self, step: int) -> int:
        """Return how many steps must be completed on all ranks before the engines begin `step`."""
        earliest = step - self.engines_ahead
        # Only barriers within the lag can hold this step back.
        barriers = filter(self._is_barrier, range(max(0, earliest), step + 1))
        return max(earliest, *barriers, 0)

    def new_weights_after(self, step: int) -> int:
        """Return how many steps must be completed before the engines take new weights
        in the middle of the responses of `step` (`rollout.in_flight_updates`).
        """
        return max(self.begins_after(step), min(step, step - self.engines_ahead + 1))

    def _is_barrier(self, done: int) -> bool:
        return any(
            every and done % every == 0
            for every in (self.save_interval, self.validate_every)
        )
