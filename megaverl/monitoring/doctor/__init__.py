"""The doctor: what a machine has for training, what it lacks, and how to fix it. Findings, as text and as JSON."""

from megaverl.monitoring.doctor.findings import Finding, Status, as_dict, as_text

__all__ = [
    "Finding",
    "Status",
    "as_dict",
    "as_text",
]
