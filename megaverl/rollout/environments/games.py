"""Example games: guess a hidden number (one player), and Lewis's signalling game (two players).

The module also makes rows on which a tiny model learns the built-in environments from
scratch, for recipes and tests. The supervised warm-up on these rows teaches only the
form of a turn; reinforcement must find out what to write.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megaverl.rollout.environments.environment import (
    Codec,
    Environment,
    Game,
    Outcome,
    Start,
    register_environment,
)


@register_environment("guess")
class GuessingGame(Environment):
    """Guess a number: the row's answer is the hidden number, and each turn is one guess.

    Options:
        higher, lower: answers to a guess that is too low or too high.
        unreadable: answer to a turn that is not a number.
        turn_cost: subtracted from the reward for each wrong guess.
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
        self.higher, self.lower, self.unreadable, self.turn_cost = (
            higher,
            lower,
            unreadable,
            turn_cost,
        )
        self.secret = 0

    def reset(self, start: Start) -> Sequence[int]:
        """Read the hidden number and return the row's prompt.

        Raises:
            ValueError: the row's answer is not a whole number.
        """
        self.secret = int(start.reference)
        return start.token_ids

    def step(self, token_ids: Sequence[int]) -> Outcome:
        """Give reward 1 for the hidden number; otherwise a hint and the cost of a turn."""
        text = self.codec.decode(token_ids).strip()
        guess = int(text) if text.isdecimal() else None
        if guess == self.secret:
            return Outcome(reward=1.0, done=True)
        if guess is None:
            hint = self.unreadable
        elif guess < self.secret:
            hint = self.higher
        else:
            hint = self.lower
        return Outcome(self.codec.answer(hint, token_ids), reward=-self.turn_cost)


SPEAKER, LISTENER = "speaker", "listener"


@register_environment("signals")
class SignallingGame(Game):
    """Signalling game: the speaker reads the row's prompt, and the listener must find the row's answer.

    Options:
        listener_prompt: what the listener reads before the speaker's word.
        ending: what the listener reads after it.
        speaker_reward, listener_reward: rewards of both if the guess is right.
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
        return {
            SPEAKER: start.token_ids,
            LISTENER: self.codec.encode(self.listener_prompt),
        }

    def acting(self) -> Sequence[str]:
        return (self.next,)

    def step(self, turns: Mapping[str, Sequence[int]]) -> Mapping[str, Outcome]:
        """Pass the speaker's own tokens to the listener, or score the listener's guess, which ends the game."""
        if self.next == SPEAKER:
            self.next = LISTENER
            word = [
                token
                for token in turns[SPEAKER]
                if token not in self.codec.tokenizer.stop_token_ids
            ]
            return {LISTENER: Outcome([*word, *self.codec.encode(self.ending)])}
        right = self.codec.decode(turns[LISTENER]).strip() == self.answer
        return {
            SPEAKER: Outcome(reward=self.speaker_reward * right, done=True),
            LISTENER: Outcome(reward=self.listener_reward * right, done=True),
        }


Row = dict[str, str]


@dataclass(frozen=True)
class Example:
    """Rows {prompt, answer} of an example.

    Attributes:
        train: rows of the episodes to train on.
        held_out: rows of the episodes to validate on.
        warm_up: prompts with responses for a supervised warm-up.
    """

    train: list[Row]
    held_out: list[Row]
    warm_up: list[Row]

    def texts(self) -> list[str]:
        """List the texts that a tokenizer is trained on."""
        return [row["prompt"] + row["answer"] for row in (*self.train, *self.warm_up)]


def guessing(draw: random.Random) -> Example:
    """Make rows with a digit to find. The warm-up guesses blindly, with and without hints."""
    rows = [{"prompt": "guess =", "answer": str(digit)} for digit in range(10)]
    warm_up = []
    for _ in range(2000):
        hints = (
            f"{draw.randrange(10)} {draw.choice(('higher', 'lower'))}"
            for _ in range(draw.randrange(4))
        )
        warm_up.append(
            {"prompt": " ".join(["guess =", *hints]), "answer": str(draw.randrange(10))}
        )
    return Example(rows * 100, rows * 13, warm_up)


def calculating(draw: random.Random) -> Example:
    """Make rows with two-digit sums.

    In the warm-up, the model calls the tool and copies its result, each with occasional
    mistakes. The space before a call and the stop token after it give the text the same
    tokens as an episode, turn by turn.
    """
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(problems)
    rows = [{"prompt": f"add {a} {b} =", "answer": str(a + b)} for a, b in problems]
    held_out, train = rows[:128], rows[128:]
    warm_up = []
    for a, b in problems[128:]:
        slip = draw.random() < 0.3
        call = f" [{draw.randrange(10, 100) if slip else a}+{b}]"
        warm_up.append({"prompt": f"add {a} {b} =", "answer": call})
        result = str(a + b)
        answer = result if draw.random() < 0.7 else str(draw.randrange(20, 199))
        warm_up.append(
            {"prompt": f"add {a} {b} = [{a}+{b}]</s> is {result} =", "answer": answer}
        )
    return Example(train, held_out, warm_up)


def signalling(draw: random.Random) -> Example:
    """Make rows with a digit to name. The warm-up says and guesses any digit, with a
    slight preference for the right one.

    Without this preference every word would mean as much as any other, and neither
    player could beat chance by changing alone: the gradient would be pure noise.
    """
    rows = [{"prompt": f"say {digit} =", "answer": str(digit)} for digit in range(10)]
    warm_up = []
    for _ in range(1000):
        for word in ("say", "hear"):
            digit = draw.randrange(10)
            answer = digit if draw.random() < 0.3 else draw.randrange(10)
            warm_up.append({"prompt": f"{word} {digit} =", "answer": str(answer)})
    return Example(rows * 100, rows * 13, warm_up)


EXAMPLES: dict[str, Callable[[random.Random], Example]] = {
    "guess": guessing,
    "tools": calculating,
    "signals": signalling,
}


def example(environment: str, seed: int = 0) -> Example:
    """Return the rows of an environment; the same for the same seed."""
    return EXAMPLES[environment](random.Random(f"{environment}/{seed}"))
