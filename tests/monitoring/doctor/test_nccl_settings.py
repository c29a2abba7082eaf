"""NCCL's settings that articles recommend, and the GID tables of RoCE ports, from folders as the kernel writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from megaverl.monitoring.doctor.nccl_settings import best_gid, nccl_settings, read_gids

LINK_LOCAL = "fe80:0000:0000:0000:a288:c2ff:fe3b:506a"
MAPPED = "0000:0000:0000:0000:0000:ffff:0ac8:010a"
GLOBAL = "2010:0200:0000:0002:a288:c2ff:fe3b:506a"
UNUSED = "0000:0000:0000:0000:0000:0000:0000:0000"
# The table of a ConnectX port with an IPv4 and an IPv6 address, as show_gids prints it;
# then an unused entry.
TABLE = [
    (LINK_LOCAL, "IB/RoCE v1"),
    (LINK_LOCAL, "RoCE v2"),
    (MAPPED, "IB/RoCE v1"),
    (MAPPED, "RoCE v2"),
    (GLOBAL, "IB/RoCE v1"),
    (GLOBAL, "RoCE v2"),
    (UNUSED, None),
]


def write_port(
    folder: Path,
    name: str,
    table: list[tuple[str, str | None]],
    layer: str = "Ethernet",
) -> Path:
    """Write a port as /sys/class/infiniband has it. Reading the version of an unused entry fails, as in the kernel."""
    port = folder / name / "ports" / "1"
    for part in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / part).mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text(f"{layer}\n")
    for index, (address, version) in enumerate(table):
        (port / "gids" / str(index)).write_text(f"{address}\n")
        if version is not None:
            (port / "gid_attrs" / "types" / str(index)).write_text(f"{version}\n")
            (port / "gid_attrs" / "ndevs" / str(index)).write_text("ens1f0np0\n")
    return port


def found(
    variables: Mapping[str, str],
    folder: Path,
    version: tuple[int, ...] | None = (2, 29, 7),
) -> list[tuple[str, str]]:
    findings = list(nccl_settings(variables, folder, version))
    assert all(
        finding.fix for finding in findings if finding.status in ("warn", "fail")
    )
    return [
        (finding.status, f"{finding.name}: {finding.found} {finding.fix}")
        for finding in findings
    ]


def test_a_table_is_read_and_the_entry_of_version_2_over_ipv4_is_best(
    tmp_path: Path,
) -> None:
    gids = read_gids(write_port(tmp_path, "mlx5_0", TABLE))
    assert [(gid.number, gid.version, gid.is_routable) for gid in gids] == [
        (0, 1, False),
        (1, 2, False),
        (2, 1, False),
        (3, 2, True),
        (4, 1, False),
        (5, 2, True),
    ]
    best = best_gid(gids)
    assert best is not None and str(best) == "3 (10.200.1.10, v2, ens1f0np0)"
    assert best_gid([gid for gid in gids if gid.number not in (2, 3)]) == gids[5], (
        "IPv6 if there is no IPv4"
    )
    assert best_gid(gids[:3]) is None


def test_the_order_of_a_long_table_is_by_number(tmp_path: Path) -> None:
    table = [(LINK_LOCAL, "IB/RoCE v1")] * 10 + [(MAPPED, "RoCE v2")]
    assert [
        gid.number for gid in read_gids(write_port(tmp_path, "mlx5_0", table))
    ] == list(range(11))


@pytest.mark.parametrize(
    ("written", "version", "status", "text"),
    [
        (
            "",
            (2, 29, 7),
            "ok",
            "RoCE addresses: mlx5_0:1: entry 3 (10.200.1.10, v2, ens1f0np0), which NCCL chooses",
        ),
        ("-1", (2, 21, 5), "ok", "which NCCL chooses itself"),
        (
            "",
            (2, 18, 3),
            "warn",
            "NCCL 2.18.3 takes entry 0: on mlx5_0:1 that is entry 0 (fe80::",
        ),
        ("", (2, 18, 3), "warn", "set NCCL_IB_GID_INDEX=3"),
        ("3", (2, 29, 7), "ok", "NCCL_IB_GID_INDEX=3: on mlx5_0:1 that is entry 3"),
        ("5", (2, 29, 7), "ok", "entry 5 (2010:200:0:2:a288:c2ff:fe3b:506a, v2"),
        ("2", (2, 29, 7), "warn", "RoCE v1 is not routable unset NCCL_IB_GID_INDEX"),
        (
            "1",
            (2, 18, 3),
            "warn",
            "a link-local address is not routable set NCCL_IB_GID_INDEX=3",
        ),
        ("9", (2, 29, 7), "fail", "which mlx5_0:1 does not have; it has 0 (fe80::"),
        (
            "three",
            None,
            "fail",
            "NCCL_IB_GID_INDEX=three, which mlx5_0:1 does not have",
        ),
    ],
)
def test_the_index(
    tmp_path: Path,
    written: str,
    version: tuple[int, ...] | None,
    status: str,
    text: str,
) -> None:
    write_port(tmp_path, "mlx5_0", TABLE)
    [(given, line)] = found(
        {"NCCL_IB_GID_INDEX": written} if written else {}, tmp_path, version
    )
    assert given == status and text in line


def test_ports_with_tables_of_different_order(tmp_path: Path) -> None:
    """An index that is right for one port is wrong for the other."""
    write_port(tmp_path, "mlx5_0", TABLE)
    write_port(tmp_path, "mlx5_1", [TABLE[0], TABLE[3]])
    first, second = found({"NCCL_IB_GID_INDEX": "3"}, tmp_path)
    assert (
        first[0] == "ok"
        and second[0] == "fail"
        and "mlx5_1:1 does not have" in second[1]
    )


def test_a_port_without_a_routable_address(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", TABLE[:2])
    [(status, line)] = found({}, tmp_path)
    assert status == "warn" and "give ens1f0np0 an IPv4 address" in line


def test_infiniband_has_no_index_to_choose(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", TABLE[:1], layer="InfiniBand")
    assert found({}, tmp_path) == []
    [(status, line)] = found({"NCCL_IB_GID_INDEX": "3"}, tmp_path)
    assert status == "note" and "only RoCE reads it" in line


def test_variables_of_articles(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert found({}, absent) == []
    [(status, line)] = found({"NCCL_ASYNC_ERROR_HANDLING": "1"}, absent)
    assert (
        status == "note"
        and "torch calls it TORCH_NCCL_ASYNC_ERROR_HANDLING since 2.2" in line
    )
    [(status, line)] = found({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, absent)
    assert status == "warn" and "never ends the process" in line
    [(status, line)] = found({"NCCL_SOCKET_TIMEOUT": "600"}, absent)
    assert (
        status == "warn"
        and "no such variable" in line
        and "run.timeout_minutes" in line
    )
    assert found({"NCCL_IB_DISABLE": "1"}, absent)[0][0] == "note"
    write_port(tmp_path, "mlx5_0", TABLE)
    assert found({"NCCL_IB_DISABLE": "1"}, tmp_path)[0][0] == "warn"
