"""Long series made short enough to draw, without losing their extremes; and a few words about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megaverl.monitoring.report.run_folder import Series

POINTS = 200


class Bucket(NamedTuple):
    """A stretch of steps: its middle, and mean, least and greatest of its finite values."""

    step: float
    mean: float
    low: float
    high: float


def buckets(series: Series, points: int = POINTS) -> list[Bucket]:
    """At most `points` equal stretches of steps; non-finite values and empty stretches are left out."""
    steps, values = series.steps, series.values
    if not steps:
        return []
    if len(steps) <= points:
        finite = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
        return [Bucket(step, value, value, value) for step, value in finite]
    first, last = steps[0], steps[-1]
    width = (last - first) / points or 1.0
    held: list[list[float]] = [[] for _ in range(points)]
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            held[min(points - 1, max(0, int((step - first) / width)))].append(value)
    return [
        Bucket(first + (number + 0.5) * width, math.fsum(some) / len(some), min(some), max(some))
        for number, some in enumerate(held)
        if some
    ]


def not_finite(series: Series) -> list[int]:
    """The steps whose value is NaN or infinite."""
    return [int(s) for s, v in zip(series.steps, series.values, strict=True) if not math.isfinite(v)]


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the finite values lie; NaN of none."""
    finite = sorted(value for value in values if math.isfinite(value))
    return finite[min(len(finite) - 1, int(share * len(finite)))] if finite else math.nan


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def ends(series: Series, share: float = 0.05) -> tuple[float, float]:
    """Means of the first and of the last `share` of a series (of one value at least)."""
    finite = [value for value in series.values if math.isfinite(value)]
    count = max(1, int(len(finite) * share))
    if not finite:
        return math.nan, math.nan
    return math.fsum(finite[:count]) / count, math.fsum(finite[-count:]) / count


def short(value: float) -> str:
    """A number as it stands on an axis or a tile: three digits that count."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    size = abs(value)
    if size == 0:
        return "0"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            unit = 1e3 if letter == "k" else limit
            return f"{value / unit:.3g}{letter}"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.0f}" if size >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """E.g. 12.3 ms, 4.21 s, 3 min 20 s, 2 h 05 min."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
