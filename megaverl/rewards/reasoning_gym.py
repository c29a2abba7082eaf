"""reasoning-gym: its procedural tasks as a data set, and each task's own verifier as the reward.

A row names the task and its index. The verifier recreates the entry from them, so its
solution never travels with the sample.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from functools import lru_cache
from importlib import metadata
from typing import Any
from urllib.parse import parse_qsl

from megaverl.errors import DataError
from megaverl.rewards.registry import RewardSample, register_reward
from megaverl.rewards.sandbox import (
    ConfinedProgram,
    Sandbox,
    SandboxLimits,
    why_not_here,
)

PREFIX, COLUMN = "reasoning_gym:", "reasoning_gym"
HOW_TO_INSTALL = "pip install 'megaverl[reasoning-gym]'"
SEED = {"seed": 0}  # default seed of a task
ANSWER = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)
# Runs in the sandbox, because some verifiers let sympy evaluate the model's text.
VERIFIER = """
import functools, json, sys
import reasoning_gym

@functools.lru_cache
def made(name, options):
    return reasoning_gym.create_dataset(name, **json.loads(options))

scores = []
for given in json.load(sys.stdin):
    dataset = made(given["name"], json.dumps(given["options"]))
    scores.append(float(dataset.score_answer(given["answer"], dataset[given["index"]])))
print("\\n" + json.dumps(scores))
"""
# Answers that one process verifies, as starting a process takes as long as several of
# them.
AT_ONCE = 16


class ReasoningGymRows:
    """Entries of a task, `reasoning_gym:NAME?size=1000&seed=1&OPTION=VALUE`, each created when it is read.

    NAME is one of `reasoning_gym.factory.DATASETS`, and the options are those of its
    configuration; seed is 0 by default.

    Raises:
        DataError: the package is missing, the task does not exist, or it refuses an option.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            name, options = read_task(path)
            options = SEED | options
            self._dataset = _dataset(name, json.dumps(options))
        except ValueError as error:
            raise DataError(f"{path}: {error}") from None
        version = metadata.version("reasoning-gym")
        self.fingerprint = hashlib.blake2b(
            f"{name} {options} {version}".encode(), digest_size=8
        ).hexdigest()

    def __len__(self) -> int:
        return int(self._dataset.size)

    def where(self, index: int) -> str:
        return f"{self.path}, row {index + 1}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = self._dataset[index]
        answer = entry["answer"]  # None if there are many right answers
        return {
            "prompt": entry["question"],
            "answer": "" if answer is None else str(answer),
            COLUMN: {"task": self.path, "index": index},
        }


def read_task(
    path: str, prefix: str = PREFIX, named: str = r"[^\W\d]\w*"
) -> tuple[str, dict[str, Any]]:
    """Parse `reasoning_gym:NAME?OPTION=VALUE&...` into name and options; values are JSON, or else text.

    Args:
        named: a regular expression for names.

    Raises:
        ValueError: the text does not have this form.
    """
    name, _, query = path.removeprefix(prefix).partition("?")
    try:
        pairs = parse_qsl(query, strict_parsing=True) if query else []
    except ValueError:
        pairs = [("", "")]
    if not re.fullmatch(named, name) or any(not key.isidentifier() for key, _ in pairs):
        raise ValueError(
            f"expected {prefix}NAME or {prefix}NAME?OPTION=VALUE&OPTION=VALUE"
        )
    return name, {key: _value(text) for key, text in pairs}


def why_no_task(path: str) -> str:
    """Return why a task's name is wrong, or that the package is missing; "" if all is well."""
    if importlib.util.find_spec("reasoning_gym") is None:
        return f"which needs the package reasoning-gym: {HOW_TO_INSTALL}."
    try:
        read_task(path)
    except ValueError as error:
        return f"{error}."
    return ""


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@lru_cache(maxsize=64)
def _dataset(name: str, options: str) -> Any:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(f"it needs the package reasoning-gym: {HOW_TO_INSTALL}.")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(
            f"reasoning-gym has no task {name!r}; it has {', '.join(sorted(DATASETS))}."
        )
    try:
        return reasoning_gym.create_dataset(name, **json.loads(options))
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        known = ", ".join(
            sorted(getattr(DATASETS[name][1], "__dataclass_fields__", {}))
        )
        raise ValueError(
            f"the task refuses its options ({error}); it has {known}."
        ) from None


