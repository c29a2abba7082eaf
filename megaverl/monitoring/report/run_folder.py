"""Read the files of a run for a report: metrics, spans, samples, configuration, versions and warnings.

Long series are reduced to as many points as a chart can show.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megaverl.config.typed_yaml import read_untyped
from megaverl.errors import DataError
from megaverl.monitoring.timeline import NO_ROLE
from megaverl.outside import MAX_TRACE_BYTES, read_json, read_json_file

# Commands that write a resolved configuration COMMAND.yaml. The first existing file
# tells what the run was.
COMMANDS = ("train", "quickstart", "sft", "dpo", "reward", "eval", "generate")
# command -> section with its steps.
STEPS_OF = {"sft": "sft", "dpo": "preference", "reward": "preference"}
MOST_WARNINGS = 40
SUITES_FOLDER = "suites"
WARNING = re.compile(r"^(?:\[rank \d+\] )?(warning|error): (.+)$")


@dataclass
class Series:
    """One metric over the run: steps and values, in order of step."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True)
class TraceSpan:
    """Some work of one rank, in microseconds on the trace's clock."""

    rank: int
    name: str
    role: str
    begin: float
    duration: float
    step: int | None

    @property
    def end(self) -> float:
        """End of the span in microseconds."""
        return self.begin + self.duration


@dataclass
class RunRecord:
    """Everything known about a run.

    Attributes:
        name: name of its folder.
        command: train, sft, ...; empty without a configuration.
        metrics: series by name.
        first, last: times of the first and last record, seconds since 1970; 0 without records.
        spans: spans of the roles, without the steps themselves.
        steps: spans of whole steps.
        samples: records of samples.jsonl.
        warnings: lines of the logs.
    """

    folder: Path
    name: str
    command: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Series] = field(default_factory=dict)
    first: float = 0.0
    last: float = 0.0
    spans: list[TraceSpan] = field(default_factory=list)
    steps: list[TraceSpan] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """The last step that has a record."""
        return int(
            max(
                (series.steps[-1] for series in self.metrics.values() if series.steps),
                default=0,
            )
        )

    @property
    def planned_steps(self) -> int | None:
        """Number of steps in the configuration, or None."""
        steps = self.config.get(STEPS_OF.get(self.command, "trainer"), {}).get("steps")
        return steps if isinstance(steps, int) else None


# Span name -> role that does the work, for traces without roles.
ROLE_OF = {
    "rollout": "rollout",
    "reshard": "rollout",
    "greedy_rewards": "rollout",
    "validation": "rollout",
    "reward": "reward",
    "old_log_probs": "actor",
    "score_norms": "actor",
    "actor_update": "actor",
    "draft_update": "actor",
    "ref_log_probs": "reference",
    "values": "critic",
    "critic_update": "critic",
}
# Spans of waiting for other ranks or their weights, which are no work.
WAITING = ("wait", "pause")


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder. Missing files leave their fields empty.

    Raises:
        DataError: the folder does not exist or has neither metrics nor results of suites, or a file is damaged; names
            file and line.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder}: no such folder. Give the folder of a run, such as runs/quickstart."
        )
    if not (folder / "metrics.jsonl").is_file() and not suite_folders(folder):
        raise DataError(
            f"{folder}: no metrics.jsonl in it, so this is no run's folder (or it has no step yet)."
        )
    run = with_settings(folder)
    if (folder / "versions.json").is_file():
        run.versions = _mapping(folder / "versions.json", read_json)
    if (folder / "metrics.jsonl").is_file():
        _read_metrics(run, folder / "metrics.jsonl")
    run.samples = [record for _, record in _lines(folder / "samples.jsonl")]
    for path in sorted(folder.glob("timeline*.json")):
        _read_trace(run, path)
    run.warnings = _warnings(folder / "logs")
    return run


def suite_folders(folder: Path) -> list[Path]:
    """Return the folders with results of evaluation suites in a run's folder (see `evaluations`).

    `megaverl eval --run` writes into the run's subfolder `eval`.
    """
    places = (folder / "eval" / SUITES_FOLDER, folder / SUITES_FOLDER)
    return [place for place in places if place.is_dir()]


def with_settings(folder: Path) -> RunRecord:
    """Return a run's record with its name and configuration only."""
    run = RunRecord(folder, folder.resolve().name)
    for command in COMMANDS:
        if (folder / f"{command}.yaml").is_file():
            run.command = command
            run.config = _mapping(folder / f"{command}.yaml", read_untyped)
            break
    return run


def _mapping(path: Path, load: Callable[[str], Any]) -> dict[str, Any]:
    try:
        content = load(path.read_text(encoding="utf-8")) or {}
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: cannot be read ({str(error).splitlines()[0]}). Remove the file."
        ) from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path}: holds a {type(content).__name__}; expected a mapping. Remove the file."
        )
    return content


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, record) of a JSONL file. An unfinished last line of a running job is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = read_json(line, not_finite=True)
            except ValueError as error:
                if line.endswith("\n"):
                    raise DataError(
                        f"{path}, line {number}: not valid JSON ({error}). Remove this line."
                    ) from error
                continue
            if not isinstance(record, dict):
                raise DataError(
                    f"{path}, line {number}: not a record ({line.strip()[:80]}). Remove this line."
                )
            yield number, record


