"""Every rule of the decision."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.coordinator import CoordinatorClient, LocalCoordinator
from megaverl.coordinator.decide import (
    DECISION_SIZE,
    REPORT_SIZE,
    STATISTICS,
    Decision,
    Flag,
    GradientReport,
    Participant,
    Progress,
    Reason,
    Rules,
    Verdict,
    decide,
)
from megaverl.errors import TrainingStopped

PARTICIPANTS = (Participant("actor", 0), Participant("critic", 4), Participant("actor", 2, 1))
GOOD = GradientReport(step=0, version=0, tokens=8.0, squared_norm=16.0, divided_by=8.0)


def judge(rules: Rules | None = None, progress: Progress | None = None, **reports: GradientReport) -> Decision:
    """The decision of the first of `actor=, critic=, island=`."""
    numbers = {"actor": 0, "critic": 1, "island": 2}
    given = {numbers[name]: report for name, report in reports.items()}
    decisions, _ = decide(given, PARTICIPANTS, progress or Progress(), rules or Rules())
    assert len({(d.verdict, d.reason, d.participant) for d in decisions.values()}) == 1, "one verdict for all"
    return decisions[min(given)]


def test_a_good_update_is_applied_as_it_stands() -> None:
    found = judge(actor=GOOD, critic=GOOD)
    assert found == Decision(0, Verdict.APPLY, version=1, norm=4.0) and found.applies


@pytest.mark.parametrize(
    ("change", "rules", "verdict", "reason"),
    [
        ({"squared_norm": math.nan}, {}, Verdict.STOP, Reason.NOT_FINITE),
        ({"squared_norm": math.inf}, {}, Verdict.STOP, Reason.NOT_FINITE),
        ({"squared_norm": -1.0}, {}, Verdict.STOP, Reason.NOT_FINITE),
        ({"tokens": math.nan}, {}, Verdict.STOP, Reason.NOT_FINITE),
        ({"flags": Flag.BAD_LOSS}, {}, Verdict.STOP, Reason.NOT_FINITE),
        ({"statistics": {"kl": (1.0, math.inf, 1.0)}}, {}, Verdict.STOP, Reason.NOT_FINITE),
        ({"flags": Flag.BAD_GRADIENT}, {"on_nonfinite": "skip"}, Verdict.SKIP, Reason.NOT_FINITE),
        ({"flags": Flag.OVERFLOW, "squared_norm": math.inf}, {}, Verdict.SKIP, Reason.OVERFLOW),
        ({"tokens": 0.0}, {}, Verdict.SKIP, Reason.NO_TOKENS),
        ({"squared_norm": 26.0}, {"skip_above": {"critic": 5.0}}, Verdict.SKIP, Reason.SPIKE),
        ({"step": 1}, {}, Verdict.STOP, Reason.OUT_OF_STEP),
        ({"version": 2}, {}, Verdict.STOP, Reason.OTHER_VERSION),
        ({"oldest": 3, "newest": 5}, {"max_staleness": 1}, Verdict.SKIP, Reason.STALE),
        ({"oldest": 4, "newest": 5}, {"max_staleness": 1}, Verdict.APPLY, Reason.FINE),
        ({"oldest": 3, "newest": 5}, {}, Verdict.APPLY, Reason.FINE),
    ],
)
def test_one_role_at_fault_decides_for_all(change: Any, rules: Any, verdict: Verdict, reason: Reason) -> None:
    found = judge(Rules(**rules), actor=GOOD, critic=replace(GOOD, **change))
    assert (found.verdict, found.reason) == (verdict, reason)
    assert found.participant == (1 if reason else -1)
    if verdict is not Verdict.APPLY:
        assert (found.version, found.scale, found.clip) == (0, 0.0, 0.0)


def test_the_gravest_is_told() -> None:
    found = judge(actor=replace(GOOD, tokens=0.0), critic=replace(GOOD, squared_norm=math.nan))
    assert (found.verdict, found.reason, found.participant) == (Verdict.STOP, Reason.NOT_FINITE, 1)


def test_too_many_skips_are_the_end_and_overflows_are_none() -> None:
    rules, progress = Rules(max_skips=2), Progress()
    empty = replace(GOOD, tokens=0.0)
    verdicts = []
    for step in range(3):
        decisions, progress = decide({0: replace(empty, step=step)}, PARTICIPANTS, progress, rules)
        verdicts.append(decisions[0].verdict)
    assert verdicts == [Verdict.SKIP, Verdict.SKIP, Verdict.STOP]
    decisions, progress = decide({0: replace(GOOD, step=2)}, PARTICIPANTS, replace(progress, skips=2), rules)
    assert decisions[0].applies and progress.skips == 0
    over = replace(GOOD, flags=Flag.OVERFLOW)
    assert judge(rules, Progress(skips=9), actor=over).verdict is Verdict.SKIP


def test_schedules_and_versions_step_with_every_update_that_is_applied() -> None:
    progress, taken, versions = Progress(), [], []
    for step, tokens in enumerate([8.0, 0.0, 8.0]):
        report = replace(GOOD, step=step, version=progress.versions.get("actor", 0), tokens=tokens)
        decisions, progress = decide({0: report}, PARTICIPANTS, progress, Rules())
        taken.append(decisions[0].schedule_step)
        versions.append(decisions[0].version)
    assert taken == [0, 1, 1] and versions == [1, 1, 2]
    assert Progress.from_dict(progress.to_dict()) == progress
    assert progress.steps == {"actor": 3} and progress.versions == {"actor": 2}


def test_the_scale_makes_islands_one_batch() -> None:
    """Sums over tokens, of 6 and of 2 tokens: each is divided by all 8."""
    one = GradientReport(0, 0, tokens=6.0, squared_norm=64.0, divided_by=1.0, max_norm=0.5)
    other = replace(one, tokens=2.0)
    decisions, _ = decide({0: one, 2: other}, PARTICIPANTS, Progress(), Rules())
    for decision in decisions.values():
        assert decision.scale == 1 / 8 and decision.norm == 1.0
        assert decision.clip == pytest.approx(0.5, rel=1e-5)


def test_islands_with_other_gradients_are_the_end() -> None:
    found = judge(actor=GOOD, island=replace(GOOD, squared_norm=17.0))
    assert (found.verdict, found.reason, found.participant) == (Verdict.STOP, Reason.ISLANDS_DIFFER, 2)
    assert judge(actor=GOOD, island=replace(GOOD, squared_norm=16.001)).applies


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 1e6), st.floats(0.01, 10), st.integers(1, 1000))
def test_clipping_is_megatrons(squared_norm: float, limit: float, tokens: int) -> None:
    report = replace(GOOD, squared_norm=squared_norm, tokens=float(tokens), divided_by=float(tokens), max_norm=limit)
    found = judge(actor=report)
    coefficient = limit / (math.sqrt(squared_norm) + 1e-6)
    assert found.clip == (coefficient if coefficient < 1 else 1.0)
    assert found.norm * found.clip <= limit * (1 + 1e-9)


def test_a_role_tells_its_limit_and_where_its_schedule_stands() -> None:
    judge = CoordinatorClient(LocalCoordinator(["actor"], Rules(), Progress()), "actor", Progress())
    first = judge({}, 2.0, 8.0, overflow=False, max_norm=0.5)
    assert first.clip == pytest.approx(0.25) and (first.scale, first.schedule_step) == (1.0, 0)
    steps = [judge({}, 2.0, 8.0, overflow=overflow, max_norm=0.5).schedule_step for overflow in (True, True, False)]
    assert steps == [1, 1, 1], "a schedule waits while loss scaling looks for its scale"


def test_messages_come_back_and_are_small() -> None:
    report = replace(
        GOOD,
        flags=Flag.BAD_LOSS | Flag.DONE,
        max_norm=0.5,
        partners=5,
        oldest=3,
        newest=7,
        statistics={name: (1.0, 2.0, 3.0) for name in STATISTICS},
    )
    sent = torch.tensor(report.numbers(), dtype=torch.float64)
    assert len(sent) == REPORT_SIZE and sent.nbytes <= 512
    assert GradientReport.of(sent.tolist()) == report
    decision = Decision(3, Verdict.STOP, Reason.STALE, 1, 7, 0.5, 0.25, 2.0, 9, 0.125)
    assert Decision.of(decision.numbers()) == decision and len(decision.numbers()) == DECISION_SIZE
    for kind in (GradientReport, Decision):
        with pytest.raises(TrainingStopped, match="came where"):
            kind.of([0.0] * DECISION_SIZE)
    with pytest.raises(ValueError, match="none of"):
        replace(GOOD, statistics={"other": (0.0, 0.0, 0.0)}).numbers()


def test_islands_that_differ_are_told_whichever_has_more() -> None:
    for squared_norm, applies in ((17.0, False), (15.0, False), (16.03, True), (15.97, True), (16.04, False)):
        found = judge(actor=GOOD, island=replace(GOOD, squared_norm=squared_norm))
        assert found.applies == applies, squared_norm
        assert (found.reason, found.participant) == ((Reason.FINE, -1) if applies else (Reason.ISLANDS_DIFFER, 2))


def test_tokens_are_those_of_all_islands() -> None:
    """One without tokens has no fault; both without are told by the first, of either order."""
    empty = replace(GOOD, tokens=0.0)
    for actor, island in ((empty, GOOD), (GOOD, empty)):
        found = judge(actor=actor, island=island)
        assert found.applies and found.norm == 4.0
    assert (lambda d: (d.reason, d.participant))(judge(actor=empty, island=empty)) == (Reason.NO_TOKENS, 0)
    nan = replace(GOOD, squared_norm=math.nan)
    for actor, island, participant in ((nan, empty, 0), (empty, nan, 2)):
        found = judge(actor=actor, island=island)
        assert (found.verdict, found.reason, found.participant) == (Verdict.STOP, Reason.NOT_FINITE, participant)


def test_of_faults_alike_the_first_participant_is_told_and_of_others_the_first_reason() -> None:
    nan, late, old = replace(GOOD, squared_norm=math.nan), replace(GOOD, step=3), replace(GOOD, version=3)
    assert judge(actor=nan, critic=nan, island=nan).participant == 0
    assert judge(critic=nan, island=nan).participant == 1
    first, second = min(Reason.OUT_OF_STEP, Reason.NOT_FINITE), max(Reason.OUT_OF_STEP, Reason.NOT_FINITE)
    for actor, critic in ((nan, late), (late, nan)):
        found = judge(actor=actor, critic=critic)
        assert found.reason == first != second
        assert found.participant == (0 if (found.reason is Reason.OUT_OF_STEP) == (actor is late) else 1)
    assert judge(actor=replace(late, version=3)).reason is min(Reason.OUT_OF_STEP, Reason.OTHER_VERSION)
    assert judge(actor=old).reason is Reason.OTHER_VERSION


def test_a_participant_is_named_by_its_role_and_its_island() -> None:
    assert [str(one) for one in PARTICIPANTS] == ["actor", "critic", "actor.1"]
    assert Participant("actor", 3).island == 0


def test_each_role_counts_its_own_updates() -> None:
    """One decision over the actor alone, one over both: the critic's step, schedule and version are its own."""
    _, progress = decide({0: GOOD}, PARTICIPANTS, Progress(), Rules())
    both = {0: replace(GOOD, step=1, version=1), 1: GOOD}
    decisions, progress = decide(both, PARTICIPANTS, progress, Rules())
    assert [decisions[n].step for n in (0, 1)] == [1, 0] and [decisions[n].version for n in (0, 1)] == [2, 1]
    assert [decisions[n].schedule_step for n in (0, 1)] == [1, 0]
    assert (progress.steps, progress.versions) == ({"actor": 2, "critic": 1}, {"actor": 2, "critic": 1})
    stopped, after = decide({0: replace(GOOD, step=9)}, PARTICIPANTS, progress, Rules())
    assert stopped[0].verdict is Verdict.STOP and (after.steps, after.versions) == (progress.steps, progress.versions)
