"""Charts as inline SVG: line charts, and Gantt charts of the roles. Colours come from the page's style sheet.

Why by hand: a report has a chart for each metric, over a hundred. For two curves of 200
points with their bands, this module writes 15 kB in 1 ms and matplotlib 33 kB in 32 ms.
matplotlib's colours are fixed, while these follow the page between light and dark, and
the page's script reads the points for its cursor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from megaverl.monitoring.report.run_folder import (
    Bucket,
    RunRecord,
    TraceSpan,
    duration,
    median,
    short,
)
from megaverl.monitoring.timeline import NO_ROLE

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 10, 24
NUM_COLOURS = 8


def line_chart(
    title: str,
    curves: Sequence[tuple[str, Sequence[Bucket]]],
    *,
    is_share: bool = False,
) -> str:
    """Return one figure: a line for each curve, with a band from least to greatest where values were joined.

    Args:
        curves: (label, buckets). The colour goes by position, so that a run has the same colour in all figures.
        is_share: the values lie between 0 and 1, and so does the axis.
    """
    shown = [
        (number, label, points)
        for number, (label, points) in enumerate(curves)
        if points
    ]
    if not shown:
        return ""
    all_buckets = [bucket for _, _, points in shown for bucket in points]
    x0 = min(bucket.step for bucket in all_buckets)
    x1 = max(bucket.step for bucket in all_buckets)
    y0 = min(bucket.low for bucket in all_buckets)
    y1 = max(bucket.high for bucket in all_buckets)
    # A share that never changes is shown between 0 and 1, as ticks around a single
    # value would say nothing.
    if y0 == y1 and is_share:
        y0, y1 = 0.0, 1.0
    ticks = nice_ticks(y0, y1)
    y0, y1 = min(y0, ticks[0]), max(y1, ticks[-1])
    # A run with one record has an axis of length 0, which the scale would divide by.
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
        # Buckets of a short run have one value each, so there is no range to draw
        # around the line.
        if any(bucket.low < bucket.high for bucket in points):
            upper = _points(scale, [(bucket.step, bucket.high) for bucket in points])
            lower = _points(
                scale, [(bucket.step, bucket.low) for bucket in reversed(points)]
            )
            parts.append(f'<polygon class="band {colour}" points="{upper} {lower}"/>')
        line = _points(scale, [(bucket.step, bucket.mean) for bucket in points])
        # A line of one point is invisible.
        if len(points) == 1:
            x, y = line.split(",")
            parts.append(f'<circle class="dot {colour}" cx="{x}" cy="{y}" r="3"/>')
        parts.append(
            f'<polyline class="line {colour}" data-label="{escape(label)}" points="{line}"/>'
        )
    parts.append('<line class="cursor" y1="10" y2="166"/></svg></figure>')
    return "".join(parts)


class _Scale:
    """Maps values to positions in the picture."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float) -> None:
        self.x0, self.x1, self.y0, self.y1 = x0, x1, y0, y1

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return (
            HEIGHT
            - BOTTOM
            - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)
        )

    def at(self, x: float, y: float) -> str:
        return f"{self.x(x):.1f},{self.y(y):.1f}"


def _points(scale: _Scale, places: Sequence[tuple[float, float]]) -> str:
    """Return the attribute `points` of a line or a polygon."""
    return " ".join(scale.at(x, y) for x, y in places)


def _axes(scale: _Scale, ticks: Sequence[float]) -> Iterator[str]:
    """Yield the grid lines and the labels of both axes."""
    for value in ticks:
        y = f"{scale.y(value):.1f}"
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text class="tick" x="{LEFT - 5}" y="{y}" dy="3.5" text-anchor="end">{short(value)}</text>'
    for value in nice_ticks(scale.x0, scale.x1, whole=True):
        if scale.x0 <= value <= scale.x1:
            x = scale.x(value)
            anchor = "end" if x > WIDTH - RIGHT - 14 else "middle"
            yield f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{short(value)}</text>'


