"""`nccl` on the software device computes what NCCL does, and refuses or waits where NCCL would."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.softcuda.install import Options
from tests.softcuda.ranks import SoftwareDevice
from tests.weights.test_quantised import CASES as EIGHT_BITS

CASES = "tests.softcuda.cases"


def test_collectives_have_the_right_values(device: SoftwareDevice) -> None:
    found = device.ranks(2, f"{CASES}:collectives").check()
    for rank, values in enumerate(found):
        assert values["all_reduce"] == [3.0, 3.0]
        assert values["all_gather"] == [0.0, 0.0, 1.0, 1.0]
        assert values["reduce_scatter_mean"] == [2.0 * rank, 2.0 * rank + 1]
        assert values["broadcast"] == [1.0, 1.0]
        assert values["all_to_all"] == [float(rank), 10.0 + rank]
        assert values["reduce"] == ([1.0, 1.0] if rank == 0 else [1.0, 1.0])
        assert values["uneven"] == [0.0, 1.0, 1.0]
        assert values["batch"] == [1.0 - rank] * 2


def test_messages_have_no_names_and_do_not_hold_the_senders_host(
    device: SoftwareDevice,
) -> None:
    found = device.ranks(2, f"{CASES}:messages").check()
    assert found[1] == {"received": [[1.0, 1.0], [2.0, 2.0]]}


def test_tensors_of_the_host_and_with_gaps_are_refused(device: SoftwareDevice) -> None:
    for found in device.ranks(2, f"{CASES}:refused_by_nccl").check():
        assert "No backend type associated with device type cpu" in found["host"]
        assert "must be contiguous" in found["apart"]


def test_a_relayed_reshard_blocks_nobody_and_forwards_what_has_arrived(
    device: SoftwareDevice,
) -> None:
    """From one trainer to three engines on two nodes: under NCCL's order of messages, and without races of streams."""
    spec = {"architecture": "Qwen2ForCausalLM"}
    case: dict[str, Any] = {
        "grid": {"tp": 1},
        "engine_tp": 1,
        "nodes": [0, 1, 2, 2],
        "spec": spec,
    }
    options = Options(devices=4, tracks_order=True, poisons=True)
    ended = device.ranks(4, f"{CASES}:relayed_reshard", options=options, **case)
    found = ended.check()
    assert [(result["wrong"], result["differs"]) for result in found] == [([], [])] * 4
    assert sum(result["forwards"] for result in found) > 0


def test_weights_land_in_eight_bits_as_on_the_cpu(device: SoftwareDevice) -> None:
    """Of dense and expert layers, by messages and from the memory of other ranks, without races of streams."""
    cases = [EIGHT_BITS[2][number] for number in (0, 2, 4)]
    options = Options(devices=2, tracks_order=True, poisons=True)
    ended = device.ranks(2, f"{CASES}:quantised_landing", options=options, cases=cases)
    for found in ended.check():
        for arguments, result in zip(cases, found, strict=True):
            assert result["wrong"] == [], arguments
            assert 0 < result["error"] < 0.05, arguments


@pytest.mark.parametrize("kind", ["crossed", "facing", "alone"])
def test_what_never_ends_on_gpus_does_not_end(
    device: SoftwareDevice, kind: str
) -> None:
    """Communicators in different orders, two senders that face each other, a first batch without all ranks."""
    found = device.ranks(2, f"{CASES}:never_ends", kind=kind).results
    assert any(
        re.match(r"RuntimeError: .*(timeout|timed out|Timed out|closed)", text)
        for text in found
    ), found


@pytest.mark.parametrize("waits", [True, False])
def test_a_result_that_is_read_before_the_wait_is_reported(
    device: SoftwareDevice, waits: bool
) -> None:
    ended = device.ranks(
        2,
        f"{CASES}:group_reads_unwaited",
        options=Options(tracks_order=True),
        wait=waits,
    )
    for reports in ended.results:
        assert bool(reports) != waits
        assert (
            waits
            or "aten::add reads on stream" in reports[0]
            and "what nccl:all_reduce writes" in reports[0]
        )
