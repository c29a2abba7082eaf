"""Accuracy: which reward decides it, and what is said where that one never gives 1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megaverl.rewards import build_reward
from megaverl.trainer.validation import HeldOutResult, Validation

OWN = {"function": "tests.rewards.test_accuracy:half"}
OVERLONG = {"name": "soft_overlong", "options": {"max_tokens": 8, "buffer_tokens": 4}}
MATCH = {"name": "exact_match"}


def half(response: str) -> float:
    return len(response) / 2


def negated(value: float) -> float:
    return -value


@pytest.mark.parametrize(
    ("entries", "has_accuracy", "said"),
    [
        ([MATCH], True, ""),
        ([MATCH, OVERLONG], True, ""),
        (
            [OVERLONG, MATCH],
            False,
            "no accuracy is shown: the reward 'soft_overlong', which decides it, never gives 1",
        ),
        ([OVERLONG, {**MATCH, "accuracy": True}], True, ""),
        ([{**MATCH, "clip": [0, 0.5]}], False, "no accuracy is shown"),
        (
            [{**MATCH, "shape": "tests.rewards.test_accuracy:negated"}],
            True,
            "gives 1 or more. If it never gives 1",
        ),
        (
            [OWN],
            True,
            "accuracy counts responses to which the reward 'half' gives 1 or more",
        ),
        ([{**OWN, "accuracy": True}], True, ""),
        ([{**OWN, "accuracy": True, "clip": [-1, 0]}], False, "no accuracy is shown"),
    ],
)
def test_what_is_known_of_accuracy_at_the_start(
    entries: list[Any], has_accuracy: bool, said: str
) -> None:
    reward = build_reward(entries)
    assert reward.has_accuracy == has_accuracy
    assert said in reward.accuracy_note and bool(said) == bool(reward.accuracy_note)


def validated(best_metric: str, *found: dict[str, float]) -> list[int]:
    """The best step so far after each of these validations."""
    config: Any = SimpleNamespace(trainer=SimpleNamespace(best_metric=best_metric))
    records: Any = SimpleNamespace(
        log=lambda *given: None, log_samples=lambda *given, **known: None
    )
    validation = Validation(
        config, None, records, SimpleNamespace(print=lambda text: None)
    )  # type: ignore[arg-type]
    best = []
    for step, metrics in enumerate(found):
        again = Validation(config, None, records, validation.console)
        again.load_state_dict(validation.state_dict())  # as after a resume
        again.note(
            step,
            HeldOutResult(
                {f"validation/{name}": value for name, value in metrics.items()}, "[]"
            ),
        )
        validation = again
        best.append(validation.best.step)
    return best


def test_the_reward_decides_what_is_best_while_nothing_was_correct() -> None:
    rewards = [{"reward": reward} for reward in (-2.0, -1.0, -3.0)]
    assert validated("accuracy", *rewards) == [0, 1, 1], "without accuracy"
    assert validated("accuracy", *({"accuracy": 0.0, **each} for each in rewards)) == [
        0,
        1,
        1,
    ]
    found = [(0.0, 0.5), (0.1, 0.1), (0.1, 0.9), (0.0, 5.0), (0.2, 0.0)]
    assert validated("accuracy", *({"accuracy": a, "reward": r} for a, r in found)) == [
        0,
        1,
        1,
        1,
        4,
    ]
    assert validated("reward", *({"accuracy": a, "reward": r} for a, r in found)) == [
        0,
        0,
        2,
        3,
        3,
    ]
