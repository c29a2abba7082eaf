"""What a role reports of its gradient, and the decision that comes back: a few numbers each, always as many."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any, get_type_hints

from megaverl.errors import TrainingStopped

# Statistics of the loss that a report carries, each as count, sum, sum of squares, so that they add up over roles.
STATISTICS = ("loss", "kl", "entropy", "ratio", "clipped", "value_error", "advantage", "reward")
_KNOWN = frozenset(STATISTICS)
_MAGIC = 5010.0
DECISION_SIZE = 11
REPORT_SIZE = 11 + 3 * len(STATISTICS)

Moments = tuple[float, float, float]
NONE: Moments = (0.0, 0.0, 0.0)


class Flag(IntFlag):
    """What happened to a gradient, or to its rank."""

    OVERFLOW = 1  # loss scaling found a value out of float16's range, as it now and then should
    BAD_LOSS = 2  # NaN or inf in the loss or one of its statistics
    BAD_GRADIENT = 4
    DONE = 16  # the last report of this role


@dataclass(frozen=True)
class GradientReport:
    """One role's (or island's) gradient of one update, whole: added over all of its ranks.

    Attributes:
        step: number of the update, from 0.
        version: of the weights that it was taken at.
        tokens: that the loss was taken over.
        divided_by: what the loss was divided by so far; 1 for a sum over tokens, `tokens` for a mean over its own.
        squared_norm: of the gradient as it stands.
        oldest, newest: versions of the engines' weights: that generated its oldest sample; that they have now.
        flags: see `Flag`.
        partners: bits of the participants that decide together with this one.
        max_norm: to which the role wants its gradient clipped; 0: not clipped.
        statistics: name -> count, sum, sum of squares.
    """

    step: int
    version: int
    tokens: float
    squared_norm: float
    divided_by: float = 1.0
    oldest: int = 0
    newest: int = 0
    flags: Flag = Flag(0)
    partners: int = 0
    max_norm: float = 0.0
    statistics: Mapping[str, Moments] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """No NaN and no inf anywhere, flagged or not."""
        numbers = [self.tokens, self.squared_norm, self.divided_by, *(x for m in self.statistics.values() for x in m)]
        return not self.flags & (Flag.BAD_LOSS | Flag.BAD_GRADIENT) and all(map(math.isfinite, numbers))

    def numbers(self) -> list[float]:
        """As REPORT_SIZE numbers."""
        if not self.statistics.keys() <= _KNOWN:
            raise ValueError(f"statistics {sorted(self.statistics.keys() - _KNOWN)} are none of {STATISTICS}")
        moments = [self.statistics.get(name, NONE) for name in STATISTICS]
        return [*_pack(self), *(number for each in moments for number in each)]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> GradientReport:
        """Undo `numbers`.

        Raises:
            TrainingStopped: these are others.
        """
        found = _unpack(cls, numbers, REPORT_SIZE, "a gradient report")
        rest = numbers[-3 * len(STATISTICS) :]
        moments = {name: (rest[3 * i], rest[3 * i + 1], rest[3 * i + 2]) for i, name in enumerate(STATISTICS)}
        return cls(**found, statistics={name: three for name, three in moments.items() if three != NONE})


class Verdict(IntEnum):
    """What is done with all of the gradients that were decided on together."""

    APPLY = 0
    SKIP = 1
    STOP = 2


class Reason(IntEnum):
    """Why; `text` is what people read."""

    text: str

    FINE = 0, "nothing is wrong"
    OVERFLOW = 1, "loss scaling found a gradient out of float16's range"
    NOT_FINITE = 2, "its loss or gradient is not finite"
    NO_TOKENS = 3, "there are no tokens to train on"
    SPIKE = 4, "its gradient norm is above the limit for a step"
    STALE = 5, "its oldest sample is of weights older than max_staleness allows"
    OUT_OF_STEP = 6, "it is at another update than the run"
    OTHER_VERSION = 7, "its gradient was taken at another version of the weights than the run's"
    ISLANDS_DIFFER = 8, "its islands have gradients of different norms"
    TOO_MANY_SKIPS = 9, "too many updates in a row were skipped"
    LOST = 10, "no report came from it"

    def __new__(cls, value: int, text: str = "") -> Reason:
        reason = int.__new__(cls, value)
        reason._value_, reason.text = value, text
        return reason


@dataclass(frozen=True)
class Decision:
    """What one role (or island) hears.

    Attributes:
        step: of the update that it is about.
        participant: number of the role or island at fault; -1: none.
        version: of the weights after it.
        scale: what the gradient is multiplied by, so that its loss is the mean over all tokens of all islands.
        clip: what it is then multiplied by, so that its norm is at most the limit; 1 where it is.
        norm: of the role's gradient after scaling, before clipping.
        schedule_step: updates that were applied before this one: where the role's learning rate stands.
        waited: seconds for which the report lay with the coordinator until its partners' had come.
    """

    step: int
    verdict: Verdict
    reason: Reason = Reason.FINE
    participant: int = -1
    version: int = 0
    scale: float = 1.0
    clip: float = 1.0
    norm: float = 0.0
    schedule_step: int = 0
    waited: float = 0.0

    @property
    def applies(self) -> bool:
        return self.verdict is Verdict.APPLY

    def numbers(self) -> list[float]:
        """As DECISION_SIZE numbers."""
        return _pack(self)

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Decision:
        """Undo `numbers`.

        Raises:
            TrainingStopped: these are others.
        """
        return cls(**_unpack(cls, numbers, DECISION_SIZE, "a decision"))


# The fields that are one number each, and what they are.
_KINDS = {
    message.__name__: {name: kind for name, kind in get_type_hints(message).items() if name != "statistics"}
    for message in (GradientReport, Decision)
}


def _pack(message: GradientReport | Decision) -> list[float]:
    return [_MAGIC, *(float(getattr(message, name)) for name in _KINDS[type(message).__name__])]


def _unpack(message: type, numbers: Sequence[float], size: int, what: str) -> dict[str, Any]:
    if len(numbers) != size or numbers[0] != _MAGIC:
        raise TrainingStopped(f"a message of {len(numbers)} numbers came where {what} was expected")
    kinds = zip(_KINDS[message.__name__].items(), numbers[1:], strict=False)
    return {name: number if kind is float else kind(int(number)) for (name, kind), number in kinds}
