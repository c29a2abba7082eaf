"""Lewis's signalling game: one player knows something and says a word, the other hears it and must guess.

Nobody tells them what a word means: both are paid only when the guess is right (D. Lewis, Convention, 1969).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megaverl.rollout.environments.codec import Codec
from megaverl.rollout.environments.environment import Game, Outcome, Start
from megaverl.rollout.environments.registry import register_environment

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
