"""Summaries beside the curves of a report: time and memory of a step, observations, settings, samples."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megaverl.config import Config
from megaverl.monitoring.report.run_folder import (
    RunRecord,
    duration,
    ends,
    median,
    not_finite,
    quantile,
    short,
)

WHOLE = "time/step_ms"
NOT_A_STAGE = ("step", "other")  # metrics time/..._ms that are not stages
# Curves at the top of the page: title, and metric names of which the first one that
# some run has is shown.
MAIN_CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward/mean",)),
    ("accuracy on training prompts", ("reward/accuracy",)),
    ("accuracy on held-out prompts", ("validation/accuracy", "validation/reward")),
    ("KL to the reference", ("train/kl",)),
    ("entropy", ("actor/entropy",)),
    ("loss", ("actor/loss", "sft/loss", "loss")),
    ("gradient norm", ("actor/grad_norm", "grad_norm")),
    ("response length, tokens", ("rollout/response_length_mean",)),
    ("engine and trainer: largest log-prob difference", ("rollout/logprob_diff_max",)),
    ("tokens per second", ("train/tokens_per_sec", "tokens_per_sec")),
    ("seconds per step", ("train/step_time_ms",)),
    ("memory, MiB", ("memory/actor_gpu_mem_mb",)),
)
MEMORY_WORDS = {"process_rss": "process", "process_peak_rss": "process, peak"}


class StageShare(NamedTuple):
    """A stage: median and 95th percentile in milliseconds, fraction of the stages' sum, colour."""

    name: str
    median: float
    high: float
    share: float
    colour: int


class Memory(NamedTuple):
    """A curve of memory, in MiB."""

    name: str  # name of the role, or "process"
    first: float
    peak: float
    peak_step: int
    last: float


def time_parts(
    run: RunRecord, colours: dict[str, int] | None = None
) -> list[StageShare]:
    """Return the stages of a step, longest first. `other` is the time outside all stages.

    Args:
        colours: stage -> colour in other runs, extended in place, so that a stage has the same colour in all runs.
    """
    colours = {} if colours is None else colours
    stages: list[tuple[str, float, float]] = []
    for name, series in run.metrics.items():
        if name.startswith("time/") and name.endswith("_ms") and name != WHOLE:
            label = name.removeprefix("time/").removesuffix("_ms")
            stages.append((label, median(series.values), quantile(series.values, 0.95)))
    stages = sorted(
        (part for part in stages if math.isfinite(part[1])), key=lambda part: -part[1]
    )
    total = sum(part[1] for part in stages)
    return [
        StageShare(
            name,
            middle,
            high,
            middle / total if total else 0.0,
            colours.setdefault(name, len(colours)),
        )
        for name, middle, high in stages
    ]


def memory_parts(run: RunRecord) -> list[Memory]:
    """Return every memory metric with its first, largest and last value."""
    curves = []
    for name, series in run.metrics.items():
        if not name.startswith("memory/"):
            continue
        finite = [
            (value, step)
            for value, step in zip(series.values, series.steps, strict=True)
            if math.isfinite(value)
        ]
        if not finite:
            continue
        peak, step = max(finite)
        label = name.removeprefix("memory/").removesuffix("_mb")
        if label in MEMORY_WORDS:
            label = MEMORY_WORDS[label]
        else:
            label = label.removesuffix("_gpu_mem").replace(
                "_gpu_reserved", ", reserved"
            )
        first_value, _ = finite[0]
        last_value, _ = finite[-1]
        curves.append(Memory(label, first_value, peak, int(step), last_value))
    return sorted(curves, key=lambda part: -part.peak)


SLOW = 5.0  # a step is slow if it takes this many times the median


def observations(run: RunRecord) -> Iterator[str]:
    """Yield sentences about anomalies that the user should look at."""
    for name, series in run.metrics.items():
        if steps := not_finite(series):
            more = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
            yield f"{name} is not a finite number at step {steps[0]}{more}."
    planned = run.planned_steps
    if planned is not None and 0 < run.num_steps < planned:
        yield f"The run has {run.num_steps} of {planned} steps: it is still running, or was stopped."
    yield from _slow_steps(run)
    drift = run.metrics.get("rollout/logprob_diff_mean")
    if drift is not None and len(drift.values) >= 20:
        before, after = ends(drift)
        if after > max(10 * before, 1e-3):
            yield (
                f"rollout/logprob_diff_mean rose from {short(before)} to {short(after)}: the log-probs of the engine "
                "drift away from those of the trainer."
            )
    spread = run.metrics.get("reward/std")
    if spread is None or not spread.values:
        return
    is_scored = math.isfinite(spread.values[-1])
    if is_scored and not any(spread.values[-5:]):
        yield "All responses of the last steps have the same reward, so they give no gradient."


