"""Where a step's time and memory went, out of the metrics."""

from __future__ import annotations

import math
from typing import NamedTuple

from megaverl.monitoring.report.run_folder import RunRecord
from megaverl.monitoring.report.series import median, quantile

WHOLE = "time/step_ms"
MEMORY_WORDS = {"process_rss": "process", "process_peak_rss": "process, peak"}


class StageShare(NamedTuple):
    """A stage: median and 95th percentile of its milliseconds, share of the stages' sum, colour."""

    name: str
    median: float
    high: float
    share: float
    colour: int


class Memory(NamedTuple):
    """A curve of memory, MiB."""

    name: str  # of the role, or of the process
    first: float
    peak: float
    peak_step: int
    last: float


def time_parts(run: RunRecord, colours: dict[str, int] | None = None) -> list[StageShare]:
    """The stages of a step, longest first; what no stage covers is `other`.

    Args:
        colours: of stages that other runs have shown; new ones are added, so that a stage looks the same in all.
    """
    colours = {} if colours is None else colours
    found: list[tuple[str, float, float]] = []
    for name, series in run.metrics.items():
        if name.startswith("time/") and name.endswith("_ms") and name != WHOLE:
            label = name.removeprefix("time/").removesuffix("_ms")
            found.append((label, median(series.values), quantile(series.values, 0.95)))
    found = sorted((part for part in found if math.isfinite(part[1])), key=lambda part: -part[1])
    total = sum(part[1] for part in found)
    return [
        StageShare(name, middle, high, middle / total if total else 0.0, colours.setdefault(name, len(colours)))
        for name, middle, high in found
    ]


def memory_parts(run: RunRecord) -> list[Memory]:
    """Every memory metric: at the first step, at most, at the last step."""
    found = []
    for name, series in run.metrics.items():
        finite = [(v, s) for v, s in zip(series.values, series.steps, strict=True) if math.isfinite(v)]
        if name.startswith("memory/") and finite:
            peak, step = max(finite)
            label = name.removeprefix("memory/").removesuffix("_mb")
            label = MEMORY_WORDS.get(label) or label.removesuffix("_gpu_mem").replace("_gpu_reserved", ", reserved")
            found.append(Memory(label, finite[0][0], peak, int(step), finite[-1][0]))
    return sorted(found, key=lambda part: -part.peak)
