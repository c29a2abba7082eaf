"""Checks of NCCL's settings that articles recommend: which still exist, and which value fits this machine.

RoCE, RDMA over Ethernet, addresses its peers by entries of a table of GIDs. Each entry
has a version of RoCE and the address of an interface:

    index  GID                                      version  meaning
    0      fe80::a288:c2ff:fe3b:506a                v1       link-local, not routable
    1      fe80::a288:c2ff:fe3b:506a                v2       link-local, not routed between subnets
    2      ::ffff:10.200.1.10                       v1       Ethernet frames, not routable
    3      ::ffff:10.200.1.10                       v2       UDP over IPv4: the one to use

Since NCCL 2.21 NCCL_IB_GID_INDEX is -1 by default, and NCCL chooses an entry of RoCE v2
in the family of its sockets (NCCL_IB_ROCE_VERSION_NUM, NCCL_IB_ADDR_FAMILY; NCCL
2.31.2, src/transport/net_ib/connect.cc). Older ones take entry 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path

from megaverl.monitoring.doctor.findings import Finding

SECTION = "network"
INDEX = "NCCL_IB_GID_INDEX"
# First version of NCCL that chooses the entry of the GID table itself.
CHOOSES_ITSELF = (2, 21)


@dataclass(frozen=True)
class Gid:
    """Entry of a port's GID table.

    Attributes:
        version: version of RoCE, 1 or 2.
        interface: name of the network interface that has the address, or "".
    """

    number: int
    address: IPv6Address
    version: int
    interface: str

    @property
    def is_routable(self) -> bool:
        """True for an address of RoCE v2 that routers forward."""
        return self.version == 2 and not self.address.is_link_local

    def __str__(self) -> str:
        address = self.address.ipv4_mapped or self.address
        return f"{self.number} ({address}, v{self.version}{', ' + self.interface if self.interface else ''})"


def read_gids(port: Path) -> list[Gid]:
    """Return the used entries of the GID table in a port's folder, /sys/class/infiniband/DEVICE/ports/N."""
    gids = []
    for file in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
        # The kernel refuses to read the version and the interface of unused entries.
        with suppress(OSError, ValueError):
            address = IPv6Address(file.read_text().strip())
            kind = (port / "gid_attrs" / "types" / file.name).read_text().strip()
            if not address.is_unspecified:
                interface = _text(port / "gid_attrs" / "ndevs" / file.name)
                gids.append(
                    Gid(
                        int(file.name),
                        address,
                        2 if kind == "RoCE v2" else 1,
                        interface,
                    )
                )
    return gids


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def best_gid(gids: list[Gid]) -> Gid | None:
    """Return the entry to use: RoCE v2 with an IPv4 address, or else another routable one. None: there is neither."""
    routable = [gid for gid in gids if gid.is_routable]
    over_ipv4 = [gid for gid in routable if gid.address.ipv4_mapped is not None]
    return next(iter([*over_ipv4, *routable]), None)


def nccl_settings(
    variables: Mapping[str, str],
    adapters: Path,
    nccl_version: tuple[int, ...] | None = None,
) -> Iterator[Finding]:
    """Yield findings about variables that articles recommend, and about the GID tables of RoCE ports.

    Args:
        variables: variables of the environment.
        adapters: /sys/class/infiniband.
        nccl_version: version of NCCL, None if there is none.
    """
    yield from _renamed(variables)
    has_adapters = adapters.is_dir() and any(adapters.iterdir())
    if variables.get("NCCL_IB_DISABLE") == "1":
        if has_adapters:
            text = "1, although there is an InfiniBand device: nodes talk over TCP, many times slower"
            yield Finding(
                SECTION, "NCCL_IB_DISABLE", "warn", text, "unset NCCL_IB_DISABLE"
            )
        else:
            text = "1 has no effect: there is no InfiniBand or RoCE device"
            yield Finding(SECTION, "NCCL_IB_DISABLE", "note", text)
    yield from _gid_findings(variables, adapters, nccl_version)


