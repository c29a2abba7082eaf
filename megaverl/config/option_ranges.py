"""Which values an option of an algorithm may have: by its name, which means the same wherever it stands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Range(NamedTuple):
    """low, high: its ends, which belong to it unless it is `above` the one or `below` the other."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number lies in it; one that is no number does not."""
        over = value > self.low if self.above else value >= self.low
        under = value < self.high if self.below else value <= self.high
        return over and under and math.isfinite(value)

    def __str__(self) -> str:
        ends = []
        if self.low > -math.inf:
            ends.append(f"{'above' if self.above else 'at least'} {self.low:g}")
        if self.high < math.inf:
            ends.append(f"{'below' if self.below else 'at most'} {self.high:g}")
        return " and ".join(ends) or "a finite number"


ABOVE_ZERO, NOT_NEGATIVE, SHARE = Range(0.0, above=True), Range(0.0), Range(0.0, 1.0)
RANGES: dict[str, Range] = {
    "beta": ABOVE_ZERO,
    "gamma": NOT_NEGATIVE,
    "lam": NOT_NEGATIVE,
    "label_smoothing": Range(0.0, 0.5, below=True),
    "desirable_weight": NOT_NEGATIVE,
    "undesirable_weight": NOT_NEGATIVE,
    "center_coef": NOT_NEGATIVE,
    "clip_low": SHARE,
    "clip_high": ABOVE_ZERO,
    "clip_range": ABOVE_ZERO,
    "clip_dual": Range(1.0, above=True),
    "tau_positive": ABOVE_ZERO,
    "tau_negative": ABOVE_ZERO,
    "threshold": ABOVE_ZERO,
    "penalty": NOT_NEGATIVE,
    "fraction": Range(0.0, 1.0, above=True),
    "covariance_low": Range(),
    "covariance_high": Range(),
    "eps": ABOVE_ZERO,
    "limit": ABOVE_ZERO,
    "right_from": Range(),
    "k": Range(1.0),
    "keep": Range(1.0),
}
# The first must be below the second.
ORDERED = (("covariance_low", "covariance_high"), ("low", "high"))


def out_of_range(name: str, value: Any) -> str | None:
    """What is expected of an option's value, where it is a number that does not do; nothing where it does."""
    known = RANGES.get(name)
    if known is None or isinstance(value, bool) or not isinstance(value, int | float) or known.holds(value):
        return None
    return str(known)


def out_of_order(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Two options, both given, of which the first must be below the second and is not."""
    for low, high in ORDERED:
        both = options.get(low), options.get(high)
        if all(isinstance(value, int | float) for value in both) and not both[0] < both[1]:  # type: ignore[operator]
            return low, high
    return None
