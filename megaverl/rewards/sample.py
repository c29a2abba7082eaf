"""What a reward sees, and what it gives back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RewardSample:
    """One response with what is known about its prompt.

    Attributes:
        prompt: text, as the model saw it.
        response: text, without special tokens.
        reference: the reference answer of the row, of any JSON type; None if there is none.
        extra: the row's other columns.
        transcript: of an episode of several turns everything after the prompt, the environment's answers too, where
            `response` is the last turn alone; None if not known.
        finish_reason: `stop` (the model ended it) or `length` (it was cut off); None if not known.
        num_tokens: of the response, with its end of sequence; None if not known.
        messages: the conversation that the prompt is, before a chat template; None if not known.
    """

    prompt: str
    response: str
    reference: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    num_tokens: int | None = None
    transcript: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None


@dataclass(frozen=True)
class RewardOutput:
    """Rewards of a list of samples, in its order.

    Attributes:
        total: the weighted sums of the components: what is trained on. NaN: the sample could not be scored, as where a
            judge gave no answer; it is left out.
        components: each component by name, not weighted.
        correct: what accuracy and pass@k count: the component that the configuration names with `accuracy:
            true`, else the first one, is 1 or more.
    """

    total: list[float]
    components: dict[str, list[float]]
    correct: list[bool]

    def metrics(self, prefix: str = "reward") -> dict[str, float]:
        """Mean, spread and extremes of the total, each component's mean, accuracy, of the samples that are scored."""
        scored = [value for value in self.total if not math.isnan(value)]
        if not scored:
            return {}
        mean = _mean(scored)
        right = [float(value) for value, total in zip(self.correct, self.total, strict=True) if not math.isnan(total)]
        values = {
            f"{prefix}/mean": mean,
            f"{prefix}/std": _mean([(value - mean) ** 2 for value in scored]) ** 0.5,
            f"{prefix}/min": min(scored),
            f"{prefix}/max": max(scored),
            f"{prefix}/accuracy": _mean(right),
        }
        values.update({f"{prefix}/{name}_mean": _mean(scores) for name, scores in self.components.items()})
        return values


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
