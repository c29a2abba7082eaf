"""Each place that orders streams does; without one of its waits the device reports it, or the values are wrong."""

from __future__ import annotations

import pytest

from tests.softcuda.install import Options
from tests.softcuda.ranks import SoftwareDevice
from tests.softcuda.waits import FAULTS, USES

OPTIONS = Options(devices=1, tracks_order=True, poisons=True)
# fault -> what is reported; empty: the values are wrong, and nothing is reported
REPORTS = {
    "store before the update is over": "race: aten::copy_ reads on stream",
    "memory given away before it is stored": "may still read it (no record_stream, no wait)",
    "fetch into memory that is in use": "race: ",
    "read before it is fetched": "race: aten::",
    "overlap reads weights that are being written": "race: aten::copy_ reads on stream",
    "the engine reads weights that are still arriving": "race: aten::eq reads on stream",
    "a save writes what has not been copied": "",
    "a micro-batch is overwritten on its way": "the host has changed page-locked memory",
    "positions of rows are overwritten on their way": "the host has changed page-locked memory",
    "shards on the host are filled while they are read": "the host has changed page-locked memory",
}


def test_every_fault_has_a_report_and_every_place_a_fault() -> None:
    assert REPORTS.keys() == FAULTS.keys()
    assert {fault.use for fault in FAULTS.values()} == USES.keys()


@pytest.mark.parametrize("place", USES)
def test_every_place_orders_its_streams(device: SoftwareDevice, place: str) -> None:
    ended = device.ranks(1, "tests.softcuda.waits:use", options=OPTIONS, name=place)
    assert ended.check() == [{"right": True, "reports": []}]


@pytest.mark.parametrize("fault", REPORTS)
def test_a_wait_that_is_left_out_is_noticed(device: SoftwareDevice, fault: str) -> None:
    ended = device.ranks(
        1,
        "tests.softcuda.waits:use",
        options=OPTIONS,
        name=FAULTS[fault].use,
        fault=fault,
    )
    assert ended.codes == [0], ended.text
    [found] = ended.results
    if REPORTS[fault]:
        assert any(REPORTS[fault] in report for report in found["reports"]), found
    else:
        assert not found["right"]
