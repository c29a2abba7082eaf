"""TRL's interface of reward functions: the trainer's state, and functions that log.

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
    """Training progress at the time when rewards are computed, with the names of transformers' class.

    Attributes:
        global_step: finished training steps; 0 during the first one. A step is one batch of rollouts.
        max_steps: `trainer.steps`.
        epoch: passes over the training data so far, with fraction; None if the reward's rank does not know it.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float | None = None


@dataclass
class CallContext:
    """State that the functions of a reward share with the run: its progress, and what they have logged.

    Attributes:
        metrics: (name, value) of every `log_metric` call.
        columns: column -> value by index of the sample, for the last call.
    """

    state: TrainerState = field(default_factory=TrainerState)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    columns: dict[str, dict[int, Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Log a metric. The run logs the mean over a step as `reward/NAME`."""
        self.metrics.append((str(name), read_number(float(value))))

    def log_extra(
        self, column: str, values: Sequence[Any], rows: Sequence[int]
    ) -> None:
        """Log a value for each sample, which the run writes to `samples.jsonl`.

        Args:
            rows: indices of the samples that the function was called with.

        Raises:
            RewardError: the number of values differs from the number of samples.
        """
        values = list(values)
        if len(values) != len(rows):
            raise RewardError(
                f"log_extra({column!r}, ...) got {len(values)} values for {len(rows)} samples."
            )
        kept = self.columns.setdefault(str(column), {})
        # Columns of earlier calls keep the values of their own samples.
        kept.update(zip(rows, map(_json_value, values), strict=True))

    def take_columns(self, count: int) -> list[dict[str, Any]]:
        """Return the logged values of each of `count` samples, by column, and clear them."""
        rows: list[dict[str, Any]] = []
        for row in range(count):
            # Functions that were called with some of the samples have no values for the
            # others.
            rows.append(
                {
                    name: values[row]
                    for name, values in self.columns.items()
                    if row in values
                }
            )
        self.columns.clear()
        return rows


def _json_value(value: Any) -> Any:
    """Return a JSON value: numbers and text unchanged, everything else as text.

    JSON readers, including this project's, refuse integers that no float can hold.
    """
    # A scalar of numpy or torch.
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return show(value, limit=1000)
    if value is None or isinstance(value, bool | int | float):
        return value
    return clean(value) if isinstance(value, str) else show(value, limit=1000)


def conversation_of(response: str) -> list[dict[str, str]]:
    """Return a response in TRL's form for the completion of a conversational prompt."""
    return [{"role": "assistant", "content": response}]
