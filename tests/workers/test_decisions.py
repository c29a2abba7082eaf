"""Every rule of the decision over gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from megaverl.controller.messages import decode_value, encode_value
from megaverl.workers.decisions import (
    Decision,
    GradientReport,
    Reason,
    Rules,
    UpdateCounts,
    Verdict,
    counts_from_state,
    counts_to_state,
    decide,
)

ACTOR = GradientReport("actor", 0, UpdateCounts(), tokens=8.0, norm=4.0)
CRITIC = replace(ACTOR, role="critic")
ISLAND = replace(ACTOR, island=1)
FINE = Decision(Verdict.APPLY)


def test_good_gradients_are_applied() -> None:
    assert decide([ACTOR, CRITIC, ISLAND], Rules()) == FINE
    assert FINE.applies


@pytest.mark.parametrize(
    ("change", "rules", "verdict", "reason"),
    [
        ({"norm": math.nan}, {}, Verdict.STOP, Reason.NOT_FINITE),
        ({"norm": math.inf}, {}, Verdict.STOP, Reason.NOT_FINITE),
        ({"tokens": math.nan}, {}, Verdict.STOP, Reason.NOT_FINITE),
        ({"norm": math.nan}, {"on_nonfinite": "skip"}, Verdict.SKIP, Reason.NOT_FINITE),
        ({"has_overflow": True, "norm": math.nan}, {}, Verdict.SKIP, Reason.OVERFLOW),
        ({"tokens": 0.0}, {}, Verdict.SKIP, Reason.NO_TOKENS),
        ({"norm": 5.1}, {"skip_above": {"critic": 5.0}}, Verdict.SKIP, Reason.SPIKE),
        ({"norm": 5.1}, {"skip_above": {"actor": 5.0}}, Verdict.APPLY, Reason.FINE),
        ({"staleness": 2}, {"max_staleness": 1}, Verdict.SKIP, Reason.STALE),
        ({"staleness": 1}, {"max_staleness": 1}, Verdict.APPLY, Reason.FINE),
        ({"staleness": 2}, {}, Verdict.APPLY, Reason.FINE),
    ],
)
def test_one_model_at_fault_decides_for_all(
    change: Any, rules: Any, verdict: Verdict, reason: Reason
) -> None:
    culprit = "critic" if reason else ""
    for reports in (
        [ACTOR, replace(CRITIC, **change)],
        [replace(CRITIC, **change), ACTOR],
    ):
        assert decide(reports, Rules(**rules)) == Decision(verdict, reason, culprit)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"counts": UpdateCounts(steps=1)}, Reason.OUT_OF_STEP),
        ({"counts": UpdateCounts(version=2)}, Reason.OTHER_VERSION),
        ({"norm": 4.01}, Reason.ISLANDS_DIFFER),
        ({"norm": 3.99}, Reason.ISLANDS_DIFFER),
        ({"norm": 4.003}, Reason.FINE),
        ({"norm": 3.997}, Reason.FINE),
    ],
)
def test_islands_must_not_diverge(change: Any, reason: Reason) -> None:
    found = decide([ACTOR, replace(ISLAND, **change)], Rules())
    expected = Decision(Verdict.STOP, reason, "actor.1") if reason else FINE
    assert found == expected


def test_models_have_counts_and_norms_of_their_own() -> None:
    """The critic has warmed up alone, and has another gradient: only islands of one role are compared."""
    other = replace(CRITIC, counts=UpdateCounts(steps=5, version=3), norm=70.0)
    assert decide([ACTOR, other], Rules()) == FINE


def test_the_most_severe_finding_is_reported() -> None:
    nan, empty, late = (
        replace(CRITIC, norm=math.nan),
        replace(ACTOR, tokens=0.0),
        replace(ISLAND, norm=5.0),
    )
    assert decide([empty, nan], Rules()) == Decision(
        Verdict.STOP, Reason.NOT_FINITE, "critic"
    )
    # Of equal verdicts the lowest reason, then the first report.
    assert decide([ACTOR, late, nan], Rules()) == Decision(
        Verdict.STOP, Reason.NOT_FINITE, "critic"
    )
    both = [replace(ACTOR, norm=math.nan), replace(ISLAND, norm=math.nan)]
    assert decide(both, Rules()).culprit == "actor"
    assert decide(both[::-1], Rules()).culprit == "actor.1"


def test_too_many_skips_end_the_run_and_overflows_do_not() -> None:
    rules = Rules(max_skips=2)
    counts = UpdateCounts()
    verdicts = []
    for _ in range(3):
        decision = decide([replace(ACTOR, tokens=0.0, counts=counts)], rules)
        verdicts.append(decision.verdict)
        counts = counts.after(decision)
    assert verdicts == [Verdict.SKIP, Verdict.SKIP, Verdict.STOP]
    assert decision == Decision(Verdict.STOP, Reason.TOO_MANY_SKIPS, "actor")
    skipped = replace(ACTOR, counts=UpdateCounts(steps=9, skips=9))
    assert decide([replace(skipped, has_overflow=True)], rules).verdict is Verdict.SKIP
    assert decide([skipped], rules) == FINE
    assert decide(
        [
            replace(skipped, counts=UpdateCounts(), tokens=0.0),
            replace(CRITIC, counts=skipped.counts),
        ],
        rules,
    ) == (Decision(Verdict.STOP, Reason.TOO_MANY_SKIPS, "actor"))


def test_the_version_counts_applied_updates() -> None:
    counts = UpdateCounts()
    for verdict in (Verdict.APPLY, Verdict.SKIP, Verdict.SKIP):
        counts = counts.after(Decision(verdict))
    assert counts == UpdateCounts(steps=3, version=1, skips=2)
    assert counts.after(FINE) == UpdateCounts(steps=4, version=2, skips=0)


def test_counts_of_a_checkpoint() -> None:
    counts = {"actor": UpdateCounts(3, 2, 1), "critic": UpdateCounts(4, 4, 0)}
    assert counts_from_state(counts_to_state(counts)) == counts
    # Checkpoints before version 0.2 count the skips of all models together.
    earlier = counts_to_state(counts) | {"skips": 2}
    assert counts_from_state(earlier) == {
        "actor": UpdateCounts(3, 2, 2),
        "critic": UpdateCounts(4, 4, 2),
    }
    assert counts_from_state({"steps": {}, "versions": {}, "skips": 0}) == {}


def test_reports_and_decisions_travel_to_the_bit() -> None:
    for norm in (0.1 + 0.2, math.nan, math.inf):
        report = replace(
            CRITIC,
            norm=norm,
            counts=UpdateCounts(7, 5, 2),
            has_overflow=True,
            staleness=-1,
            island=3,
        )
        data = encode_value(report)
        assert repr(decode_value(data, GradientReport)) == repr(report)
        assert len(data) < 200
    for reason in Reason:
        decision = Decision(Verdict.SKIP, reason, "actor.1")
        received = decode_value(encode_value(decision), Decision)
        assert (
            received == decision
            and received.reason.text == reason.text
            and received.verdict is Verdict.SKIP
        )
