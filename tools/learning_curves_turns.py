"""The quickstart's task in turns, for the algorithms that credit turns: two tokens a turn, until the model stops.

The environment says nothing in between, so that prompts and tokens are the quickstart's, and the rewards of an episode
add up to the quickstart's: `positions`, paid turn by turn as far as it has come, and `exact_match` of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megaverl.rewards import RewardSample
from megaverl.rewards.rules import exact_match, positions
from megaverl.rollout.environments import Codec, Environment, Outcome, Start

TURN_TOKENS = 2


class DigitsInTurns(Environment):
    """Each turn is paid by how much more, or less, of the answer stands where it belongs."""

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
        return Outcome(reward=reward, done=self.written[-1] in self.codec.tokenizer.stop_token_ids)


def whole_answer(sample: RewardSample) -> float:
    """`exact_match` of all turns together."""
    return exact_match(replace(sample, response=sample.transcript or ""))
