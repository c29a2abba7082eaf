"""Games that come with the package: guess a hidden number (one player); Lewis's signalling game (two)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megaverl.rollout.environments.environment import Codec, Environment, Game, Outcome, Start
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


SPEAKER, LISTENER = "speaker", "listener"


@register_environment("signals")
class SignallingGame(Game):
    """The row's prompt is the speaker's, its answer what the listener must find.

    Options:
        listener_prompt: what the listener sees before the word; ending: what it sees after it.
        speaker_reward, listener_reward: of each, when the guess is right.
    """

    agents = (SPEAKER, LISTENER)

    def __init__(
        self,
        codec: Codec,
        *,
        listener_prompt: str = "hear",
        ending: str = "=",
        speaker_reward: float = 1.0,
        listener_reward: float = 1.0,
    ) -> None:
        super().__init__(codec)
        self.listener_prompt, self.ending = listener_prompt, ending
        self.speaker_reward, self.listener_reward = speaker_reward, listener_reward
        self.answer, self.next = "", SPEAKER

    def reset(self, start: Start) -> Mapping[str, Sequence[int]]:
        self.answer, self.next = str(start.reference).strip(), SPEAKER
        return {SPEAKER: start.token_ids, LISTENER: self.codec.encode(self.listener_prompt)}

    def acting(self) -> Sequence[str]:
        return (self.next,)

    def step(self, turns: Mapping[str, Sequence[int]]) -> Mapping[str, Outcome]:
        """The listener hears the speaker's own tokens; its guess ends the game."""
        if self.next == SPEAKER:
            self.next = LISTENER
            word = [token for token in turns[SPEAKER] if token not in self.codec.tokenizer.stop_token_ids]
            return {LISTENER: Outcome([*word, *self.codec.encode(self.ending)])}
        right = self.codec.decode(turns[LISTENER]).strip() == self.answer
        return {
            SPEAKER: Outcome(reward=self.speaker_reward * right, done=True),
            LISTENER: Outcome(reward=self.listener_reward * right, done=True),
        }
