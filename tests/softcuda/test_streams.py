"""A missing wait or `record_stream` is reported, or gives wrong values; what is ordered is not reported."""

from __future__ import annotations

import pytest

from tests.softcuda.install import Options
from tests.softcuda.ranks import SoftwareDevice

CASES = "tests.softcuda.cases"
TRACKED = Options(devices=1, tracks_order=True)
FAULTS = {
    "read on another stream, not waited for": "aten::add reads on stream 64 what aten::mul_ writes on stream 0",
    "read back, not waited for": "aten::add reads on stream 0 what aten::add writes on stream 64",
    "written on another stream, not waited for": "aten::add reads on stream 0 what aten::mul_ writes on stream 64",
    "an event that was asked once": "aten::add reads on stream 0 what aten::mul_ writes on stream 64",
    "released early": "is used again while aten::add on stream 64 may still read it",
    "the host writes too early": "the host has changed page-locked memory before its copy",
}
ORDERED = (
    "read on another stream, ordered",
    "written on another stream, ordered",
    "ordered by events",
    "released early, recorded",
    "released early, waited for",
    "the host writes in time",
    "a backward pass",
)


@pytest.mark.parametrize("case", FAULTS)
def test_a_missing_wait_is_reported(device: SoftwareDevice, case: str) -> None:
    [reports] = device.ranks(1, f"{CASES}:reported", options=TRACKED, case=case).results
    assert len(reports) == 1 and FAULTS[case] in reports[0], reports
    assert "tests/softcuda/cases.py:" in reports[0], "the report names the lines"


@pytest.mark.parametrize("case", ORDERED)
def test_what_is_ordered_is_not_reported(device: SoftwareDevice, case: str) -> None:
    ended = device.ranks(1, f"{CASES}:reported", options=TRACKED, case=case)
    assert ended.check() == [[]]


def test_the_host_reads_nan_until_it_has_waited(device: SoftwareDevice) -> None:
    [[before, after]] = device.ranks(1, f"{CASES}:host_reads", options=TRACKED).check()
    assert before == ["nan"] * 3 and after == [1.0] * 3
