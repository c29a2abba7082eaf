"""What TRL gives to a reward function besides values of samples: the trainer's state, and functions that log.

    def score(completions, trainer_state, log_metric, log_extra, **kwargs):
        lengths = [len(completion) for completion in completions]
        log_metric("mean_length", sum(lengths) / len(lengths))
        log_extra("length", lengths)
        return [float(trainer_state.global_step < 10)] * len(completions)

Names and shapes are those of TRL's documentation of custom reward functions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megaverl.errors import RewardError
from megaverl.outside import clean, read_number
from megaverl.user_code import show


@dataclass(frozen=True)
class TrainerState:
    """Progress of training when rewards are computed, with the names of transformers' class.

    Attributes:
        global_step: training steps that are finished; 0 in the first one. A step here is one batch of rollouts.
        max_steps: `trainer.steps`.
        epoch: passes over the training data so far, with its fraction; None where the reward's rank does not know it.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float | None = None


@dataclass
class CallContext:
    """What the functions of a reward share with the run: its progress, and what they have logged.

    Attributes:
        metrics: names and values that `log_metric` was given.
        columns: of the last call that was made: column -> its values by the sample's place in the call.
    """

    state: TrainerState = field(default_factory=TrainerState)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    columns: dict[str, dict[int, Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Keep a metric; the run logs the mean of a step's values as `reward/NAME`."""
        self.metrics.append((str(name), read_number(float(value))))

    def log_extra(self, column: str, values: Sequence[Any], rows: Sequence[int]) -> None:
        """Keep a value for each sample; the run writes them into `samples.jsonl`.

        Args:
            rows: places of the samples that the function was called with.

        Raises:
            RewardError: there is not one value for each.
        """
        values = list(values)
        if len(values) != len(rows):
            raise RewardError(f"log_extra({column!r}, ...) got {len(values)} values for {len(rows)} samples.")
        kept = self.columns.setdefault(str(column), {})
        kept.update(zip(rows, map(_json_value, values), strict=True))

    def take_columns(self, count: int) -> list[dict[str, Any]]:
        """Return the logged values of each of `count` samples, by column, and forget them."""
        found = [{name: values[row] for name, values in self.columns.items() if row in values} for row in range(count)]
        self.columns.clear()
        return found


def _json_value(value: Any) -> Any:
    """Return a value that JSON can hold: numbers and text as they are, everything else as text.

    Readers of JSON, this project's among them, refuse integers that no float can hold.
    """
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a scalar of numpy or torch
        value = value.item()
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return show(value, limit=1000)
    if value is None or isinstance(value, bool | int | float):
        return value
    return clean(value) if isinstance(value, str) else show(value, limit=1000)


def conversation_of(response: str) -> list[dict[str, str]]:
    """Return a response as TRL gives the completion of a conversational prompt."""
    return [{"role": "assistant", "content": response}]