def _renamed(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Yield variables that have another name today, or never existed."""
    old = "NCCL_ASYNC_ERROR_HANDLING"
    new = f"TORCH_{old}"
    for name in (old, new):
        if name not in variables:
            continue
        value = variables[name]
        renamed = f"; torch calls it {new} since 2.2" if name == old else ""
        if value == "0":
            text = f"0: a failed or hanging collective never ends the process{renamed}"
            fix = f"unset {name}: by default such a process ends, and the run names the rank that is missing"
            yield Finding(SECTION, name, "warn", text, fix)
        else:
            yield Finding(
                SECTION,
                name,
                "note",
                f"{value}: not needed, errors end the process by default{renamed}",
            )
    for name in ("NCCL_SOCKET_TIMEOUT", "NCCL_TIMEOUT"):
        if name in variables:
            text = f"{variables[name]}: NCCL has no such variable, so it has no effect"
            fix = "unset it. run.timeout_minutes limits how long ranks wait; NCCL_IB_TIMEOUT is of InfiniBand's packets"
            yield Finding(SECTION, name, "warn", text, fix)


def _gid_findings(
    variables: Mapping[str, str], adapters: Path, nccl_version: tuple[int, ...] | None
) -> Iterator[Finding]:
    """Yield findings about the GID tables of active RoCE ports, and about NCCL_IB_GID_INDEX."""
    ports = [
        port
        for port in sorted(adapters.glob("*/ports/*"))
        if "ACTIVE" in _text(port / "state")
    ]
    tables = {
        f"{port.parts[-3]}:{port.name}": read_gids(port)
        for port in ports
        if _text(port / "link_layer") == "Ethernet"
    }
    written = variables.get(INDEX, "")
    if not tables:
        if written:
            yield Finding(
                SECTION,
                INDEX,
                "note",
                f"{written}: only RoCE reads it, and no RoCE port is active here",
            )
        return
    for port, gids in tables.items():
        best = best_gid(gids)
        if best is None:
            shown = ", ".join(map(str, gids)) or "none"
            text = f"{port} has no routable RoCE v2 address: {shown}"
            fix = f"give {_interface(gids)} an IPv4 address; the kernel then adds an entry of v2"
            yield Finding(SECTION, "RoCE addresses", "warn", text, fix)
            continue
        yield _index_finding(port, gids, best, written, nccl_version)


def _interface(gids: list[Gid]) -> str:
    return next(
        (gid.interface for gid in gids if gid.interface), "the port's network interface"
    )


def _index_finding(
    port: str,
    gids: list[Gid],
    best: Gid,
    written: str,
    nccl_version: tuple[int, ...] | None,
) -> Finding:
    """Return the finding about the entry that NCCL uses on one port."""
    chooses = nccl_version is None or nccl_version >= CHOOSES_ITSELF
    if written in ("", "-1"):
        if chooses:
            return Finding(
                SECTION,
                "RoCE addresses",
                "ok",
                f"{port}: entry {best}, which NCCL chooses itself",
            )
        number = 0
        origin = f"NCCL {'.'.join(map(str, nccl_version or ()))} takes entry 0"
        fix = f"set {INDEX}={best.number}"
    else:
        number = int(written) if written.isdecimal() else -1
        origin = f"{INDEX}={written}"
        fix = f"unset {INDEX}" if chooses else f"set {INDEX}={best.number}"
    used = next((gid for gid in gids if gid.number == number), None)
    if used is None:
        shown = ", ".join(map(str, gids))
        return Finding(
            SECTION,
            INDEX,
            "fail",
            f"{origin}, which {port} does not have; it has {shown}",
            fix,
        )
    if not used.is_routable:
        reason = (
            "RoCE v1 is not routable"
            if used.version == 1
            else "a link-local address is not routable"
        )
        return Finding(
            SECTION,
            INDEX,
            "warn",
            f"{origin}: on {port} that is entry {used}, and {reason}",
            fix,
        )
    return Finding(SECTION, INDEX, "ok", f"{origin}: on {port} that is entry {used}")
