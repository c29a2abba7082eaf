"""Schedule of asynchronous rollouts: how far each role group may run ahead of training."""

from __future__ import annotations

from dataclasses import dataclass

from megaverl.config import Config
from megaverl.distributed.placement import ResolvedPlacement


@dataclass(frozen=True)
class Schedule:
    """Staleness schedule: after how many completed steps a role group begins its part of each step.

    Steps count from 0. The schedule is fixed before the run, so that two runs use the
    same weights for each step.

    Attributes:
        placement: ranks of each role.
        max_staleness: number of steps that rollouts may be ahead, or 0 if they alternate with training.
        save_interval, validate_every: number of steps between checkpoints and between validations, or 0 for never. No
            role group runs ahead of such a step.
        in_rounds: whether samples are made in rounds of generating and scoring (dynamic sampling). Engines and rewards
            then begin a step together, and receive no new weights until its rounds are complete.
        in_flight: whether engines that run ahead receive new weights in the middle of a step's responses.
    """

    placement: ResolvedPlacement
    max_staleness: int
    save_interval: int
    validate_every: int
    in_rounds: bool = False
    in_flight: bool = False

    @classmethod
    def of(cls, config: Config, placement: ResolvedPlacement) -> Schedule:
        """Create the schedule that the configuration implies."""
        rollout = config.rollout
        limit = rollout.max_staleness if rollout.async_rollout else 0
        # A replay does not generate in rounds, so its rewards need not wait for them.
        in_rounds = (
            config.algorithm.dynamic_sampling.metric is not None
            and config.trainer.replay_rollouts is None
        )
        saves, validates = (
            config.checkpoint.save_interval or 0,
            config.trainer.validate_every,
        )
        return cls(
            placement, limit, saves, validates, in_rounds, rollout.in_flight_updates
        )

    def lag(self, rank: int) -> int:
        """Return the lag of a rank's role group: the number of steps that it may be ahead of training."""
        return self.placement.lag(rank, self.max_staleness, in_rounds=self.in_rounds)

    def begins_after(self, step: int, steps_ahead: int) -> int:
        """Return how many steps must be completed on all ranks before a role group with this lag begins `step`."""
        return max(step - steps_ahead, self._last_barrier(step, steps_ahead))

    def in_flight_after(self, step: int, steps_ahead: int) -> int:
        """Return how many steps must be completed before engines with this lag take new
        weights in the middle of `step`.
        """
        return max(
            self.begins_after(step, steps_ahead), min(step, step - steps_ahead + 1)
        )

    def _last_barrier(self, step: int, steps_ahead: int) -> int:
        """Return the last number of completed steps, up to `step`, that no role group may run ahead of."""
        # Only barriers within the lag can hold this step back.
        return max(
            (
                done
                for done in range(max(0, step - steps_ahead), step + 1)
                if self._is_barrier(done)
            ),
            default=0,
        )

    def _is_barrier(self, done: int) -> bool:
        return any(
            every and done % every == 0
            for every in (self.save_interval, self.validate_every)
        )
