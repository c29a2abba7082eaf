"""A guessing game: find a hidden number; after every guess the model is told on which side it lies."""

from __future__ import annotations

from collections.abc import Sequence

from megaverl.rollout.environments.codec import Codec
from megaverl.rollout.environments.environment import Environment, Outcome, Start
from megaverl.rollout.environments.registry import register_environment


@register_environment("guess")
class GuessingGame(Environment):
    """The row's answer is the hidden number; a turn is one guess.

    Options:
        higher, lower: what is said after a guess that is too low, too high; `unreadable` after one that is no number.
        turn_cost: taken from the reward for each guess that is wrong.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        higher: str = "higher",
        lower: str = "lower",
        unreadable: str = "higher",
        turn_cost: float = 0.1,
    ) -> None:
        super().__init__(codec)
        self.higher, self.lower, self.unreadable, self.turn_cost = higher, lower, unreadable, turn_cost
        self.secret = 0

    def reset(self, start: Start) -> Sequence[int]:
        """The row's prompt.

        Raises:
            ValueError: the row's answer is not a whole number.
        """
        self.secret = int(start.reference)
        return start.token_ids

    def step(self, token_ids: Sequence[int]) -> Outcome:
        """1 for the hidden number; otherwise a hint, and the cost of a turn."""
        text = self.codec.decode(token_ids).strip()
        guess = int(text) if text.isdecimal() else None
        if guess == self.secret:
            return Outcome(reward=1.0, done=True)
        hint = self.unreadable if guess is None else self.higher if guess < self.secret else self.lower
        return Outcome(self.codec.answer(hint, token_ids), reward=-self.turn_cost)
