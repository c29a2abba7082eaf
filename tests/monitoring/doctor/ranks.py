"""What runs on a rank of tests/doctor."""

from __future__ import annotations

from megaverl.monitoring.doctor.trial_ranks import generate_one, measure_links


def one_token() -> str:
    return generate_one("hf")


def rates() -> None:
    measure_links()
