"""Decisions over updates: a model reports on its gradient and is told whether to apply it. Pure.

    gradient -> GradientReport -> decide() -> Decision: apply, skip or stop

Each rank of a model decides by itself, because all of them have the same report. Only
where the gradients of several groups of ranks belong together, their first ranks report
to the run's program, which decides for all (`trainer.update_decisions`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal

from megaverl.config import Config

# Relative tolerance for the norms of islands, which sum the same gradients and differ
# only by rounding.
SAME_NORM = 1e-3


@dataclass(frozen=True)
class UpdateCounts:
    """Counts of a model's updates; stored in checkpoints.

    Attributes:
        steps: number of updates that were decided on.
        version: number of applied updates, which is the version of the weights.
        skips: number of updates skipped in a row.
    """

    steps: int = 0
    version: int = 0
    skips: int = 0

    def after(self, decision: Decision) -> UpdateCounts:
        """Return the counts after an update that was applied or skipped."""
        return UpdateCounts(
            self.steps + 1,
            self.version + decision.applies,
            0 if decision.applies else self.skips + 1,
        )


@dataclass(frozen=True)
class GradientReport:
    """Report on the gradient of a model in one update, summed over all of its ranks.

    Attributes:
        role: role of the model.
        island: index of the island, if several islands train copies of the model.
        counts: counts of the model's updates before this one.
        tokens: number of tokens in the loss.
        norm: norm of the gradient before clipping; NaN if the loss or one of its metrics is not finite.
        has_overflow: loss scaling found a value out of float16's range, which is expected now and then.
        staleness: how many versions the weights that generated the oldest sample are behind those of the engines.
    """

    role: str
    island: int
    counts: UpdateCounts
    tokens: float
    norm: float
    has_overflow: bool = False
    staleness: int = 0

    @property
    def name(self) -> str:
        """Name of the model in messages, such as "actor", or "actor.1" on the second island."""
        return f"{self.role}.{self.island}" if self.island else self.role


class Verdict(IntEnum):
    """Action on all gradients that were decided on together."""

    APPLY = 0
    SKIP = 1
    STOP = 2


class Reason(IntEnum):
    """Reason of a verdict. `text` describes it for users."""

    text: str

    FINE = 0, "nothing is wrong"
    OVERFLOW = 1, "loss scaling found a gradient out of float16's range"
    NOT_FINITE = 2, "its loss or gradient is not finite"
    NO_TOKENS = 3, "there are no tokens to train on"
    SPIKE = 4, "its gradient norm is above the limit for a step"
    STALE = 5, "its oldest sample is of weights older than max_staleness allows"
    OUT_OF_STEP = 6, "it is at another update than the first island"
    OTHER_VERSION = (
        7,
        "its gradient was taken at another version of the weights than the first island's",
    )
    ISLANDS_DIFFER = 8, "its islands have gradients of different norms"
    TOO_MANY_SKIPS = 9, "too many updates in a row were skipped"

    def __new__(cls, value: int, text: str = "") -> Reason:
        reason = int.__new__(cls, value)
        reason._value_, reason.text = value, text
        return reason


@dataclass(frozen=True)
class Decision:
    """Decision about all gradients that belong together.

    Attributes:
        verdict: whether to apply, skip or stop.
        reason: reason of the verdict.
        culprit: name of the model at fault; empty: none.
    """

    verdict: Verdict
    reason: Reason = Reason.FINE
    culprit: str = ""

    @property
    def applies(self) -> bool:
        """Return whether the gradients are applied."""
        return self.verdict is Verdict.APPLY


@dataclass(frozen=True)
class Rules:
    """Rules about which updates are applied, skipped, or stop the run.

    Attributes:
        skip_above: role -> gradient norm above which an update is skipped.
        on_nonfinite: action on NaN or inf. An overflow under loss scaling is always skipped.
        max_skips: the run stops after more than this many skipped updates in a row. Overflows alone do not stop it.
        max_staleness: how many versions the oldest sample may be behind the engines' weights. None: unlimited.
    """

    skip_above: Mapping[str, float] = field(default_factory=dict)
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skips: int = 10
    max_staleness: int | None = None

    @classmethod
    def from_config(cls, config: Config) -> Rules:
        """Return the rules that the sections `coordinator` and `rollout` set."""
        coordinator, rollout = config.coordinator, config.rollout
        has_older_samples = rollout.async_rollout or rollout.partial is not None
        return cls(
            skip_above=coordinator.skip_above,
            on_nonfinite=coordinator.on_nonfinite,
            max_skips=coordinator.max_skips,
            max_staleness=rollout.max_staleness if has_older_samples else None,
        )


def decide(reports: Sequence[GradientReport], rules: Rules) -> Decision:
    """Return one decision about gradients that belong together.

    Args:
        reports: reports of all models and islands. The islands of a role report on the sum of their gradients.
        rules: rules of the decision.
    """
    # Every model of the run reports, since they are applied or skipped together.
    findings = [finding for report in reports for finding in _judge(report, rules)]
    for role in dict.fromkeys(report.role for report in reports):
        findings += _compare_islands(
            [report for report in reports if report.role == role]
        )
    if not findings:
        return Decision(Verdict.APPLY)
    # The most severe verdict first, then the lowest reason and the first report, so
    # that the result is unique.
    names = [report.name for report in reports]
    worst = min(
        findings,
        key=lambda finding: (
            -finding.verdict,
            finding.reason,
            names.index(finding.culprit),
        ),
    )
    # A model's count does not include the present update.
    skips = 1 + max(report.counts.skips for report in reports)
    if (
        worst.verdict is Verdict.SKIP
        and worst.reason is not Reason.OVERFLOW
        and skips > rules.max_skips
    ):
        return replace(worst, verdict=Verdict.STOP, reason=Reason.TOO_MANY_SKIPS)
    return worst


def _judge(report: GradientReport, rules: Rules) -> list[Decision]:
    """Return what is wrong with one gradient."""
    findings = []
    # float16 overflows are part of loss scaling, which then lowers its scale.
    if report.has_overflow:
        findings.append(Decision(Verdict.SKIP, Reason.OVERFLOW, report.name))
    elif not (math.isfinite(report.norm) and math.isfinite(report.tokens)):
        verdict = Verdict.STOP if rules.on_nonfinite == "stop" else Verdict.SKIP
        findings.append(Decision(verdict, Reason.NOT_FINITE, report.name))
    elif report.tokens <= 0:
        findings.append(Decision(Verdict.SKIP, Reason.NO_TOKENS, report.name))
    elif report.norm > rules.skip_above.get(report.role, math.inf):
        findings.append(Decision(Verdict.SKIP, Reason.SPIKE, report.name))
    # Staleness is judged in addition: a stale gradient may be fine otherwise.
    if rules.max_staleness is not None and report.staleness > rules.max_staleness:
        findings.append(Decision(Verdict.SKIP, Reason.STALE, report.name))
    return findings


def _compare_islands(reports: Sequence[GradientReport]) -> list[Decision]:
    """Return which islands of a role have diverged from the first one. No skip can repair that."""
    findings = []
    first = reports[0]
    for report in reports[1:]:
        if report.counts.steps != first.counts.steps:
            findings.append(Decision(Verdict.STOP, Reason.OUT_OF_STEP, report.name))
        if report.counts.version != first.counts.version:
            findings.append(Decision(Verdict.STOP, Reason.OTHER_VERSION, report.name))
        # False if a norm is NaN, which is a finding of its own.
        if abs(report.norm - first.norm) > SAME_NORM * max(report.norm, first.norm):
            findings.append(Decision(Verdict.STOP, Reason.ISLANDS_DIFFER, report.name))
    return findings


def counts_to_state(counts: Mapping[str, UpdateCounts]) -> dict[str, dict[str, int]]:
    """Return the counts of all models for a checkpoint, by field and model."""
    rows = {name: asdict(count) for name, count in counts.items()}
    keys = {"steps": "steps", "versions": "version", "skips": "skips"}
    return {
        key: {name: row[attribute] for name, row in rows.items()}
        for key, attribute in keys.items()
    }


def counts_from_state(state: Mapping[str, Any]) -> dict[str, UpdateCounts]:
    """Undo `counts_to_state`."""
    skips = state["skips"]
    if isinstance(skips, int):
        # Earlier checkpoints hold one count for all models.
        skips = dict.fromkeys(state["steps"], skips)
    return {
        name: UpdateCounts(steps, state["versions"].get(name, 0), skips.get(name, 0))
        for name, steps in state["steps"].items()
    }
