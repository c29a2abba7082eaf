"""One rank decides for the whole run over gradients, versions and checkpoints. See docs/placement.md."""

from megaverl.coordinator.decide import GradientReport, Participant, Progress, Rules
from megaverl.coordinator.exchange import Coordinator, CoordinatorClient, LocalCoordinator

__all__ = [
    "Coordinator",
    "CoordinatorClient",
    "GradientReport",
    "LocalCoordinator",
    "Participant",
    "Progress",
    "Rules",
]
