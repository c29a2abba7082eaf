"""Gradient reports of the roles, and the decision about an update from all of them. Pure.

Reports and decisions are fixed numbers of floats, so that they fit in small messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, IntFlag
from typing import Any, Literal, NamedTuple, get_type_hints

from megaverl.algorithms.loss import clip_factor
from megaverl.errors import TrainingStopped

# Statistics of the loss in a report, each as count, sum and sum of squares, so that they add up over roles.
STATISTICS = ("loss", "kl", "entropy", "ratio", "clipped", "value_error", "advantage", "reward")
_KNOWN = frozenset(STATISTICS)
_MAGIC = 5010.0
DECISION_SIZE = 11
REPORT_SIZE = 11 + 3 * len(STATISTICS)

Moments = tuple[float, float, float]
NONE: Moments = (0.0, 0.0, 0.0)


class Flag(IntFlag):
    """Events of a gradient or its rank."""

    OVERFLOW = 1  # loss scaling found a value out of float16's range, which is expected now and then
    BAD_LOSS = 2  # NaN or inf in the loss or one of its statistics
    BAD_GRADIENT = 4
    DONE = 16  # the last report of this role


@dataclass(frozen=True)
class GradientReport:
    """Gradient of one role (or island) in one update, summed over all of its ranks.

    Attributes:
        step: number of the update, from 0.
        version: version of the weights that the gradient belongs to.
        tokens: number of tokens in the loss.
        squared_norm: squared norm of the gradient as it is.
        divided_by: divisor of the loss so far; 1 for a sum over tokens, `tokens` for a mean over its own tokens.
        oldest: version of the engines' weights that generated the oldest sample.
        newest: version of the engines' weights now.
        flags: see `Flag`.
        partners: bit mask of the participants that decide together, including this one.
        max_norm: norm to which the role clips its gradient; 0: no clipping.
        statistics: name -> count, sum, sum of squares.
    """

    step: int
    version: int
    tokens: float
    squared_norm: float
    divided_by: float = 1.0
    oldest: int = 0
    newest: int = 0
    flags: Flag = Flag(0)
    partners: int = 0
    max_norm: float = 0.0
    statistics: Mapping[str, Moments] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """Return whether no number is NaN or inf, and no flag says so."""
        numbers = [self.tokens, self.squared_norm, self.divided_by, *(x for m in self.statistics.values() for x in m)]
        return not self.flags & (Flag.BAD_LOSS | Flag.BAD_GRADIENT) and all(map(math.isfinite, numbers))

    def numbers(self) -> list[float]:
        """Encode the report as REPORT_SIZE numbers.

        Raises:
            ValueError: a statistic is unknown.
        """
        if not self.statistics.keys() <= _KNOWN:
            raise ValueError(f"statistics {sorted(self.statistics.keys() - _KNOWN)} are none of {STATISTICS}")
        moments = [self.statistics.get(name, NONE) for name in STATISTICS]
        return [*_pack(self), *(number for each in moments for number in each)]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> GradientReport:
        """Undo `numbers`.

        Raises:
            TrainingStopped: the numbers do not encode a report.
        """
        found = _unpack(cls, numbers, REPORT_SIZE, "a gradient report")
        rest = numbers[-3 * len(STATISTICS) :]
        moments = {name: (rest[3 * i], rest[3 * i + 1], rest[3 * i + 2]) for i, name in enumerate(STATISTICS)}
        return cls(**found, statistics={name: three for name, three in moments.items() if three != NONE})


class Verdict(IntEnum):
    """Action on all gradients that were decided together."""

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
    OUT_OF_STEP = 6, "it is at another update than the run"
    OTHER_VERSION = 7, "its gradient was taken at another version of the weights than the run's"
    ISLANDS_DIFFER = 8, "its islands have gradients of different norms"
    TOO_MANY_SKIPS = 9, "too many updates in a row were skipped"
    LOST = 10, "no report came from it"

    def __new__(cls, value: int, text: str = "") -> Reason:
        reason = int.__new__(cls, value)
        reason._value_, reason.text = value, text
        return reason


@dataclass(frozen=True)
class Decision:
    """Decision for one role (or island).

    Attributes:
        step: number of the update.
        verdict: whether to apply, skip or stop.
        reason: reason of the verdict.
        participant: number of the role or island at fault; -1: none.
        version: version of the weights after the update.
        scale: factor of the gradient that makes its loss the mean over all tokens of all islands.
        clip: additional factor that limits the norm; 1 if it is below the limit.
        norm: norm of the role's gradient after scaling, before clipping.
        schedule_step: number of updates applied before this one, which is the step of the role's schedule.
        waited: seconds that the report waited at the coordinator for its partners' reports.
    """

    step: int
    verdict: Verdict
    reason: Reason = Reason.FINE
    participant: int = -1
    version: int = 0
    scale: float = 1.0
    clip: float = 1.0
    norm: float = 0.0
    schedule_step: int = 0
    waited: float = 0.0

    @property
    def applies(self) -> bool:
        return self.verdict is Verdict.APPLY

    def numbers(self) -> list[float]:
        """Encode the decision as DECISION_SIZE numbers."""
        return _pack(self)

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Decision:
        """Undo `numbers`.

        Raises:
            TrainingStopped: the numbers do not encode a decision.
        """
        return cls(**_unpack(cls, numbers, DECISION_SIZE, "a decision"))


# Message -> its fields that are one number each, with their types.
_KINDS = {
    message.__name__: {name: kind for name, kind in get_type_hints(message).items() if name != "statistics"}
    for message in (GradientReport, Decision)
}


def _pack(message: GradientReport | Decision) -> list[float]:
    return [_MAGIC, *(float(getattr(message, name)) for name in _KINDS[type(message).__name__])]


def _unpack(message: type, numbers: Sequence[float], size: int, what: str) -> dict[str, Any]:
    if len(numbers) != size or numbers[0] != _MAGIC:
        raise TrainingStopped(f"a message of {len(numbers)} numbers came where {what} was expected")
    kinds = zip(_KINDS[message.__name__].items(), numbers[1:], strict=False)
    return {name: number if kind is float else kind(int(number)) for (name, kind), number in kinds}


# Relative tolerance for the norms of islands, which sum the same gradients and differ only by rounding.
SAME_NORM = 1e-3


class Participant(NamedTuple):
    """Reporter of gradients: a role, or one island of it, with its first rank."""

    role: str
    rank: int
    island: int = 0

    def __str__(self) -> str:
        return f"{self.role}.{self.island}" if self.island else self.role


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


@dataclass(frozen=True)
class Progress:
    """Progress of the run as the coordinator knows it; stored in checkpoints.

    Attributes:
        steps: role -> number of decided updates.
        versions: role -> version of its weights, which is the number of applied updates and the step of its schedule.
        skips: number of updates skipped in a row.
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
    """Return one verdict about gradients that belong together, and the factors of each.

    The islands of a role report one summed gradient. Its scale makes the loss the mean over the tokens of all islands.

    The schedule advances with applied updates, and pauses at a skipped one, as in Megatron-LM's training loop
    (`train_step`: the scheduler steps where the optimizer did). Learning rate, weight decay and Adam's bias correction
    then count the same steps. Otherwise a warm-up would be over before the first step, while float16's loss scaling
    searches for its scale. A run with skips ends that many steps before its schedule.

    Args:
        reports: number of a participant -> its report, for all that decide together.
        participants: all participants of the run.
        progress: progress before this update.
        rules: rules of the decision.

    Returns:
        Number of a participant -> its decision, and the progress after the update.
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
    """Return the most severe finding: its verdict, its reason, and the participant at fault (-1: none)."""
    found: list[tuple[Verdict, Reason, int]] = []
    for number in sorted(reports):
        report, role = reports[number], participants[number].role
        # A role at another update or version has diverged from the run, which no skip can repair.
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
    # The most severe verdict first, then the lowest reason and participant, so that the result is unique.
    return max(found, key=lambda one: (one[0], -one[1], -one[2]))


def _judge_role(role: str, reports: Mapping[int, GradientReport], rules: Rules) -> list[tuple[Verdict, Reason, int]]:
    """Return findings that need the reports of all islands of a role."""
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
