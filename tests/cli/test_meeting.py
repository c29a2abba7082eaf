"""Agents of several nodes meet before any rank starts: on threads, with real stores."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from megaverl.cli import meeting
from megaverl.cli.meeting import meet
from megaverl.errors import TrainingStopped


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE", 1.0)
    monkeypatch.setattr(meeting, "_EVERY", 0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def together(nodes: list[int], count: int, patience: float = 20.0) -> list[object]:
    """What each of these agents is told, or its store."""
    port = free_port()

    def one(node: int) -> object:
        try:
            return meet("127.0.0.1", port, node, count, patience)
        except TrainingStopped as error:
            return str(error)

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(one, nodes))


def test_all_come() -> None:
    assert not any(isinstance(told, str) for told in together([2, 0, 1], 3))


def test_a_node_that_does_not_come_is_named_on_all_others() -> None:
    (told,) = set(together([0, 2], 4, patience=0.5))
    assert str(told).startswith("nodes 1,3 of 4 did not come within 0.5 s (JOIN_MINUTES). Here: process ")


def test_a_first_node_that_does_not_come() -> None:
    (told,) = together([1], 2, patience=0.3)
    assert "node 0 did not come within 0.3 s" in str(told) and "Connection refused" in str(told)


def test_a_number_that_two_nodes_have() -> None:
    """Two jobs at one address: whoever has not begun hears of it, and ends."""
    (told,) = set(together([0, 1, 1], 3))
    assert "node 1 is there 2 times: process " in str(told) and "end one of them" in str(told)


def test_a_job_that_has_begun_goes_on() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(lambda node: meet("127.0.0.1", port, node, 2, 20.0), [0, 1]))
    with pytest.raises(TrainingStopped, match="node 1 is there 2 times"):
        meet("127.0.0.1", port, 1, 2, 20.0)
    assert len(stores) == 2


def test_a_port_that_something_else_has() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        with pytest.raises(TrainingStopped, match=f"port {port} of this node is taken: another job or program uses it"):
            meet("127.0.0.1", port, 0, 2, 1.0)
