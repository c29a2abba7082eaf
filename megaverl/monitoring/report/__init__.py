"""A run, or several side by side, as one HTML page that needs nothing but itself."""

from megaverl.monitoring.report.page import write_report

__all__ = ["write_report"]