def _read_metrics(run: RunRecord, path: Path) -> None:
    metrics: defaultdict[str, Series] = defaultdict(Series)
    for line, record in _lines(path):
        try:
            step, seconds = float(record.pop("step")), float(record.pop("time", 0.0))
            numbers = {name: float(value) for name, value in record.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}, line {line}: not a record of metrics ({error!r}). Remove this line."
            ) from error
        run.first = run.first or seconds
        run.last = max(run.last, seconds)
        for name, value in numbers.items():
            series = metrics[name]
            series.steps.append(step)
            series.values.append(value)
    run.metrics = dict(metrics)


def _read_trace(run: RunRecord, path: Path) -> None:
    """Read the spans of a file in Chrome's trace-event format."""
    try:
        for event in read_json_file(path, MAX_TRACE_BYTES)["traceEvents"]:
            if event.get("ph") != "X" or event.get("name") in WAITING:
                continue
            arguments = event.get("args", {})
            name = str(event["name"])
            role = str(arguments.get("role") or ROLE_OF.get(name, NO_ROLE))
            begin = float(event["ts"])
            span = TraceSpan(
                int(event["pid"]),
                name,
                role,
                begin,
                float(event["dur"]),
                arguments.get("step"),
            )
            # A step contains all other spans, so it would cover them in the chart.
            if name == "step":
                run.steps.append(span)
            else:
                run.spans.append(span)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not a Chrome trace ({error!r}). Remove the file."
        ) from error
    run.spans.sort(key=lambda span: (span.begin, -span.duration))
    run.steps.sort(key=lambda span: (span.rank, span.begin))


def _warnings(folder: Path) -> list[str]:
    """List the warnings and errors that megaverl wrote to the run's logs, each once."""
    warnings: dict[str, None] = {}
    for path in sorted(folder.glob("rank_*.log")):
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if match := WARNING.match(line.rstrip("\n")):
                    warnings.setdefault(f"{match[1]}: {match[2]}")
    lines = list(warnings)
    num_left_out = len(lines) - MOST_WARNINGS
    if num_left_out <= 0:
        return lines
    return [*lines[:MOST_WARNINGS], f"... and {num_left_out} more, in {folder}"]


POINTS = 200


class Bucket(NamedTuple):
    """A range of steps: its middle, and the mean, minimum and maximum of its finite values."""

    step: float
    mean: float
    low: float
    high: float


def buckets(series: Series, points: int = POINTS) -> list[Bucket]:
    """Reduce a series to at most `points` equal ranges of steps. Non-finite values and empty ranges are left out."""
    steps, values = series.steps, series.values
    if not steps:
        return []
    finite = [
        (step, value)
        for step, value in zip(steps, values, strict=True)
        if math.isfinite(value)
    ]
    if len(steps) <= points:
        return [Bucket(step, value, value, value) for step, value in finite]
    first = steps[0]
    width = (steps[-1] - first) / points or 1.0
    values_of_range: list[list[float]] = [[] for _ in range(points)]
    for step, value in finite:
        number = int((step - first) / width)
        # The last step lies at the end of the last range, and rounding may put a step
        # outside.
        values_of_range[min(points - 1, max(0, number))].append(value)
    reduced = []
    for number, range_values in enumerate(values_of_range):
        if range_values:
            middle = first + (number + 0.5) * width
            mean = math.fsum(range_values) / len(range_values)
            reduced.append(Bucket(middle, mean, min(range_values), max(range_values)))
    return reduced


def not_finite(series: Series) -> list[int]:
    """List the steps whose value is NaN or infinite."""
    return [
        int(step)
        for step, value in zip(series.steps, series.values, strict=True)
        if not math.isfinite(value)
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a fraction `share` of the finite values lies; NaN if there are none."""
    finite = sorted(value for value in values if math.isfinite(value))
    return (
        finite[min(len(finite) - 1, int(share * len(finite)))] if finite else math.nan
    )


def median(values: Sequence[float]) -> float:
    """Return the median of the finite values."""
    return quantile(values, 0.5)


def ends(series: Series, share: float = 0.05) -> tuple[float, float]:
    """Return the means of the first and of the last `share` of a series (at least one value each)."""
    finite = [value for value in series.values if math.isfinite(value)]
    count = max(1, int(len(finite) * share))
    if not finite:
        return math.nan, math.nan
    return math.fsum(finite[:count]) / count, math.fsum(finite[-count:]) / count


def short(value: float) -> str:
    """Format a number for an axis or a tile, with three significant digits."""
    if not math.isfinite(value):
        if math.isnan(value):
            return "–"
        return "∞" if value > 0 else "−∞"
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
    """Format seconds, e.g. 12.3 ms, 4.21 s, 3 min 20 s, 2 h 05 min."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