def _slow_steps(run: RunRecord) -> Iterator[str]:
    times = run.metrics.get("train/step_time_ms")
    if times is None or len(times.values) < 5:
        return
    usual = median(times.values)
    slow = []
    for taken, step in zip(times.values, times.steps, strict=True):
        if taken > SLOW * usual:
            slow.append((taken, int(step)))
    if slow:
        worst, step = max(slow)
        yield (
            f"{len(slow)} of {len(times.values)} steps took more than {SLOW:.0f} times the median "
            f"({duration(usual / 1e3)}); the slowest is step {step} with {duration(worst / 1e3)}."
        )


class Setting(NamedTuple):
    """A key, its value in every run (empty if a run does not have it), and whether the runs differ."""

    key: str
    values: tuple[str, ...]
    differs: bool


def settings(runs: Sequence[RunRecord]) -> list[Setting]:
    """Return every key that differs from its default in some run, or between runs."""
    default = dict(flat(Config().to_dict()))
    configs = [dict(flat(run.config)) for run in runs]
    settings_found = []
    for key in dict.fromkeys(key for config in configs for key in config):
        values = tuple(
            _text(config[key]) if key in config else "" for config in configs
        )
        differs = len(set(values)) > 1
        if differs or any(
            key in config and config[key] != default.get(key) for config in configs
        ):
            settings_found.append(Setting(key, values, differs))
    return settings_found


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values. Items of a list of mappings are numbered; other lists are values."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}{key}.")
    elif (
        isinstance(value, list)
        and value
        and all(isinstance(item, dict) for item in value)
    ):
        for number, inner in enumerate(value):
            yield from flat(inner, f"{prefix}{number}.")
    else:
        yield prefix.removesuffix("."), value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


STEPS = 12
PER_STEP = 3
LONGEST = 1500


class Sample(NamedTuple):
    """A prompt with its response. `level`, from 0 to 4, ranks its reward among the samples shown."""

    prompt: str
    response: str
    reference: str
    reward: float
    level: int
    finish_reason: str


class StepSamples(NamedTuple):
    """Samples of one step and split."""

    step: int
    split: str
    samples: list[Sample]


def shown_samples(run: RunRecord) -> list[StepSamples]:
    """Choose at most `STEPS` steps of each split, evenly spread, with at most `PER_STEP` samples each."""
    held: defaultdict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for record in run.samples:
        held[str(record.get("split", "train")), int(record["step"])].append(record)
    chosen: list[tuple[str, int]] = []
    for split in sorted({split for split, _ in held}):
        steps = sorted(step for record_split, step in held if record_split == split)
        chosen += [(split, steps[place]) for place in _spread(len(steps), STEPS)]
    records = [record for key in chosen for record in held[key][:PER_STEP]]
    rewards = [
        reward for record in records if not math.isnan(reward := _reward(record))
    ]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    shown = []
    for split, step in chosen:
        samples = [
            _sample(record, low, high) for record in held[split, step][:PER_STEP]
        ]
        shown.append(StepSamples(step, split, samples))
    return shown


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` indices below `count`, including the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(number * (count - 1) / (most - 1)) for number in range(most)})


def _sample(record: dict[str, Any], low: float, high: float) -> Sample:
    reward = _reward(record)
    level = (
        round(4 * (reward - low) / (high - low))
        if high > low and not math.isnan(reward)
        else 2
    )
    reference = record.get("reference")
    return Sample(
        _cut(record.get("prompt", "")),
        _cut(record.get("response", "")),
        "" if reference is None else _cut(reference),
        reward,
        level,
        str(record.get("finish_reason", "")),
    )


def _reward(record: dict[str, Any]) -> float:
    """Return a sample's reward; NaN if it could not be scored."""
    reward = record.get("reward", 0.0)
    return math.nan if reward is None else float(reward)


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    text = "".join(
        letter
        if letter.isprintable() or letter in "\n\t"
        else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )
    return (
        text
        if len(text) <= LONGEST
        else f"{text[:LONGEST]} … ({len(text) - LONGEST} more characters)"
    )
