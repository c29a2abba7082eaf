"""The doctor: checks of a machine for training. Each finding says what is there or missing, and how to fix it."""

from megaverl.monitoring.doctor.findings import Finding, Status, as_dict, as_text

__all__ = [
    "Finding",
    "Status",
    "as_dict",
    "as_text",
]
