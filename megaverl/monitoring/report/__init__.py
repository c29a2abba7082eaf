"""Reports of runs: one self-contained HTML page for one or several runs, written or served; and a live terminal view.

The page loads nothing from anywhere. The terminal view (`RunView`) shows progress,
curves, the times of the last step, and which ranks wait for which.
"""

from megaverl.monitoring.report.html_page import ReportServer, write_report
from megaverl.monitoring.report.run_view import MOST_RANKS, RunView

__all__ = [
    "MOST_RANKS",
    "ReportServer",
    "RunView",
    "write_report",
]
