"""Messages from host to host; ranks are ends in this process, over real connections."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megaverl.distributed import messages
from megaverl.distributed.messages import HostMessages

SOON, NEVER = timedelta(seconds=30), timedelta(seconds=0.05)
Ends = Callable[[], list[HostMessages]]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """Makes those of four ranks that meet in one store."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, made = dist.HashStore(), list[HostMessages]()

    def make() -> list[HostMessages]:
        made.extend(HostMessages(store, rank, 4) for rank in range(4))
        return made[-4:]

    yield make
    for each in made:
        each.close()


def test_what_is_sent_comes_whole_and_in_order_under_its_name(ends: Ends) -> None:
    first, second, *_ = ends()
    first.send(1, "opens", [])
    assert second.receive(0, "opens", SOON) == []
    # Not in one piece, nor contiguous.
    large = torch.arange(10**6, dtype=torch.float32).reshape(1000, 1000).t()
    sent = [
        first.send(1, "rows", [b"head", large]),
        first.send(1, "rows", [b"", torch.tensor(True)]),
    ]
    sent += [
        first.send(1, "other", [torch.tensor([0.5], dtype=torch.bfloat16)]),
        second.send(0, "rows", []),
    ]
    assert second.receive(0, "other", SOON)[0].view(torch.bfloat16).tolist() == [0.5]
    assert not any(one.done() for one in sent[:2]), "it has left when it is taken"
    head, rows = second.receive(0, "rows", SOON)
    assert head.numpy().tobytes() == b"head" and torch.equal(
        rows.view(torch.float32).reshape(1000, 1000), large
    )
    assert [part.tolist() for part in second.receive(0, "rows", SOON)] == [[], [1]]
    assert (
        first.receive(1, "rows", SOON) == []
        and [one.result(30) for one in sent] == [None] * 4
    )
    with pytest.raises(TimeoutError):
        second.receive(0, "rows", NEVER)


def test_connections_that_nobody_uses_are_closed(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MOST_IDLE", 1)
    first, *others = ends()
    kept = first.send(3, "kept", [b"0"])  # not taken for now: its connection is in use
    for number in range(20):
        sent = first.send(1 + number % 2, "turns", [bytes([number])])
        assert others[number % 2].receive(0, "turns", SOON)[0].tolist() == [number]
        sent.result(30)
        assert len(first._connections) <= 2
    assert (
        others[2].receive(0, "kept", SOON)[0].tolist() == [48]
        and kept.result(30) is None
    )


@pytest.mark.parametrize("says", ["another token", "nothing"])
def test_a_stranger_is_not_listened_to(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    if says == "nothing":
        monkeypatch.setattr(messages, "_HELLO_SECONDS", 0.05)
    host, port, token = ends()[0].find(1)
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        if says == "another token":
            stranger.sendall(messages._HELLO.pack(bytes.fromhex(token)[::-1], 0))
        assert stranger.recv(1) == b"", "the other end closes"


def test_a_connection_that_is_broken_before_it_is_taken_ends_nothing(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, broken = asyncio.SelectorEventLoop.sock_accept, list[int]()

    async def breaks(
        loop: asyncio.SelectorEventLoop, listening: socket.socket
    ) -> tuple[socket.socket, object]:
        if len(broken) < 4:
            broken.append(listening.fileno())
            raise ConnectionAbortedError
        return await accept(loop, listening)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", breaks)
    first, second, *_ = ends()
    first.send(1, "rows", [b"0"])
    assert second.receive(0, "rows", SOON)[0].tolist() == [48] and len(broken) == 4


def test_who_ends_is_missed_at_once(ends: Ends) -> None:
    """By who waits for a message, and by who waits until one is taken; what came before is there."""
    first, second, third, _ = ends()
    taken, heard = first.send(1, "rows", [b"0"]), Future[str]()
    second.send(2, "last words", [torch.zeros(10**6)])
    second.send(2, "end", [])
    third.receive(1, "end", SOON)
    waiting = threading.Thread(
        target=lambda: heard.set_result(str(_error_of(third, 1)))
    )
    waiting.start()
    second.close()
    with pytest.raises(ConnectionError, match="Connection closed by peer 127.0.0.1"):
        taken.result(30)
    assert "Connection closed by peer" in heard.result(30)
    assert third.receive(1, "last words", SOON)[0].numel() == 4 * 10**6
    with pytest.raises(ConnectionError, match="closed by peer"):
        first.send(1, "rows", [b"0"]).result(30)


def test_ranks_that_meet_again_find_each_other_as_they_are_now() -> None:
    store = dist.HashStore()
    store.set_timeout(NEVER)
    before = [HostMessages(store, rank, 2) for rank in range(2)]
    assert before[0].find(1) == before[1].find(1)
    now = HostMessages(store, 0, 2)
    with pytest.raises(RuntimeError):
        now.find(1)  # it has not come yet
    other = HostMessages(store, 1, 2)
    assert now.find(1) == other.find(1) != before[0].find(1)
    for each in (*before, now, other):
        each.close()


def _error_of(end: HostMessages, source: int) -> OSError | None:
    try:
        end.receive(source, "rows", SOON)
    except OSError as error:
        return error
    return None
