"""Results of evaluation suites in a run's folder: written per prompt, read back, summarised and compared.

Each suite has one file `suites/NAME.jsonl` with a line per prompt. All figures are
computed from these lines, so that the table of `megaverl eval`, a comparison and a
report agree. A task of another harness has such a file too, with the scores of the
harness in its first line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

from megaverl.algorithms.evaluation import (
    CONFIDENCE,
    Estimate,
    PairedDifference,
    PromptScores,
    mean_with_interval,
    paired_difference,
)
from megaverl.errors import DataError
from megaverl.monitoring.report.run_folder import SUITES_FOLDER, suite_folders
from megaverl.outside import read_json


@dataclass(frozen=True)
class PromptResult:
    """All samples of one prompt of a suite.

    Attributes:
        prompt_id: digest by which evaluations are paired.
        correct: whether each sample is right. None for a sample that could not be scored.
        answers: each sample's answer in a normal form. Empty if the suite has no answers to count.
        lengths: tokens of each response.
        finish_reasons: why each response ended.
    """

    prompt_id: str
    prompt: str
    reference: Any
    correct: list[bool | None]
    answers: list[str | None]
    responses: list[str]
    lengths: list[int]
    finish_reasons: list[str | None]

    @property
    def is_scored(self) -> bool:
        """True if all samples could be scored."""
        return None not in self.correct

    @property
    def scores(self) -> PromptScores:
        """Scores of a prompt whose samples could all be scored."""
        return PromptScores(
            tuple(bool(value) for value in self.correct), tuple(self.answers)
        )


@dataclass(frozen=True)
class SuiteResult:
    """Results of one suite.

    Attributes:
        pass_at: values of k for which pass@k is reported.
    """

    suite: str
    prompts: list[PromptResult]
    pass_at: list[int] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        """Number of samples of a prompt."""
        return min(len(prompt.correct) for prompt in self.prompts)

    @property
    def num_unscored(self) -> int:
        """Number of prompts that are left out because a sample could not be scored."""
        return sum(not prompt.is_scored for prompt in self.prompts)

    @property
    def metrics(self) -> list[str]:
        """Names of the reported metrics: avg@n, then maj@n, pass@k and pass@n for several samples."""
        count = self.num_samples
        names = [f"avg@{count}"]
        if count > 1 and all(prompt.answers for prompt in self.prompts):
            names.append(f"maj@{count}")
        further = {k for k in self.pass_at if k <= count}
        names += [
            f"pass@{k}" for k in sorted(further | ({count} if count > 1 else set()))
        ]
        return names

    def values(self, metric: str) -> dict[str, float]:
        """Return a metric of every scored prompt, by the prompt's digest."""
        kind, _, number = metric.partition("@")
        k = int(number)
        values = {}
        for prompt in self.prompts:
            if prompt.is_scored:
                scores = prompt.scores
                metrics = {
                    "avg": lambda s: s.average,
                    "maj": lambda s: s.majority(k),
                    "pass": lambda s: s.passed(k),
                }
                values[prompt.prompt_id] = metrics[kind](scores)
        return values

    def estimate(self, metric: str, confidence: float = CONFIDENCE) -> Estimate:
        """Return a metric's mean over prompts with its interval. NaN if no prompt could be scored."""
        values = list(self.values(metric).values())
        if not values:
            return Estimate(math.nan, math.nan, math.nan, math.nan, 0)
        return mean_with_interval(values, confidence)

    @property
    def length(self) -> float:
        """Mean number of tokens of a response."""
        lengths = [length for prompt in self.prompts for length in prompt.lengths]
        return sum(lengths) / len(lengths)

    @property
    def finished(self) -> float:
        """Share of the responses that the model ended itself."""
        reasons = [
            reason for prompt in self.prompts for reason in prompt.finish_reasons
        ]
        return sum(reason == "stop" for reason in reasons) / len(reasons)


@dataclass(frozen=True)
class HarnessScore:
    """One metric that a harness has computed.

    Attributes:
        stderr: standard error that the harness gives for the value, or None.
    """

    metric: str
    value: float
    stderr: float | None = None


