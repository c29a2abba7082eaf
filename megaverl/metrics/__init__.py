"""Numbers of a run and what a person sees of them. Imports neither torch nor vLLM."""

from megaverl.metrics.backends import BACKENDS, check_backends, read_metrics
from megaverl.metrics.console import STEP_COLUMNS, Column, Console, redirect_output
from megaverl.metrics.curves import plot_curves, sparkline, text_curve
from megaverl.metrics.memory import memory_metrics
from megaverl.metrics.timeline import Timeline, merge_traces
from megaverl.metrics.tracker import MetricsTracker, Tracker
from megaverl.metrics.versions import collect_versions, write_versions

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
