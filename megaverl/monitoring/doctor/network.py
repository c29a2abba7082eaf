"""Checks of the network: NCCL's and gloo's settings, interfaces, host names and ports."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from megaverl.monitoring.doctor import Finding
from megaverl.monitoring.doctor.nccl_settings import nccl_settings
from megaverl.platform import platform

PREFIXES = (
    "NCCL_",
    "GLOO_",
    "TORCH_NCCL_",
    "CUDA_DEVICE_MAX",
    "MASTER_",
    "UCX_",
    "OMP_NUM",
    "VLLM_HOST",
)
INTERFACE_SETTINGS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
TORCHRUN_PORT = 29500
INFINIBAND = Path("/sys/class/infiniband")
# Number of trial lookups, and seconds from which one is slow.
LOOKUPS, SLOW_LOOKUP = 32, 0.1


def network() -> Iterator[Finding]:
    """Yield findings about everything that decides how ranks find and reach each other."""
    yield _backend()
    interfaces = _interfaces()
    yield Finding(
        "network",
        "interfaces",
        "ok",
        ", ".join(f"{k} {v}" for k, v in interfaces.items()) or "none but lo",
    )
    yield from _settings(set(interfaces) | {"lo"})
    yield _infiniband()
    yield from _names()
    yield _name_service()
    yield from _ports()


def _backend() -> Finding:
    version = _nccl_version()
    if version is not None:
        return Finding(
            "network", "backend", "ok", f"NCCL {'.'.join(map(str, version))}"
        )
    if platform.is_cuda:
        return Finding(
            "network",
            "backend",
            "fail",
            "torch has no NCCL",
            "install a torch that is built with NCCL",
        )
    return Finding("network", "backend", "ok", "gloo")


def _nccl_version() -> tuple[int, ...] | None:
    """Return NCCL's version, or None if torch has none or there is no GPU."""
    if not (platform.is_cuda and torch.distributed.is_nccl_available()):
        return None
    return tuple(torch.cuda.nccl.version())


def _interfaces() -> dict[str, str]:
    """Return name -> IPv4 address of every interface that is up, except the loopback."""
    up = {name for name, facts in psutil.net_if_stats().items() if facts.isup}
    by_name = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if (
                name in up
                and address.family == socket.AF_INET
                and not address.address.startswith("127.")
            ):
                by_name[name] = address.address
    return by_name


def _settings(interfaces: set[str]) -> Iterator[Finding]:
    """Yield the network variables of the environment, and those that cannot work."""
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES)
    }
    yield Finding(
        "network",
        "settings",
        "ok",
        ", ".join(f"{k}={v}" for k, v in variables.items()) or "none: defaults",
    )
    for name in INTERFACE_SETTINGS:
        value = variables.get(name, "")
        wanted = [part for part in value.lstrip("=").split(",") if part]
        # `^` excludes interfaces, and `=` demands the exact name.
        if not wanted or value.startswith("^"):
            continue
        # NCCL accepts prefixes of interface names, gloo only whole names.
        fits = any(
            interface == prefix
            or (name.startswith("NCCL") and interface.startswith(prefix))
            for prefix in wanted
            for interface in interfaces
        )
        if not fits:
            fix = f"set {name} to one of {', '.join(sorted(interfaces))}, or unset it"
            yield Finding(
                "network", name, "fail", f"{value}: no such interface here", fix
            )
    yield from nccl_settings(variables, INFINIBAND, _nccl_version())
    if variables.get("NCCL_P2P_DISABLE") == "1":
        text = "1: GPUs of one node talk through host memory"
        yield Finding(
            "network",
            "NCCL_P2P_DISABLE",
            "warn",
            text,
            "unset it, unless peer access is broken here",
        )


def _infiniband() -> Finding:
    devices = (
        sorted(path.name for path in INFINIBAND.iterdir())
        if INFINIBAND.is_dir()
        else []
    )
    if devices:
        return Finding("network", "InfiniBand/RoCE", "ok", ", ".join(devices))
    return Finding(
        "network",
        "InfiniBand/RoCE",
        "note",
        "none: between nodes everything goes over TCP",
    )


def _names() -> Iterator[Finding]:
    """Check that the names resolve: gloo looks up this machine's own name, and ranks look up MASTER_ADDR."""
    host = socket.gethostname()
    for source, name in (
        ("host name", host),
        ("MASTER_ADDR", os.environ.get("MASTER_ADDR", "")),
    ):
        if not name:
            continue
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            fix = "add the name to /etc/hosts, or set MASTER_ADDR to the first node's address"
            if source == "host name":
                fix = (
                    "add the name to /etc/hosts, or name an interface with "
                    "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME)"
                )
            yield Finding(
                "network",
                source,
                "fail" if source == "MASTER_ADDR" else "warn",
                f"{name}: {error}",
                fix,
            )
        else:
            yield Finding("network", source, "ok", f"{name} is {address}")


def _name_service() -> Finding:
    """Measure how long a reverse lookup of an address takes.

    For every connection to its store, torch looks up the peer's name, one after the
    other. It asks for an IPv6 form of the address (torch 2.13, c10d/socket.cpp), which
    hosts files do not contain.
    """
    try:
        address = socket.gethostbyname(
            os.environ.get("MASTER_ADDR") or socket.gethostname()
        )
    except OSError:
        address = "127.0.0.1"
    seconds: list[float] = []
    # One slow lookup is proof enough, and 32 of them could take minutes.
    while len(seconds) < LOOKUPS and max(seconds, default=0.0) < SLOW_LOOKUP:
        began = time.perf_counter()
        # An address without a name costs the same time, and is no problem by itself.
        with suppress(OSError):
            socket.getnameinfo((f"::ffff:{address}", 0, 0, 0), 0)
        seconds.append(time.perf_counter() - began)
    text = (
        f"{1e3 * statistics.median(seconds):.1f} ms for the name of an address, {1e3 * max(seconds):.0f} "
        "ms the longest"
    )
    if max(seconds) < SLOW_LOOKUP:
        return Finding("network", "name service", "ok", text)
    text += ": each connection to the job's store waits for one, and 1,000 ranks wait for each other's"
    fix = (
        f"a line '::ffff:{address} NAME' in /etc/hosts for this and every other node's address, or a cache (nscd, "
        "systemd-resolved); RES_OPTIONS='timeout:1 attempts:5' asks again sooner where an answer is lost"
    )
    return Finding("network", "name service", "warn", text, fix)


def _ports() -> Iterator[Finding]:
    port = (
        int(os.environ["MASTER_PORT"])
        if os.environ.get("MASTER_PORT", "").isdigit()
        else TORCHRUN_PORT
    )
    name = f"port {port}"
    if is_free(port):
        yield Finding("network", name, "ok", "free")
    else:
        fix = "another job may use it: give torchrun another --master-port (or end that job)"
        yield Finding("network", name, "warn", "in use", fix)
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    # The range is that of Linux by default, where the file does not exist.
    low, high = map(int, path.read_text().split()) if path.exists() else (32768, 60999)
    if high - low < 4096:
        text = f"{low} to {high}: ranks and engines open many"
        fix = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
        yield Finding("network", "ports for connections", "warn", text, fix)
    else:
        yield Finding("network", "ports for connections", "ok", f"{low} to {high}")


def is_free(port: int) -> bool:
    """Return whether a server could listen on the port."""
    with socket.socket() as probe:
        # A port whose connections have just been closed counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
