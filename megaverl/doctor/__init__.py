"""What a machine has for training, what it lacks, and how to mend it."""

from megaverl.doctor.examine import SECTIONS, examine
from megaverl.doctor.finding import Finding
from megaverl.doctor.text import as_dict, as_text

__all__ = ["SECTIONS", "Finding", "as_dict", "as_text", "examine"]
