"""A role's end: what its update reports to the coordinator, which may be this rank's own, and what is decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from megaverl.coordinator.decide import Participant, Progress, Rules, decide
from megaverl.coordinator.exchange import Coordinator
from megaverl.coordinator.reports import STATISTICS, Decision, Flag, GradientReport, Verdict
from megaverl.errors import TrainingStopped


class LocalCoordinator:
    """In a run of one world every rank has every report, and decides by itself, to the same end.

    Args:
        roles: that are trained.
    """

    def __init__(self, roles: Sequence[str], rules: Rules, progress: Progress | None = None) -> None:
        self._participants = tuple(Participant(role, number) for number, role in enumerate(roles))
        self._rules, self.progress = rules, progress or Progress()

    def decide(self, role: str, report: GradientReport | None, partners: Sequence[str] = ()) -> Decision:
        """As `Coordinator.decide`, without a message.

        Raises:
            TrainingStopped: the run ends here; says why.
        """
        assert report is not None, "every rank has a report"
        number = next(n for n, one in enumerate(self._participants) if one.role == role)
        decisions, self.progress = decide({number: report}, self._participants, self.progress, self._rules)
        decision = decisions[number]
        if decision.verdict is Verdict.STOP:
            raise TrainingStopped(
                f"update {decision.step} is not made, and the run ends: {role}: {decision.reason.text}."
            )
        return decision


class CoordinatorClient:
    """Of one role. Called by every rank of the role for each of its updates, with the same numbers.

    Args:
        progress: of the run so far.

    Attributes:
        partners: roles whose update of this moment is decided on together with this one's.
        share: of the tokens of an update, those that this island trains on.
        oldest, newest: of the samples that are trained on; see `GradientReport`.
    """

    def __init__(self, coordinator: Coordinator | LocalCoordinator, role: str, progress: Progress) -> None:
        self._coordinator, self._role = coordinator, role
        self._step, self._version = progress.steps.get(role, 0), progress.versions.get(role, 0)
        self.partners: tuple[str, ...] = ()
        self.share = 1.0
        self.oldest, self.newest = 0, 0

    def __call__(
        self, sums: Mapping[str, Tensor], norm: float, tokens: float, *, overflow: bool, max_norm: float
    ) -> Decision:
        """What to do with a gradient.

        Args:
            sums: the loss's statistics, of which those that the coordinator keeps are count, sum and sum of squares.
            norm: of the whole gradient, before clipping; of a loss divided by `tokens`.
            overflow: loss scaling found it out of range.
            max_norm: to which it is to be clipped; 0: not at all.

        Raises:
            TrainingStopped: the run ends here; says why.
        """
        statistics = {}
        for name in STATISTICS:
            if name in sums and sums[name].numel() == 3:
                count, total, squares = sums[name].tolist()
                statistics[name] = (float(count), float(total), float(squares))
        report = GradientReport(
            step=self._step,
            version=self._version,
            tokens=tokens * self.share,
            squared_norm=0.0 if overflow else norm * norm,
            divided_by=tokens,
            oldest=self.oldest,
            newest=self.newest,
            flags=Flag.OVERFLOW if overflow else Flag(0),
            max_norm=max_norm,
            statistics=statistics,
        )
        decision = self._coordinator.decide(self._role, report, self.partners)
        self._step, self._version = self._step + 1, decision.version
        return decision
