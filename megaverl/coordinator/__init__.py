"""One rank decides for the whole run: gradients, versions, checkpoints, who is alive. See docs/placement.md."""

from megaverl.coordinator.client import CoordinatorClient, LocalCoordinator
from megaverl.coordinator.decide import Participant, Progress, Rules, decide
from megaverl.coordinator.exchange import Coordinator
from megaverl.coordinator.reports import Decision, Flag, GradientReport, Reason, Verdict
from megaverl.distributed.liveness import Liveness, Timeouts

__all__ = [
    "LocalCoordinator",
    "Coordinator",
    "Decision",
    "Flag",
    "GradientReport",
    "CoordinatorClient",
    "Liveness",
    "Timeouts",
    "Progress",
    "Reason",
    "Rules",
    "Participant",
    "Verdict",
    "decide",
]
