"""Where the job's store listens: it lets everybody in who reaches it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import pytest

from megaverl.distributed.store import keep_store, own_address
from megaverl.errors import TrainingStopped

TIMEOUT = timedelta(seconds=10)
ELSEWHERE = "192.0.2.1"  # nobody's: TEST-NET-1 of RFC 5737


def addresses(port: int) -> list[str]:
    """At which this process takes connections."""
    found = psutil.Process(os.getpid()).net_connections("tcp")
    return [
        each.laddr.ip
        for each in found
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    ]


def others() -> list[str]:
    """IPv4 addresses of this machine beside the loopback's."""
    every = [each for interface in psutil.net_if_addrs().values() for each in interface]
    return [
        each.address
        for each in every
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.1.1", *others()[:1]])
def test_a_store_listens_where_its_host_is(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = keep_store(host, 0, TIMEOUT)
    expected = ("127.0.0.1", "::1") if host == "localhost" else (host,)
    [found] = addresses(store.port)
    assert found in expected
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_host_that_is_no_address_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that is translated on its way leads here: the named interface is taken, or
    all, which is said. A name that means the loopback here means another address on
    other nodes, and this one's own ranks look there.
    """
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = keep_store(ELSEWHERE, 0, TIMEOUT)
    assert addresses(store.port) == ["127.0.0.1"] and capfd.readouterr().err == ""
    for host, interface in ((ELSEWHERE, ""), ("127.1", "lo")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
        store = keep_store(host, 0, TIMEOUT)
        assert addresses(store.port) in (["::"], ["0.0.0.0"])
        assert (
            f"warning: {host} (MASTER_ADDR) is no address of this node"
            in capfd.readouterr().err
        )


@pytest.mark.parametrize(
    ("interface", "host", "expected"),
    [
        ("lo", "10.255.255.1", "127.0.0.1"),
        ("", "127.0.0.1", "127.0.0.1"),
        ("", "localhost", "127.0.0.1"),
        *(("nosuch0", host, host) for host in others()[:1]),
    ],
)
def test_where_other_ranks_reach_this_one(
    interface: str, host: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setenv("MASTER_ADDR", host)
    assert own_address() == expected


def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(
        TrainingStopped,
        match=r"port 0 of this node cannot be opened for nowhere\.invalid",
    ):
        keep_store("nowhere.invalid", 0, TIMEOUT)
