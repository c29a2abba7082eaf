"""One rank decides for the whole run: gradients, versions, checkpoints, who is alive. See docs/placement.md."""

from megaverl.coordinator.committer import CoordinatorCommits
from megaverl.coordinator.decide import Progress, Rules, Seat, decide
from megaverl.coordinator.exchange import Coordinator
from megaverl.coordinator.judge import Alone, Judge
from megaverl.coordinator.reports import Decision, Flag, GradientReport, Reason, Verdict
from megaverl.distributed.liveness import Liveness, Patience

__all__ = [
    "Alone",
    "Coordinator",
    "CoordinatorCommits",
    "Decision",
    "Flag",
    "GradientReport",
    "Judge",
    "Liveness",
    "Patience",
    "Progress",
    "Reason",
    "Rules",
    "Seat",
    "Verdict",
    "decide",
]
