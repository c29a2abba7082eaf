"""Who was busy when: a Gantt picture of some steps, and each role's share of the whole run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from megaverl.monitoring.report.run_folder import NO_ROLE, RunRecord, TraceSpan
from megaverl.monitoring.report.series import duration, median

WIDTH, LEFT, ROW, BAR = 1000, 130, 30, 20
MOST_LANES = 48
ROLES = ("rollout", "reward", "reference", "critic", "actor", "coordinator", NO_ROLE)


class Lane(NamedTuple):
    """A row of the picture."""

    role: str
    rank: int

    @property
    def order(self) -> tuple[int, str, int]:
        return (ROLES.index(self.role) if self.role in ROLES else len(ROLES), self.role, self.rank)


class Busy(NamedTuple):
    """A role's work over the whole run: seconds on its ranks' mean, share of the time that the steps took."""

    role: str
    seconds: float
    share: float
    num_ranks: int


def busy_shares(run: RunRecord) -> list[Busy]:
    """By role; spans that overlap on a rank count once."""
    total = _total_seconds(run)
    by_lane: defaultdict[Lane, list[TraceSpan]] = defaultdict(list)
    for span in run.spans:
        by_lane[Lane(span.role, span.rank)].append(span)
    by_role: defaultdict[str, list[float]] = defaultdict(list)
    for lane, spans in by_lane.items():
        by_role[lane.role].append(covered(spans) / 1e6)
    found = []
    for role in sorted(by_role, key=lambda role: Lane(role, 0).order):
        seconds = sum(by_role[role]) / len(by_role[role])
        found.append(Busy(role, seconds, seconds / total if total else 0.0, len(by_role[role])))
    return found


def idle_share(run: RunRecord) -> float:
    """The share of the time of which no rank's spans cover anything, on the ranks' mean."""
    total = _total_seconds(run)
    by_rank: defaultdict[int, list[TraceSpan]] = defaultdict(list)
    for span in run.spans:
        by_rank[span.rank].append(span)
    if not total or not by_rank:
        return 0.0
    busy = sum(covered(spans) for spans in by_rank.values()) / len(by_rank) / 1e6
    return max(0.0, 1.0 - busy / total)


def covered(spans: Iterable[TraceSpan]) -> float:
    """Microseconds that at least one of the spans covers."""
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
    return (max(span.end for span in run.spans) - min(span.begin for span in run.spans)) / 1e6


def windows(run: RunRecord) -> list[tuple[str, float, float]]:
    """(title, begin, end) of what is drawn: steps of ordinary length, and the slowest one.

    Of the rank whose steps are the longest: where roles run apart, the others only do a part of one.
    """
    by_rank: defaultdict[int, list[TraceSpan]] = defaultdict(list)
    for span in run.steps:
        by_rank[span.rank].append(span)
    steps = max(by_rank.values(), key=lambda spans: median([span.duration for span in spans]), default=[])
    if not steps:
        if not run.spans:
            return []
        begin = min(span.begin for span in run.spans)
        return [("all spans", begin, max(span.end for span in run.spans))]
    usual = median([span.duration for span in steps])
    middle = len(steps) // 2
    near = sorted(range(len(steps)), key=lambda i: (abs(steps[i].duration - usual) > 0.1 * usual, abs(i - middle)))[0]
    last = min(near + 1, len(steps) - 1)
    title = f"step {_number(steps[near])}"
    if last != near:
        title = f"steps {_number(steps[near])} and {_number(steps[last])}"
    found = [(f"{title} (usual: {duration(usual / 1e6)} a step)", steps[near].begin, steps[last].end)]
    slowest = max(steps, key=lambda span: span.duration)
    if len(steps) > 2 and slowest.duration > 1.2 * usual:
        title = f"the slowest, step {_number(slowest)} ({duration(slowest.duration / 1e6)})"
        found.append((title, slowest.begin, slowest.end))
    return found


def _number(span: TraceSpan) -> int | str:
    return span.step + 1 if span.step is not None else "?"


def gantt(run: RunRecord, begin: float, end: float) -> str:
    """A row for each role (and rank, where there are several), a bar for each span between two times."""
    inside = [span for span in run.spans if span.end > begin and span.begin < end]
    lanes = sorted({Lane(span.role, span.rank) for span in inside}, key=lambda lane: lane.order)[:MOST_LANES]
    if not lanes:
        return ""
    several = len({lane.rank for lane in lanes}) > 1
    height = len(lanes) * ROW + 24
    scale = (WIDTH - LEFT - 10) / (end - begin)
    parts = [f'<svg class="gantt" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Gantt of roles">']
    for number, lane in enumerate(lanes):
        y = number * ROW
        label = f"{lane.role} · {lane.rank}" if several else lane.role
        parts.append(f'<rect class="lane" x="{LEFT}" y="{y + 3}" width="{WIDTH - LEFT - 10}" height="{BAR + 4}"/>')
        parts.append(f'<text class="who" x="{LEFT - 8}" y="{y + 19}" text-anchor="end">{escape(label)}</text>')
    rows = {lane: number for number, lane in enumerate(lanes)}
    for span in inside:
        row = rows.get(Lane(span.role, span.rank))
        if row is not None:
            parts.append(_bar(span, row * ROW + 5, begin, end, scale))
    for tick in range(5):
        x = LEFT + (WIDTH - LEFT - 10) * tick / 4
        anchor = ("start", "middle", "middle", "middle", "end")[tick]
        text = duration((end - begin) * tick / 4 / 1e6)
        parts.append(f'<text class="tick" x="{x:.0f}" y="{height - 6}" text-anchor="{anchor}">{text}</text>')
    return "".join([*parts, "</svg>"])


def _bar(span: TraceSpan, y: int, begin: float, end: float, scale: float) -> str:
    left = LEFT + (max(span.begin, begin) - begin) * scale
    width = max(0.7, (min(span.end, end) - max(span.begin, begin)) * scale)
    colour = ROLES.index(span.role) if span.role in ROLES else len(ROLES)
    what = f"{span.name}: {duration(span.duration / 1e6)}"
    text = ""
    if width > 7.2 * len(span.name) + 6:
        text = f'<text class="in" x="{left + 5:.1f}" y="{y + 14}">{escape(span.name)}</text>'
    return (
        f'<g><title>{escape(what)}</title><rect class="bar r{colour}" x="{left:.1f}" y="{y}" width="{width:.1f}" '
        f'height="{BAR}" rx="2"/>{text}</g>'
    )


def roles_in(runs: Sequence[RunRecord]) -> list[str]:
    """Every role that has a span, in the order of the picture."""
    return sorted({span.role for run in runs for span in run.spans}, key=lambda role: Lane(role, 0).order)
