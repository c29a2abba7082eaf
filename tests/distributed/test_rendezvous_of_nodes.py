"""Agents of several nodes meet before any rank starts: on threads, with real stores."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from megaverl.distributed import rendezvous
from megaverl.distributed import store as first_store
from megaverl.distributed.rendezvous import meet
from megaverl.errors import TrainingStopped
from tests.launcher import free_port


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "NODE_GRACE", 1.0)
    monkeypatch.setattr(first_store, "EVERY", 0.01)


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
    assert str(told).startswith(
        "nodes 1,3 of 4 did not come within 0.5 s (JOIN_MINUTES). Here: process "
    )


def test_a_first_node_that_does_not_come() -> None:
    (told,) = together([1], 2, patience=0.3)
    assert "node 0 did not come within 0.3 s" in str(
        told
    ) and "Connection refused" in str(told)


def test_a_number_that_two_nodes_have() -> None:
    """Two jobs at one address: whoever has not begun hears of it, and ends."""
    (told,) = set(together([0, 1, 1], 3))
    assert "node 1 is there 2 times: process " in str(
        told
    ) and "end one of them" in str(told)


def test_a_job_that_has_begun_goes_on() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        stores = list(
            pool.map(lambda node: meet("127.0.0.1", port, node, 2, 20.0), [0, 1])
        )
    with pytest.raises(TrainingStopped, match="node 1 is there 2 times"):
        meet("127.0.0.1", port, 1, 2, 20.0)
    assert len(stores) == 2


def test_a_port_that_something_else_has() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        with pytest.raises(
            TrainingStopped,
            match=f"port {port} of this node is taken: another job or program uses it",
        ):
            meet("127.0.0.1", port, 0, 2, 1.0)


def silent(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):  # who has heard enough may leave
        connection.recv(1000)
    threading.Event().wait()


def closing(connection: socket.socket) -> None:
    connection.close()


def a_web_server(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
    connection.close()


def a_shell(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH\r\n")
    silent(connection)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (silent, "takes connections and says nothing"),
        (closing, "takes connections and closes them"),
        (a_web_server, "answers 'HTTP/1.0 400 Bad Request'"),
        (a_shell, "answers 'SSH-2.0-OpenSSH'"),
    ],
)
def test_the_other_nodes_end_at_once_where_another_program_answers(
    answer: Callable[[socket.socket], None], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for JOIN_MINUTES, and with a silent one for ever: this test would hang."""
    monkeypatch.setattr(first_store, "GREETING", 0.4)
    monkeypatch.setattr(first_store, "_CONNECT", 1.0)

    def serve(listening: socket.socket) -> None:
        while True:
            threading.Thread(
                target=answer, args=(listening.accept()[0],), daemon=True
            ).start()

    taken = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(taken,), daemon=True).start()
    port = taken.getsockname()[1]
    with pytest.raises(
        TrainingStopped,
        match=rf"127.0.0.1:{port} \(MASTER_ADDR, MASTER_PORT\) is not a job's store: another program {named}",
    ):
        meet("127.0.0.1", port, 1, 2, 600.0)


def test_the_other_nodes_end_at_once_where_a_store_of_another_kind_of_job_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "STRANGER", 0.3)
    port = free_port()
    kept = first_store.keep_store("127.0.0.1", port, timedelta(seconds=5))
    with pytest.raises(
        TrainingStopped,
        match=f"127.0.0.1:{port} .* is the store of another program of torch",
    ):
        meet("127.0.0.1", port, 1, 2, 600.0)
    del kept


def test_a_node_of_a_job_of_another_size() -> None:
    """The first node ends as well, unless its job has begun."""
    port = free_port()

    def one(count: int) -> str:
        with pytest.raises(TrainingStopped) as told:
            meet("127.0.0.1", port, 0 if count == 3 else 3, count, 600.0)
        return str(told.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, [3, 4])
    assert first == second
    assert (
        f"node 0 at 127.0.0.1:{port} (process " in first
        and "that of a job of 3 nodes, and node 3 (process " in first
    )


def test_a_late_first_node_is_waited_for_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, told = free_port(), threading.Event()
    words: list[str] = []
    monkeypatch.setattr(first_store, "_FIRST_WORD", 0.0)
    monkeypatch.setattr(
        rendezvous, "_tell", lambda what, end: (words.append(what), told.set())
    )
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(meet, "127.0.0.1", port, 1, 2, 600.0)
        assert told.wait(20.0)
        first = pool.submit(meet, "127.0.0.1", port, 0, 2, 600.0)
        assert first.result() and other.result()
    assert (
        words[0].startswith(f"node 0 at 127.0.0.1:{port} (") and "refused" in words[0]
    )
