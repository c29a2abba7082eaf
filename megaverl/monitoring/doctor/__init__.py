"""What a machine has for training, what it lacks, and how to fix it."""

from megaverl.monitoring.doctor.examine import SECTIONS, examine
from megaverl.monitoring.doctor.finding import Finding, as_dict, as_text

__all__ = ["SECTIONS", "Finding", "as_dict", "as_text", "examine"]