def _check(
    tags: bool = True, workers: int = 2, seconds: float = 10.0, memory_mb: int = 2048
) -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(f"the package is missing. Run: {HOW_TO_INSTALL}")
    for name, value in (
        ("workers", workers),
        ("seconds", seconds),
        ("memory_mb", memory_mb),
    ):
        if value <= 0:
            raise ValueError(f"{name} is {value}; it must be more than 0")
    if reason := why_not_here():
        raise ValueError(reason)


@register_reward("reasoning_gym", batched=True, check=_check)
def reasoning_gym_score(
    samples: list[RewardSample],
    *,
    tags: bool = True,
    workers: int = 2,
    seconds: float = 10.0,
    memory_mb: int = 2048,
) -> list[float]:
    """Return the score of reasoning-gym's own verifier for the row's task: 1 if the answer is right, less otherwise.

    The verifiers run confined (see `Sandbox`), since some let sympy evaluate what the
    model wrote. One process runs several; if it fails, each of them runs alone. A
    verifier that takes too long, or raises, gives 0.

    Args:
        tags: whether the answer is the text in the last <answer>...</answer>; otherwise it is the whole response.
        workers: parallel verifiers on each rank.
        seconds, memory_mb: limits of one verifier.
    """
    tasks: list[tuple[int, dict[str, Any]]] = []
    for number, sample in enumerate(samples):
        task = sample.extra.get(COLUMN)
        if task is None:
            raise ValueError(
                "the row is of no reasoning-gym task; name one: data.train=reasoning_gym:chain_sum"
            )
        name, options = read_task(task["task"])
        options = SEED | options
        answers = ANSWER.findall(sample.response) if tags else [sample.response]
        if answers:
            task_input = {
                "name": name,
                "options": options,
                "index": task["index"],
                "answer": answers[-1].strip(),
            }
            tasks.append((number, task_input))
    box = Sandbox.shared(
        SandboxLimits(seconds, memory_mb, preload=("reasoning_gym",)), workers
    )
    size = min(AT_ONCE, -(-len(tasks) // workers)) or 1
    parts = [tasks[first : first + size] for first in range(0, len(tasks), size)]
    scores = [0.0] * len(samples)
    unverified = []
    for part, values in zip(parts, _verified(box, parts), strict=True):
        # One of the answers made the process fail, so verify each in a process of its
        # own.
        if values is None:
            unverified += [[entry] for entry in part]
        else:
            for (number, _), value in zip(part, values, strict=True):
                scores[number] = value
    for part, values in zip(unverified, _verified(box, unverified), strict=True):
        scores[part[0][0]] = values[0] if values is not None else 0.0
    return scores


def _verified(
    box: Sandbox, parts: list[list[tuple[int, dict[str, Any]]]]
) -> list[list[float] | None]:
    """Return the scores of each part; None if its process failed, or answered something else."""
    verifiers = []
    for part in parts:
        task_inputs = [task_input for _, task_input in part]
        verifiers.append(ConfinedProgram(VERIFIER, json.dumps(task_inputs)))
    outcomes = box.run_all(verifiers)
    scores: list[list[float] | None] = []
    for part, outcome in zip(parts, outcomes, strict=True):
        try:
            # A data set's own code may print, so only the last line is the answer.
            last_line = outcome.output.strip().rpartition("\n")[2]
            values = json.loads(last_line) if outcome.passed else None
        except ValueError:
            values = None
        if isinstance(values, list) and len(values) == len(part):
            scores.append([float(value) for value in values])
        else:
            scores.append(None)
    return scores
