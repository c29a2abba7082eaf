"""Nodes with networks of their own for forked ranks: a bridge, and from it a cable to each node, that can be cut."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NEW_NETWORK, NEW_NAME = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS
VARIABLE = "MEGAVERL_TEST_NETWORK"


@dataclass(frozen=True)
class Networks:
    """Nodes 0, 1, ... under `prefix`."""

    prefix: str
    count: int

    @property
    def environment(self) -> dict[str, str]:
        """Of the ranks: rank n is on node n, and node 0 keeps the store."""
        return {
            VARIABLE: self.prefix,
            "MASTER_ADDR": address(0),
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def cut(self, node: int) -> None:
        """The cable of a node comes off."""
        _ip("-n", f"{self.prefix}switch", "link", "set", f"to-{node}", "down")


def why_not() -> str:
    """Why there can be none here; empty where there can."""
    if os.geteuid() != 0:
        return "needs root, to make networks"
    if shutil.which("ip") is None:
        return "needs `ip`: install iproute2"
    made = (
        subprocess.run(
            ["ip", "netns", "add", "mvprobe"], capture_output=True, check=False
        ).returncode
        == 0
    )
    subprocess.run(
        ["ip", "netns", "delete", "mvprobe"], capture_output=True, check=False
    )
    return "" if made else "this machine lets nobody make network namespaces"


@contextmanager
def networks(count: int) -> Iterator[Networks]:
    """Made on entering, gone on leaving."""
    made = Networks(f"mvt{os.getpid()}", count)
    switch = f"{made.prefix}switch"
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for node in range(count):
            name = f"{made.prefix}{node}"
            _ip("netns", "add", name)
            _ip(
                "-n",
                switch,
                "link",
                "add",
                f"to-{node}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            _ip("-n", switch, "link", "set", f"to-{node}", "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{address(node)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", name, "link", "set", device, "up")
        yield made
    finally:
        for name in (*(f"{made.prefix}{node}" for node in range(count)), switch):
            subprocess.run(
                ["ip", "netns", "delete", name], capture_output=True, check=False
            )


def enter(prefix: str, node: int) -> None:
    """Put this process on a node: its network, and a name of its own."""
    system = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(Path("/var/run/netns", f"{prefix}{node}"), os.O_RDONLY)
    if system.setns(descriptor, NEW_NETWORK) or system.unshare(NEW_NAME):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(descriptor)
    name = f"node-{node}".encode()
    system.sethostname(name, len(name))


def address(node: int) -> str:
    return f"10.78.0.{10 + node}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
