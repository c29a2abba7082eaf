"""What the suite says at its end of the tests that it left out."""

from __future__ import annotations

from tests.conftest import skipped_lines


def test_a_line_for_each_reason_of_a_file() -> None:
    place = (
        "/tests/report/test_in_a_browser.py",
        14,
        "Skipped: chromium not found (apt-get install chromium)",
    )
    other = (
        "/tests/metrics/test_tracker.py",
        243,
        "Skipped: pip install 'megaverl[mlflow]'",
    )
    assert skipped_lines([place, other, place]) == [
        "skipped: 2 of test_in_a_browser.py: chromium not found (apt-get install chromium)",
        "skipped: 1 of test_tracker.py: pip install 'megaverl[mlflow]'",
    ]
    assert skipped_lines([]) == []