@dataclass(frozen=True)
class HarnessResult:
    """Results of one task of another harness.

    Attributes:
        suite: HARNESS:NAME of the task.
        harness: package and version.
        version: version of the task, as the harness has it.
        samples: records with `id` and `values`, the sample's value by metric, and texts.
    """

    suite: str
    harness: str
    version: str
    num_samples: int
    scores: list[HarnessScore]
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics."""
        return [score.metric for score in self.scores]

    def values(self, metric: str) -> dict[str, float]:
        """Return a metric of every sample, by the sample's id.

        Empty if the metric is not the mean of its samples' values: F1 or a word
        perplexity cannot be compared sample by sample.
        """
        values = {
            sample["id"]: sample["values"][metric]
            for sample in self.samples
            if metric in sample["values"]
        }
        if not values:
            return {}
        mean = math.fsum(values.values()) / len(values)
        return values if math.isclose(mean, self._score(metric).value) else {}

    def estimate(self, metric: str, confidence: float = CONFIDENCE) -> Estimate:
        """Return a metric as the harness has computed it, with an interval.

        The mean of values between 0 and 1 has the interval of a suite's metric. Others
        have the one of a normal distribution with the harness's standard error, or NaN
        bounds if there is none.
        """
        score = self._score(metric)
        values = list(self.values(metric).values())
        if values and all(0.0 <= value <= 1.0 for value in values):
            return mean_with_interval(values, confidence)
        if score.stderr is None:
            return Estimate(score.value, math.nan, math.nan, math.nan, self.num_samples)
        half = NormalDist().inv_cdf(0.5 + confidence / 2) * score.stderr
        return Estimate(
            score.value,
            low=score.value - half,
            high=score.value + half,
            error=score.stderr,
            num_prompts=self.num_samples,
        )

    def _score(self, metric: str) -> HarnessScore:
        return next(score for score in self.scores if score.metric == metric)


TableResult = SuiteResult | HarnessResult


def write_suite(folder: Path, result: TableResult) -> None:
    """Write the results of a suite into a run's folder."""
    name = re.sub(r"[^\w.-]+", "_", result.suite)
    file = folder / SUITES_FOLDER / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(result, HarnessResult):
        fields = asdict(result)
        samples = fields.pop("samples")
        lines = [fields, *samples]
    else:
        head = {"suite": result.suite, "pass_at": result.pass_at}
        lines = [head, *(asdict(prompt) for prompt in result.prompts)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def _read_result(head: dict[str, Any], records: list[Any]) -> TableResult:
    """Return the result that the lines of a file contain."""
    if "harness" in head:
        scores = [HarnessScore(**score) for score in head["scores"]]
        return HarnessResult(**{**head, "scores": scores, "samples": records})
    prompts = [PromptResult(**record) for record in records]
    return SuiteResult(str(head["suite"]), prompts, list(head["pass_at"]))


def read_suites(folder: Path) -> dict[str, TableResult]:
    """Return the results of all suites in a run's folder, or in its subfolder `eval`; empty if there are none.

    Raises:
        DataError: a file is damaged.
    """
    results = {}
    for place in suite_folders(folder):
        for file in sorted(place.glob("*.jsonl")):
            try:
                # Not splitlines: responses may contain other line separators, such as
                # U+2028.
                lines = file.read_text(encoding="utf-8").rstrip("\n").split("\n")
                # A harness may report NaN for a metric that is not defined.
                head, *records = [read_json(line, not_finite=True) for line in lines]
                result = _read_result(head, records)
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise DataError(
                    f"{file}: not the results of a suite ({error!r}). Evaluate again."
                ) from error
            results[result.suite] = result
    return results


@dataclass(frozen=True)
class TableRow:
    """One line of the table: a metric of a suite, and its difference from an earlier evaluation.

    Attributes:
        before: mean of the earlier evaluation over the prompts that both have. None: there is none.
    """

    suite: str
    metric: str
    estimate: Estimate
    before: float | None = None
    difference: PairedDifference | None = None


def table_rows(
    results: Sequence[TableResult],
    earlier: Mapping[str, TableResult] | None = None,
    confidence: float = CONFIDENCE,
) -> Iterator[TableRow]:
    """Yield the rows of a table. Metrics that the earlier evaluation also has are compared, paired over prompts."""
    for result in results:
        before = (earlier or {}).get(result.suite)
        for metric in result.metrics:
            estimate = result.estimate(metric, confidence)
            if before is None or metric not in before.metrics:
                yield TableRow(result.suite, metric, estimate)
                continue
            old, new = before.values(metric), result.values(metric)
            common = [old[prompt] for prompt in new if prompt in old]
            if not common:
                yield TableRow(result.suite, metric, estimate)
                continue
            difference = paired_difference(old, new, confidence)
            yield TableRow(
                result.suite,
                metric,
                estimate,
                math.fsum(common) / len(common),
                difference,
            )


def cells_of(
    rows: Sequence[TableRow], confidence: float = CONFIDENCE
) -> list[list[str]]:
    """Return the cells of a table: a heading, then a line for each row."""
    interval = f"{confidence:.0%} interval"
    is_compared = any(row.difference is not None for row in rows)
    heads = ["suite", "metric", "value", interval, "prompts"]
    if is_compared:
        heads += ["before", "difference", interval, "p"]
    lines = [heads]
    for row in rows:
        estimate = row.estimate
        cells = [
            row.suite,
            row.metric,
            f"{estimate.value:.4f}",
            _range(estimate.low, estimate.high),
        ]
        cells.append(str(estimate.num_prompts))
        difference = row.difference
        if difference is not None:
            cells += [f"{row.before:.4f}", f"{difference.value:+.4f}"]
            cells += [
                _range(difference.low, difference.high, "+"),
                f"{difference.p_value:.3f}",
            ]
        lines.append(cells + [""] * (len(heads) - len(cells)))
    return lines


def table_text(rows: Sequence[TableRow], confidence: float = CONFIDENCE) -> str:
    """Return the table as text."""
    lines = cells_of(rows, confidence)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _range(low: float, high: float, sign: str = "") -> str:
    if math.isnan(low) or math.isnan(high):
        return "unknown"
    return f"[{low:{sign}.4f}, {high:{sign}.4f}]"
