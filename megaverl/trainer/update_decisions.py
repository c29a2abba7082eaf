"""Decisions of the program over the gradients that running updates report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaverl.controller.references import PendingCall
from megaverl.workers.decisions import GradientReport, Rules, Verdict, decide


async def decide_together(updates: Sequence[PendingCall[Any]], rules: Rules) -> None:
    """Apply or skip each mini-batch of models that train at the same time, all of them or none.

    The first rank of each model (or of each island of it) reports on its gradient and
    waits for the decision. Models whose ranks decide by themselves do not report.
    Return when the updates have ended.
    """
    while any(
        reports := [await update.questions(GradientReport) for update in updates]
    ):
        decision = decide(
            [report for of_update in reports for report in of_update], rules
        )
        for update, of_update in zip(updates, reports, strict=True):
            # Only the model at fault is told to stop. Its error then ends the run, and
            # says more than others could.
            if decision.verdict is not Verdict.STOP or decision.culprit in {
                report.name for report in of_update
            }:
                update.answer(decision)
