"""Rows on which a tiny model learns an environment that comes with the package, from nothing: for recipes and tests.

The warm-up shows the form of a turn and no more: what to write is left to be found out by reinforcement.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Row = dict[str, str]


@dataclass(frozen=True)
class Example:
    """Rows {prompt, answer}: episodes to train on, others to validate on, and pairs for a supervised warm-up."""

    train: list[Row]
    held_out: list[Row]
    warm_up: list[Row]

    def texts(self) -> list[str]:
        """What a tokenizer is trained on."""
        return [row["prompt"] + row["answer"] for row in (*self.train, *self.warm_up)]


def guessing(draw: random.Random) -> Example:
    """A digit to find; the warm-up guesses blindly, with and without hints."""
    rows = [{"prompt": "guess =", "answer": str(digit)} for digit in range(10)]
    warm_up = []
    for _ in range(2000):
        hints = (f"{draw.randrange(10)} {draw.choice(('higher', 'lower'))}" for _ in range(draw.randrange(4)))
        warm_up.append({"prompt": " ".join(["guess =", *hints]), "answer": str(draw.randrange(10))})
    return Example(rows * 100, rows * 13, warm_up)


def calculating(draw: random.Random) -> Example:
    """Two-digit sums; the warm-up calls the tool, now and then with a slip, and copies what it said, likewise."""
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(problems)
    rows = [{"prompt": f"add {a} {b} =", "answer": str(a + b)} for a, b in problems]
    held_out, train = rows[:128], rows[128:]
    warm_up = []
    for a, b in problems[128:]:
        slip = draw.random() < 0.3
        call = f"[{draw.randrange(10, 100) if slip else a}+{b}]"
        warm_up.append({"prompt": f"add {a} {b} =", "answer": call})
        said = str(a + b)
        told = said if draw.random() < 0.7 else str(draw.randrange(20, 199))
        warm_up.append({"prompt": f"add {a} {b} = [{a}+{b}] is {said} =", "answer": told})
    return Example(train, held_out, warm_up)


def signalling(draw: random.Random) -> Example:
    """A digit to name; the warm-up says and guesses any digit, its own a little more often.

    Without that slight habit every word means as much as any other, and neither player can do better than chance by
    changing alone: the gradient is nothing but noise.
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
    """The rows of an environment; the same for the same seed."""
    return EXAMPLES[environment](random.Random(f"{environment}/{seed}"))