def nice_ticks(
    low: float, high: float, most: int = 5, *, whole: bool = False
) -> list[float]:
    """Return round numbers from at most `low` to at least `high`, `most` or fewer steps apart.

    None is below 0 where `low` is not.
    """
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        # A count or an accuracy that is always 0 needs no axis for negative values.
        if low:
            low -= pad
        high += pad
    # Readers can add up steps of 1, 2, 2.5 and 5 times a power of ten in their heads.
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        power * factor
        for factor in (1, 2, 2.5, 5, 10)
        if power * factor >= rough * (1 - 1e-9)
    )
    if whole:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


LANES_WIDTH, LANES_LEFT, ROW, BAR = 1000, 130, 30, 20
MOST_LANES = 48
ROLES = ("rollout", "reward", "reference", "critic", "actor", "coordinator", NO_ROLE)


class Lane(NamedTuple):
    """A row of a Gantt chart."""

    role: str
    rank: int

    @property
    def order(self) -> tuple[int, str, int]:
        """Sort key: the roles in their usual order, then by rank."""
        return (
            ROLES.index(self.role) if self.role in ROLES else len(ROLES),
            self.role,
            self.rank,
        )


class Busy(NamedTuple):
    """A role's work over the whole run: mean seconds of its ranks, and fraction of the steps' time."""

    role: str
    seconds: float
    share: float
    num_ranks: int


def busy_shares(run: RunRecord) -> list[Busy]:
    """Return the work by role. Overlapping spans of a rank count once."""
    total = _total_seconds(run)
    by_lane: defaultdict[Lane, list[TraceSpan]] = defaultdict(list)
    for span in run.spans:
        by_lane[Lane(span.role, span.rank)].append(span)
    by_role: defaultdict[str, list[float]] = defaultdict(list)
    for lane, spans in by_lane.items():
        by_role[lane.role].append(covered(spans) / 1e6)
    shares = []
    for role in sorted(by_role, key=lambda role: Lane(role, 0).order):
        seconds = sum(by_role[role]) / len(by_role[role])
        shares.append(
            Busy(role, seconds, seconds / total if total else 0.0, len(by_role[role]))
        )
    return shares


def idle_share(run: RunRecord) -> float:
    """Return the mean fraction of time in which a rank has no span."""
    total = _total_seconds(run)
    by_rank: defaultdict[int, list[TraceSpan]] = defaultdict(list)
    for span in run.spans:
        by_rank[span.rank].append(span)
    if not total or not by_rank:
        return 0.0
    busy = sum(covered(spans) for spans in by_rank.values()) / len(by_rank) / 1e6
    return max(0.0, 1.0 - busy / total)


