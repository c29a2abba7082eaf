"""The decision over an update: from all reports, once for all roles. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from megaverl.algorithms.loss import clip_factor
from megaverl.coordinator.reports import Decision, Flag, GradientReport, Reason, Verdict

# Islands that added up the same gradients may differ by rounding.
SAME_NORM = 1e-3


class Participant(NamedTuple):
    """Who reports: a role, or one island of it, by its first rank."""

    role: str
    rank: int
    island: int = 0

    def __str__(self) -> str:
        return f"{self.role}.{self.island}" if self.island else self.role


@dataclass(frozen=True)
class Rules:
    """What is applied, skipped, or the end.

    Attributes:
        skip_above: role -> gradient norm above which an update is left out.
        on_nonfinite: what a NaN or inf does. An overflow under loss scaling always skips.
        max_skips: skipped updates in a row after which the run stops.
        max_staleness: versions of the engines' weights that the oldest sample may be behind; None: any.
    """

    skip_above: Mapping[str, float] = field(default_factory=dict)
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skips: int = 10
    max_staleness: int | None = None


@dataclass(frozen=True)
class Progress:
    """What the coordinator knows of the run; goes into a checkpoint.

    Attributes:
        steps: role -> updates decided on.
        versions: role -> version of its weights, which is where its schedule stands: one more with every update that
            was applied.
        skips: skipped updates in a row.
    """

    steps: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    skips: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"steps": dict(self.steps), "versions": dict(self.versions), "skips": self.skips}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Progress:
        return cls(data["steps"], data["versions"], data["skips"])


def decide(
    reports: Mapping[int, GradientReport],
    participants: Sequence[Participant],
    progress: Progress,
    rules: Rules,
) -> tuple[dict[int, Decision], Progress]:
    """One verdict over gradients that belong together, and each one's factors.

    A role's islands share one gradient, added up before it is reported; its scale makes the loss the mean over the
    tokens of all of them.

    A schedule steps with the updates that are applied, and waits with one that is skipped, as Megatron-LM's training
    loop has it (`train_step`: the scheduler steps where the optimizer did). Learning rate, weight decay and Adam's
    bias correction then count the same steps: while float16's loss scaling looks for its scale, a warm-up would be
    over before the first step was taken. A run with skips ends that many steps before its schedule does.

    Args:
        reports: by number of the participant; all that decide together.
        participants: all of the run.

    Returns: each participant's decision, and the progress after it.
    """
    verdict, reason, culprit = _judge(reports, participants, progress, rules)
    skips = 0 if verdict is Verdict.APPLY else progress.skips + 1
    if verdict is Verdict.SKIP and reason is not Reason.OVERFLOW and skips > rules.max_skips:
        verdict, reason = Verdict.STOP, Reason.TOO_MANY_SKIPS
    roles = dict.fromkeys(participants[number].role for number in reports)
    versions = dict(progress.versions)
    steps = dict(progress.steps)
    decisions: dict[int, Decision] = {}
    for role in roles:
        members = [number for number in reports if participants[number].role == role]
        before = versions.get(role, 0)
        versions[role] = before + (verdict is Verdict.APPLY)
        tokens = sum(reports[number].tokens for number in members)
        for number in members:
            report = reports[number]
            scale = report.divided_by / tokens if tokens > 0 and math.isfinite(tokens) else 0.0
            norm = scale * math.sqrt(report.squared_norm) if report.squared_norm >= 0 else math.nan
            decisions[number] = Decision(
                step=report.step,
                verdict=verdict,
                reason=reason,
                participant=culprit,
                version=versions[role],
                scale=scale if verdict is Verdict.APPLY else 0.0,
                clip=clip_factor(norm, report.max_norm) if verdict is Verdict.APPLY else 0.0,
                norm=norm,
                schedule_step=before,
            )
        if verdict is not Verdict.STOP:
            steps[role] = steps.get(role, 0) + 1
    return decisions, replace(progress, steps=steps, versions=versions, skips=skips)


def _judge(
    reports: Mapping[int, GradientReport], participants: Sequence[Participant], progress: Progress, rules: Rules
) -> tuple[Verdict, Reason, int]:
    """The gravest of what is wrong, and with whom."""
    found: list[tuple[Verdict, Reason, int]] = []
    for number in sorted(reports):
        report, role = reports[number], participants[number].role
        if report.step != progress.steps.get(role, 0):
            found.append((Verdict.STOP, Reason.OUT_OF_STEP, number))
        if report.version != progress.versions.get(role, 0):
            found.append((Verdict.STOP, Reason.OTHER_VERSION, number))
        if Flag.OVERFLOW in report.flags:
            found.append((Verdict.SKIP, Reason.OVERFLOW, number))
        elif not report.is_finite or report.squared_norm < 0:
            bad = Verdict.STOP if rules.on_nonfinite == "stop" else Verdict.SKIP
            found.append((bad, Reason.NOT_FINITE, number))
        if rules.max_staleness is not None and report.newest - report.oldest > rules.max_staleness:
            found.append((Verdict.SKIP, Reason.STALE, number))
    for role in dict.fromkeys(participants[number].role for number in reports):
        found += _judge_role(role, {n: r for n, r in reports.items() if participants[n].role == role}, rules)
    if not found:
        return Verdict.APPLY, Reason.FINE, -1
    return max(found, key=lambda one: (one[0], -one[1], -one[2]))


def _judge_role(role: str, reports: Mapping[int, GradientReport], rules: Rules) -> list[tuple[Verdict, Reason, int]]:
    """What shows only when all islands of a role are seen together."""
    found = []
    first = min(reports)
    tokens = sum(report.tokens for report in reports.values())
    if not all(report.is_finite and report.squared_norm >= 0 for report in reports.values()):
        return []
    if tokens <= 0:
        return [(Verdict.SKIP, Reason.NO_TOKENS, first)]
    norms = {n: r.divided_by / tokens * math.sqrt(r.squared_norm) for n, r in reports.items()}
    for number, norm in norms.items():
        if abs(norm - norms[first]) > SAME_NORM * max(norm, norms[first]):
            found.append((Verdict.STOP, Reason.ISLANDS_DIFFER, number))
        if norm > rules.skip_above.get(role, math.inf):
            found.append((Verdict.SKIP, Reason.SPIKE, number))
    return found
