"""Small generated tasks for the quickstart and for tests: nothing to download, and easy to check.

A transformer of a few layers learns them partly from worked examples, and the rest by
reinforcement learning. Held-out prompts never occur in training.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaverl.data.tokenizers import train_sentencepiece
from megaverl.errors import DataError

Row = dict[str, str]


@dataclass(frozen=True)
class Task:
    """One kind of problem. A problem is a string of digits.

    Attributes:
        name: name of the task.
        description: one line with an example.
        prompt: returns the problem as text.
        answer: returns the only correct answer, also digits.
        key: equivalent problems have the same key. All problems of a key are held out, or none.
        width: number of digits of a problem, from the requested `num_digits`.
    """

    name: str
    description: str
    prompt: Callable[[str], str]
    answer: Callable[[str], str]
    key: Callable[[str], str]
    width: Callable[[int], int]


def _terms(problem: str) -> tuple[str, str]:
    """Return the two terms of a sum."""
    half = len(problem) // 2
    return problem[:half], problem[half:]


def _add_answer(problem: str) -> str:
    """Return the sum with the lowest digit first, padded to one digit more than the terms.

    In this order each digit depends only on digits that come before it.
    """
    first, second = _terms(problem)
    return str(int(first) + int(second)).zfill(len(first) + 1)[::-1]


TASKS = {
    task.name: task
    for task in (
        Task(
            name="sort_digits",
            description="Sort the digits: 'sort 41523 =' -> '12345'.",
            prompt="sort {} =".format,
            answer=lambda problem: "".join(sorted(problem)),
            key=str,
            width=lambda num_digits: num_digits,
        ),
        Task(
            name="reverse",
            description="Write the digits backwards: 'reverse 41523 =' -> '32514'.",
            prompt="reverse {} =".format,
            answer=lambda problem: problem[::-1],
            key=str,
            width=lambda num_digits: num_digits,
        ),
        Task(
            name="add",
            description="Add two numbers, lowest digit of the sum first: 'add 047 285 =' -> '2330'.",
            prompt=lambda problem: "add {} {} =".format(*_terms(problem)),
            answer=_add_answer,
            key=lambda problem: "+".join(sorted(_terms(problem))),
            width=lambda num_digits: 2 * num_digits,
        ),
    )
}


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@dataclass(frozen=True)
class TaskData:
    """Rows {prompt, answer} of one task. `train` and `held_out` share no prompt."""

    name: str
    train: list[Row]
    held_out: list[Row]

    def texts(self) -> list[str]:
        """Return training prompts with their answers, to train a tokenizer on."""
        return [row["prompt"] + row["answer"] for row in self.train]

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write `train.jsonl` and `held_out.jsonl` into `folder`, and return the two paths."""
        folder = Path(folder)
        paths = folder / "train.jsonl", folder / "held_out.jsonl"
        for path, rows in zip(paths, (self.train, self.held_out), strict=True):
            write_rows(path, rows)
        return paths

    def train_tokenizer(self, path: str | Path) -> Path:
        """Train a sentencepiece model for this task, in which digits are single tokens and words one or two."""
        return train_sentencepiece(self.texts(), path, vocab_size=64)


def make_task(
    name: str,
    *,
    num_train: int = 2048,
    num_held_out: int = 256,
    num_digits: int = 5,
    seed: int = 0,
) -> TaskData:
    """Return rows of the task `name`. Equal arguments give equal rows.

    Args:
        num_digits: digits of the number to sort or reverse, or of each of the two terms to add. It sets the difficulty.

    Raises:
        DataError: there is no such task, or it has fewer distinct problems than requested.
    """
    if name not in TASKS:
        raise DataError(f"no task {name!r}; there are: {', '.join(TASKS)}.")
    task = TASKS[name]
    if num_digits < 1 or num_train < 1 or num_held_out < 0:
        raise DataError(
            f"task {name}: num_digits and num_train must be at least 1 and num_held_out at least 0; "
            f"found {num_digits}, {num_train} and {num_held_out}."
        )
    width = task.width(num_digits)
    draw = random.Random(f"{name}/{num_digits}/{seed}")
    wanted = num_train + num_held_out
    possible = 10**width
    # With few problems, go through all of them in random order. With many, draw:
    # duplicates are rare.
    numbers = (
        iter(draw.sample(range(possible), possible))
        if possible < 4 * wanted
        else (draw.randrange(possible) for _ in itertools.count())
    )
    chosen: dict[str, str] = {}
    while len(chosen) < wanted:
        number = next(numbers, None)
        if number is None:
            raise DataError(
                f"task {name}: {wanted} different prompts were asked for, but with num_digits={num_digits} "
                f"there are only {len(chosen)}. Ask for fewer, or for more digits."
            )
        problem = str(number).zfill(width)
        chosen.setdefault(task.key(problem), problem)
    rows = [
        {"prompt": task.prompt(problem), "answer": task.answer(problem)}
        for problem in chosen.values()
    ]
    return TaskData(name, train=rows[num_held_out:], held_out=rows[:num_held_out])
