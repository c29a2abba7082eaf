"""Record and show a run: metrics, traces, alerts, console, reports, and the doctor. Imports neither torch nor vLLM."""

from megaverl.monitoring.backends import BACKENDS, check_backends, read_metrics
from megaverl.monitoring.console import STEP_COLUMNS, Column, Console, redirect_output
from megaverl.monitoring.curves import plot_curves, sparkline, text_curve
from megaverl.monitoring.timeline import Timeline, memory_metrics, merge_traces
from megaverl.monitoring.tracker import (
    MetricsTracker,
    Tracker,
    collect_versions,
    write_versions,
)

__all__ = [
    "BACKENDS",
    "STEP_COLUMNS",
    "Column",
    "Console",
    "MetricsTracker",
    "Timeline",
    "Tracker",
    "check_backends",
    "collect_versions",
    "memory_metrics",
    "merge_traces",
    "plot_curves",
    "read_metrics",
    "redirect_output",
    "sparkline",
    "text_curve",
    "write_versions",
]
