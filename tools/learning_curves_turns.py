"""Environment of the quickstart's task in turns of two tokens, for the algorithms that assign credit to turns.

An episode lasts until the model stops. The environment adds no text, so prompts and tokens are the quickstart's. The
rewards of an episode add up to the quickstart's: `positions`, paid turn by turn, and `exact_match` of the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megaverl.rewards import RewardSample
from megaverl.rewards.rules import exact_match, positions
from megaverl.rollout.environments import Codec, Environment, Outcome, Start

TURN_TOKENS = 2


class DigitsInTurns(Environment):
    """Pays each turn the change in the share of the answer's digits that are in their right place."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self.start, self.paid = Start([]), 0.0
        self.written: list[int] = []

    def reset(self, start: Start) -> Sequence[int]:
        self.start = start
        return start.token_ids

    def step(self, token_ids: Sequence[int]) -> Outcome:
        self.written += token_ids
        text = self.codec.decode(self.written)
        worth = positions(RewardSample(self.start.text, text, self.start.reference))
        reward, self.paid = worth - self.paid, worth
        return Outcome(
            reward=reward, done=self.written[-1] in self.codec.tokenizer.stop_token_ids
        )


def whole_answer(sample: RewardSample) -> float:
    """Return `exact_match` of all turns together."""
    return exact_match(replace(sample, response=sample.transcript or ""))
