"""`megaverl doctor --gpu`: what is made of recorded output, and the rates between ranks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from megaverl.monitoring.doctor import Finding
from megaverl.monitoring.doctor import hardware as module
from megaverl.monitoring.doctor.hardware import (
    CHECKS,
    adapter_findings,
    gpu_findings,
    hardware,
    link_findings,
    link_rate,
    pair_rate,
    read_adapters,
    read_links,
    read_topology,
    topology_findings,
)
from megaverl.monitoring.doctor.trial_ranks import judge
from megaverl.monitoring.doctor.trials import measure_rates
from tests.launcher import Launcher
from tests.monitoring.doctor import samples

H100_LINKS = 18 * ["26.562 GB/s"]
UP = ("4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand")


def named(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_eight_healthy_gpus() -> None:
    found = named(gpu_findings(samples.query(*8 * [{}]), "13.0"))
    assert {finding.status for finding in found.values()} == {"ok"}
    assert (
        found["driver"].found
        == "580.95.05, for CUDA up to 13.0; 8 x NVIDIA H100 80GB HBM3"
    )
    assert list(found) == ["driver", *(check.name for check in CHECKS)]


@pytest.mark.parametrize(
    ("name", "changed", "status", "said"),
    [
        (
            "recovery",
            {"gpu_recovery_action": "Drain and Reset"},
            "fail",
            "GPU 1: Drain and Reset",
        ),
        (
            "memory errors",
            {"ecc_errors/volatile/dram_uncorrectable": "2"},
            "fail",
            "GPU 1: 2 dram uncorrectable",
        ),
        (
            "memory errors",
            {"remapped_rows/remapped_row_failure": "Yes"},
            "fail",
            "GPU 1: no rows left to remap",
        ),
        (
            "row remapping",
            {"remapped_rows/remapped_row_pending": "Yes"},
            "warn",
            "GPU 1: pending",
        ),
        ("ECC", {"ecc_mode/current_ecc": "Disabled"}, "warn", "GPU 1: off"),
        (
            "clocks",
            {"clocks_event_reasons/clocks_event_reason_hw_thermal_slowdown": "Active"},
            "warn",
            "GPU 1: hw thermal slowdown at 345 MHz of 1980 MHz",
        ),
        (
            "clocks",  # before driver 535
            {
                "clocks_throttle_reasons/clocks_throttle_reason_hw_power_brake_slowdown": "Active"
            },
            "warn",
            "GPU 1: hw power brake slowdown at 345 MHz of 1980 MHz",
        ),
        (
            "power limit",
            {"gpu_power_readings/current_power_limit": "500.00 W"},
            "warn",
            "GPU 1: limited to 500.00 W of 700.00 W",
        ),
        ("MIG", {"mig_mode/current_mig": "Enabled"}, "warn", "GPU 1: on"),
        ("persistence", {"persistence_mode": "Disabled"}, "note", "GPU 1: off"),
        (
            "PCIe",
            {"pci/pci_gpu_link_info/link_widths/current_link_width": "8x"},
            "warn",
            "GPU 1: 8x of 16x lanes",
        ),
        (
            "NVSwitch fabric",
            {"fabric/state": "In Progress", "fabric/status": "N/A"},
            "fail",
            "GPU 1: In Progress",
        ),
    ],
)
def test_what_is_wrong_with_one_of_two(
    name: str, changed: dict[str, str], status: str, said: str
) -> None:
    found = named(
        gpu_findings(samples.query({}, changed, dtd="nvsmi_device_v13.dtd"), "13.0")
    )
    assert (found[name].status, found[name].found) == (status, said)
    assert found[name].fix
    assert all(
        finding.status == "ok" for finding in found.values() if finding.name != name
    )


def test_a_driver_that_is_too_old_and_gpus_of_two_kinds() -> None:
    old = named(
        gpu_findings(samples.query({}, driver="550.54.15", cuda="12.4"), "13.0")
    )["driver"]
    assert old.status == "fail" and "torch is built for CUDA 13.0" in old.found
    assert (
        named(gpu_findings(samples.query({}, cuda="13.0"), "13.1"))["driver"].status
        == "ok"
    ), "minor versions go together"
    mixed = named(
        gpu_findings(
            samples.query({}, {"product_name": "NVIDIA A100-SXM4-80GB"}), "13.0"
        )
    )["driver"]
    assert mixed.status == "warn" and "A100" in mixed.found
    workstation = {path: "N/A" for path in samples.HEALTHY if "/" in path} | {
        "product_name": "NVIDIA GeForce RTX 4090"
    }
    assert {
        finding.status for finding in gpu_findings(samples.query(workstation), "13.0")
    } == {"ok"}, "has no such things"


def test_topologies() -> None:
    switched = read_topology(samples.switched())
    assert len(switched.gpus) == len(switched.adapters) == 8
    assert (
        switched.between["GPU0", "GPU7"] == "NV18"
        and switched.between["NIC7", "GPU7"] == "PIX"
    )
    found = named(topology_findings(switched))
    assert found["GPU to GPU"].found == "NVLink between all pairs (NV18)"
    assert {finding.status for finding in found.values()} == {"ok"}
    far = named(topology_findings(read_topology(samples.switched(adapter="NODE"))))[
        "GPU to network"
    ]
    assert far.status == "warn" and far.found.startswith("GPU0, GPU1, ")
    pcie = read_topology(samples.topology([["X", "PHB"], ["PHB", "X"]], []))
    assert (pcie.gpus, pcie.adapters) == (["GPU0", "GPU1"], [])
    (only,) = topology_findings(pcie)
    assert only.status == "note" and "tp" in only.fix
    assert [
        finding.found
        for finding in topology_findings(read_topology(samples.topology([["X"]], [])))
    ] == ["one GPU"]


def test_links() -> None:
    read = read_links(samples.links(*8 * [H100_LINKS]))
    assert len(read) == 8 and link_rate(read) == pytest.approx(478.1, abs=0.1)
    (fine,) = link_findings(read)
    assert (fine.status, fine.found) == (
        "ok",
        "18 links a GPU, 478 GB/s in one direction",
    )
    broken = read_links(samples.links(H100_LINKS, [*H100_LINKS[:17], "<inactive>"]))
    assert link_rate(broken) == pytest.approx(451.6, abs=0.1)
    (warned,) = link_findings(broken)
    assert (
        warned.status == "warn"
        and "GPU 1: 17" in warned.found
        and "nvlink -e" in warned.fix
    )
    (none,) = link_findings(
        read_links(samples.links(["<inactive>", "<inactive>"], name="NVIDIA RTX A6000"))
    )
    assert none.status == "note"
    direct = read_topology(
        samples.topology(
            [["X" if a == b else "NV6" for b in range(4)] for a in range(4)], []
        )
    )
    assert pair_rate(direct, read) == pytest.approx(159.4, abs=0.1)
    assert (
        pair_rate(
            read_topology(samples.topology([["X", "SYS"], ["SYS", "X"]], [])), read
        )
        == 0
    )


def test_adapters(tmp_path: Path) -> None:
    ports = read_adapters(samples.write_ports(tmp_path / "fine", mlx5_0=UP, mlx5_1=UP))
    found = named(adapter_findings(ports, "nvidia_peermem 16384 0 - Live 0x0"))
    assert (
        found["adapters"].found == "2 of 2 ports active, 100 GB/s together (InfiniBand)"
    )
    assert {finding.status for finding in found.values()} == {"ok"}
    slow = ("4: ACTIVE", "200 Gb/sec (4X HDR)", "InfiniBand")
    mixed = named(
        adapter_findings(
            read_adapters(
                samples.write_ports(tmp_path / "mixed", mlx5_0=UP, mlx5_1=slow)
            ),
            "",
        )
    )
    assert (
        mixed["adapters"].status == "warn"
        and "mlx5_1:1 200 Gb/s" in mixed["adapters"].found
    )
    assert mixed["GPUDirect RDMA"].status == "note"
    waiting = ("2: INIT", "400 Gb/sec (4X NDR)", "InfiniBand")
    init = named(
        adapter_findings(
            read_adapters(samples.write_ports(tmp_path / "init", mlx5_0=waiting)), ""
        )
    )
    assert (
        init["adapters"].status == "warn" and "subnet manager" in init["adapters"].fix
    )
    down = ("1: DOWN", "10 Gb/sec (4X SDR)", "Ethernet")
    dead = named(
        adapter_findings(
            read_adapters(samples.write_ports(tmp_path / "down", mlx5_0=down)), ""
        )
    )
    assert dead["adapters"].status == "fail"
    assert list(adapter_findings(read_adapters(tmp_path / "none"), "")) == []


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    (absent,) = hardware()
    assert absent.status == "fail" and "docker run --gpus all" in absent.fix

    def broken(*arguments: str) -> str:
        said = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n"
        raise subprocess.CalledProcessError(
            18, ["nvidia-smi"], output=said.splitlines()[0], stderr=""
        )

    monkeypatch.setattr(module.shutil, "which", lambda name: name)
    monkeypatch.setattr(module, "ask", broken)
    (mismatch,) = hardware()
    assert "version mismatch" in mismatch.found and "reboot" in mismatch.fix


def test_all_sections_of_a_machine_of_eight(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = {
        "-q": samples.query(*8 * [{}]),
        "topo": samples.switched(),
        "nvlink": samples.links(*8 * [H100_LINKS]),
    }
    monkeypatch.setattr(module.shutil, "which", lambda name: name)
    monkeypatch.setattr(module, "ask", lambda first, *rest: answers[first])
    monkeypatch.setattr(
        module,
        "INFINIBAND",
        samples.write_ports(tmp_path, **{f"mlx5_{n}": UP for n in range(8)}),
    )
    found = list(hardware())
    assert {finding.status for finding in found} <= {"ok", "note"}
    assert {"driver", "NVLink", "GPU to GPU", "GPU to network", "adapters"} <= {
        finding.name for finding in found
    }


def test_rates_of_two_ranks(launch: Launcher) -> None:
    """The real measurement, over gloo."""
    ended = launch.ranks(2, "tests.monitoring.doctor.ranks:rates")
    assert ended.codes == [0, 0], ended.text
    finding = json.loads(ended.output[0].splitlines()[-1])
    assert finding.get("status") != "fail" and finding["found"].startswith(
        "all-reduce of 2 ranks: "
    ), finding
    assert "GB/s bus bandwidth\npairs: " in finding["found"]
    assert measure_rates(1.0).status == "note", (
        "without GPUs there is nothing between them"
    )


def test_rates_against_the_links() -> None:
    even = [[0.0, 380.0], [390.0, 0.0]]
    fine = judge(430.0, even, 478.0, 478.0)
    assert "status" not in fine and "90 % of NVLink's 478 GB/s" in fine["found"]
    for slow in (
        judge(200.0, even, 478.0, 478.0),
        judge(430.0, [[0.0, 22.0], [390.0, 0.0]], 478.0, 478.0),
    ):
        assert slow["status"] == "warn" and "NCCL_DEBUG=INFO" in slow["fix"]
    assert "22.0 (0 to 1)" in judge(40.0, [[0.0, 22.0], [24.0, 0.0]], 0.0, 0.0)["found"]
    assert "status" not in judge(40.0, [[0.0, 22.0], [24.0, 0.0]], 0.0, 0.0), (
        "over PCIe there is nothing to expect"
    )
    assert judge(40.0, [[0.0, 10.0], [24.0, 0.0]], 0.0, 0.0)["status"] == "warn"
