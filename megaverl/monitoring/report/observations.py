"""What a look at the numbers themselves would find: said beside the run's own warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megaverl.monitoring.report.run_folder import RunRecord
from megaverl.monitoring.report.series import duration, ends, median, not_finite, short

SLOW = 5.0  # times the median step


def observations(run: RunRecord) -> Iterator[str]:
    """Sentences, each about something that somebody should look at."""
    for name, series in run.metrics.items():
        if steps := not_finite(series):
            more = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
            yield f"{name} is not a finite number at step {steps[0]}{more}."
    planned = run.planned_steps
    if planned is not None and 0 < run.num_steps < planned:
        yield f"The run has {run.num_steps} of {planned} steps: it is still running, or it was ended."
    yield from _slow_steps(run)
    drift = run.metrics.get("rollout/logprob_diff_mean")
    if drift is not None and len(drift.values) >= 20:
        before, after = ends(drift)
        if after > max(10 * before, 1e-3):
            yield (
                f"rollout/logprob_diff_mean rose from {short(before)} to {short(after)}: the engine's log-probs drift "
                "away from those that training computes."
            )
    flat = run.metrics.get("reward/std")
    if flat is not None and flat.values and math.isfinite(flat.values[-1]) and not any(flat.values[-5:]):
        yield "All responses of the last steps have the same reward: there is nothing to learn from."


def _slow_steps(run: RunRecord) -> Iterator[str]:
    times = run.metrics.get("train/step_time_ms")
    if times is None or len(times.values) < 5:
        return
    usual = median(times.values)
    slow = [(v, int(s)) for v, s in zip(times.values, times.steps, strict=True) if v > SLOW * usual]
    if slow:
        worst, step = max(slow)
        yield (
            f"{len(slow)} of {len(times.values)} steps took more than {SLOW:.0f} times the median "
            f"({duration(usual / 1e3)}); the slowest is step {step} with {duration(worst / 1e3)}."
        )
