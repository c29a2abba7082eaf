"""Line charts as inline SVG. Colours come from the page's style sheet, so that both themes fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from megaverl.monitoring.report.series import Bucket, short

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 10, 24
NUM_COLOURS = 8


def line_chart(title: str, curves: Sequence[tuple[str, Sequence[Bucket]]]) -> str:
    """One figure: a line for each curve, with a band from least to greatest where values were joined.

    Args:
        curves: (label, buckets); the colour goes by position, so a run has the same one everywhere.
    """
    shown = [(number, label, points) for number, (label, points) in enumerate(curves) if points]
    if not shown:
        return ""
    x0 = min(points[0].step for *_, points in shown)
    x1 = max(points[-1].step for *_, points in shown)
    y0 = min(bucket.low for *_, points in shown for bucket in points)
    y1 = max(bucket.high for *_, points in shown for bucket in points)
    ticks = nice_ticks(y0, y1)
    y0, y1 = min(y0, ticks[0]), max(y1, ticks[-1])
    x1 = x1 if x1 > x0 else x0 + 1
    scale = _Scale(x0, x1, y0, y1)
    parts = [
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'data-x="{x0:.10g} {x1:.10g}" data-y="{y0:.10g} {y1:.10g}" '
        f'data-box="{LEFT} {WIDTH - RIGHT} {TOP} {HEIGHT - BOTTOM}">'
    ]
    parts += _axes(scale, ticks)
    for number, label, points in shown:
        colour = f"c{number % NUM_COLOURS}"
        if any(bucket.low < bucket.high for bucket in points):
            upper = " ".join(scale.at(bucket.step, bucket.high) for bucket in points)
            lower = " ".join(scale.at(bucket.step, bucket.low) for bucket in reversed(points))
            parts.append(f'<polygon class="band {colour}" points="{upper} {lower}"/>')
        line = " ".join(scale.at(bucket.step, bucket.mean) for bucket in points)
        if len(points) == 1:
            x, y = line.split(",")
            parts.append(f'<circle class="dot {colour}" cx="{x}" cy="{y}" r="3"/>')
        parts.append(f'<polyline class="line {colour}" data-label="{escape(label)}" points="{line}"/>')
    parts.append('<line class="cursor" y1="10" y2="166"/></svg></figure>')
    return "".join(parts)


class _Scale:
    """From values to places in the picture."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float) -> None:
        self.x0, self.x1, self.y0, self.y1 = x0, x1, y0, y1

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def at(self, x: float, y: float) -> str:
        return f"{self.x(x):.1f},{self.y(y):.1f}"


def _axes(scale: _Scale, ticks: Sequence[float]) -> Iterator[str]:
    for value in ticks:
        y = f"{scale.y(value):.1f}"
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text class="tick" x="{LEFT - 5}" y="{y}" dy="3.5" text-anchor="end">{short(value)}</text>'
    for value in nice_ticks(scale.x0, scale.x1, whole=True):
        if scale.x0 <= value <= scale.x1:
            x = scale.x(value)
            anchor = "end" if x > WIDTH - RIGHT - 14 else "middle"
            yield f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{short(value)}</text>'


def nice_ticks(low: float, high: float, most: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers from at most `low` to at least `high`, `most` or fewer steps apart."""
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]
