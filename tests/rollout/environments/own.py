"""Environments as a user writes them, named module:object in a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from megaverl.rollout.environments import Environment, Outcome, Start


class Countdown(Environment):
    """Pays for every token, three turns long; the answer to a turn is a digit."""

    def reset(self, start: Start) -> Sequence[int]:
        self.left = 3
        return start.token_ids

    def step(self, token_ids: Sequence[int]) -> Outcome:
        self.left -= 1
        return Outcome(self.codec.answer(str(self.left), token_ids), reward=len(token_ids) / 10, done=not self.left)


class Failing(Countdown):
    """Goes wrong in some episodes, on whichever rank holds them."""

    def step(self, token_ids: Sequence[int]) -> Outcome:
        if self.left == 2 and len(token_ids) > 1:
            raise KeyError("forgotten")
        return super().step(token_ids)