def covered(spans: Iterable[TraceSpan]) -> float:
    """Return the microseconds that at least one of the spans covers."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin):
        begin = max(span.begin, until)
        if span.end > begin:
            total += span.end - begin
            until = span.end
    return total


def _total_seconds(run: RunRecord) -> float:
    if not run.spans:
        return 0.0
    return (
        max(span.end for span in run.spans) - min(span.begin for span in run.spans)
    ) / 1e6


def windows(run: RunRecord) -> list[tuple[str, float, float]]:
    """Return (title, begin, end) of the time ranges to draw: steps of ordinary length, and the slowest one.

    They are taken from the rank with the longest steps: if roles run on separate ranks,
    others do only part of a step.
    """
    by_rank: defaultdict[int, list[TraceSpan]] = defaultdict(list)
    for span in run.steps:
        by_rank[span.rank].append(span)
    steps = max(
        by_rank.values(),
        key=lambda spans: median([span.duration for span in spans]),
        default=[],
    )
    if not steps:
        if not run.spans:
            return []
        begin = min(span.begin for span in run.spans)
        return [("all spans", begin, max(span.end for span in run.spans))]
    usual = median([span.duration for span in steps])
    middle = len(steps) // 2

    def rating(place: int) -> tuple[bool, int]:
        is_unusual = abs(steps[place].duration - usual) > 0.1 * usual
        return is_unusual, abs(place - middle)

    # First and last steps load, warm up or save, so an ordinary step as near as
    # possible to the middle is shown.
    near = min(range(len(steps)), key=rating)
    last = min(near + 1, len(steps) - 1)
    title = f"step {_number(steps[near])}"
    if last != near:
        title = f"steps {_number(steps[near])} and {_number(steps[last])}"
    shown = [
        (
            f"{title} (usual: {duration(usual / 1e6)} a step)",
            steps[near].begin,
            steps[last].end,
        )
    ]
    slowest = max(steps, key=lambda span: span.duration)
    if len(steps) > 2 and slowest.duration > 1.2 * usual:
        title = (
            f"the slowest, step {_number(slowest)} ({duration(slowest.duration / 1e6)})"
        )
        shown.append((title, slowest.begin, slowest.end))
    return shown


def _number(span: TraceSpan) -> int | str:
    return span.step + 1 if span.step is not None else "?"


def gantt(run: RunRecord, begin: float, end: float) -> str:
    """Draw a row for each role (and rank, if there are several), and a bar for each span between two times."""
    inside = [span for span in run.spans if span.end > begin and span.begin < end]
    all_lanes = {Lane(span.role, span.rank) for span in inside}
    lanes = sorted(all_lanes, key=lambda lane: lane.order)[:MOST_LANES]
    if not lanes:
        return ""
    several = len({lane.rank for lane in lanes}) > 1
    height = len(lanes) * ROW + 24
    scale = (LANES_WIDTH - LANES_LEFT - 10) / (end - begin)
    parts = [
        f'<svg class="gantt" viewBox="0 0 {LANES_WIDTH} {height}" role="img" aria-label="Gantt of roles">'
    ]
    for number, lane in enumerate(lanes):
        y = number * ROW
        label = f"{lane.role} · {lane.rank}" if several else lane.role
        parts.append(
            f'<rect class="lane" x="{LANES_LEFT}" y="{y + 3}" '
            f'width="{LANES_WIDTH - LANES_LEFT - 10}" height="{BAR + 4}"/>'
        )
        parts.append(
            f'<text class="who" x="{LANES_LEFT - 8}" y="{y + 19}" text-anchor="end">{escape(label)}</text>'
        )
    rows = {lane: number for number, lane in enumerate(lanes)}
    for span in inside:
        row = rows.get(Lane(span.role, span.rank))
        if row is not None:
            parts.append(_bar(span, row * ROW + 5, begin, end, scale))
    for tick in range(5):
        x = LANES_LEFT + (LANES_WIDTH - LANES_LEFT - 10) * tick / 4
        anchor = ("start", "middle", "middle", "middle", "end")[tick]
        text = duration((end - begin) * tick / 4 / 1e6)
        parts.append(
            f'<text class="tick" x="{x:.0f}" y="{height - 6}" text-anchor="{anchor}">{text}</text>'
        )
    return "".join([*parts, "</svg>"])


def _bar(span: TraceSpan, y: int, begin: float, end: float, scale: float) -> str:
    left = LANES_LEFT + (max(span.begin, begin) - begin) * scale
    width = max(0.7, (min(span.end, end) - max(span.begin, begin)) * scale)
    colour = ROLES.index(span.role) if span.role in ROLES else len(ROLES)
    label = f"{span.name}: {duration(span.duration / 1e6)}"
    text = ""
    # A name is drawn into its bar only where it fits: about 7 units a letter.
    if width > 7.2 * len(span.name) + 6:
        text = f'<text class="in" x="{left + 5:.1f}" y="{y + 14}">{escape(span.name)}</text>'
    return (
        f'<g><title>{escape(label)}</title><rect class="bar r{colour}" x="{left:.1f}" y="{y}" width="{width:.1f}" '
        f'height="{BAR}" rx="2"/>{text}</g>'
    )
