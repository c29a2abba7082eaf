"""Point-to-point messages between the hosts of any two ranks of a job, over connections that are opened on first use.

A sender never blocks. A thread of the receiver reads incoming messages, keeps them
until `receive` asks for them, and then acknowledges them; a message counts as sent once
it is acknowledged. A gloo group with lazy connections would block the first send to a
rank until that rank receives.

    sender                              receiver
    send() -> Future     --message-->   thread reads and keeps it
                                        receive() returns it
    Future is done       <-number----   and acknowledges it

Control messages go over ZeroMQ with CURVE (`controller`). Rows do not: it took as much
code here, and several times as long for messages of 4 MB.

A connection carries messages in one direction and acknowledgements in the other. A rank
that waits for another one opens a connection as well, without sending anything: it
breaks immediately when the other process ends. Beyond `MOST_IDLE`, unused connections
are closed, so the number of sockets does not grow with the number of ranks ever
contacted.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import select
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.distributed.store import family_of, own_address

# Number of unused connections that stay open: the most recently used ones.
MOST_IDLE = 64
_TOKEN = 16  # bytes of the token that a connection begins with
_HELLO = struct.Struct(f"<{_TOKEN}sI")  # the receiver's token, the sender's rank
_HEAD = struct.Struct("<QI")  # number of a message, bytes of its name and sizes
_NUMBER = struct.Struct("<Q")
_SMALL = 65536  # bytes up to which a message is sent in one piece
_HELLO_SECONDS = 300.0  # timeout for the first bytes of an incoming connection
_RETRY_SECONDS = 0.05
_LAST_WORDS = 5.0  # seconds to read what a rank sent before it ended

_Outbox = asyncio.Queue[Sequence[bytes | memoryview]]


class _Message(NamedTuple):
    """Message that has arrived, and its connection.

    Attributes:
        parts: [n] uint8 each.
        number: number that acknowledges it.
        link: socket of the connection.
        write_lock: lock for writes to the socket.
    """

    parts: list[Tensor]
    number: int
    link: socket.socket
    write_lock: threading.Lock

    def say_taken(self) -> None:
        """Acknowledge the message at once, because this process may end next."""
        data, ready = _NUMBER.pack(self.number), select.poll()
        # A rank that is gone needs no acknowledgement.
        with suppress(OSError, ValueError), self.write_lock:
            ready.register(self.link, select.POLLOUT)
            while data:
                ready.poll()
                data = data[self.link.send(data) :]


@dataclass(eq=False)
class _Connection:
    """Outgoing connection to another rank.

    Attributes:
        outbox: chunks that the event loop has to send.
        under_way: number -> future of messages that are not acknowledged yet.
        waiting: number of threads that wait for a message from that rank.
        queued: number of messages in the outbox.
        link: socket, once it is connected.
        task: task of the event loop that serves the connection.
    """

    outbox: _Outbox = field(default_factory=asyncio.Queue)
    under_way: dict[int, Future[None]] = field(default_factory=dict)
    waiting: int = 0
    queued: int = 0
    link: socket.socket | None = None
    task: asyncio.Task[None] | None = None


class HostMessages:
    """This rank's messages to and from the other ranks of its job. Each rank creates one, without a collective.

    Args:
        store: the job's store, in which each rank publishes its address and the token that a connection must begin
            with.
        rank: this rank in the job.
        size: number of ranks of the job.

    Example:
        messages = HostMessages(store, rank, size)
        if rank == 0:
            messages.send(1, "samples", [tensor]).result()  # returns when rank 1 has received it
        if rank == 1:
            (data,) = messages.receive(0, "samples", timedelta(seconds=60))
        messages.close()
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank = rank
        # Guards all attributes below, except those of the loop's thread.
        self._changed = threading.Condition()
        self._arrived: defaultdict[tuple[int, str], deque[_Message]] = defaultdict(
            deque
        )
        # By rank, in the order of last use.
        self._connections: dict[int, _Connection] = {}
        self._gone: dict[int, str] = {}
        self._addresses: dict[int, list[str]] = {}
        self._number = 0
        self._reading: defaultdict[int, set[asyncio.Task[Any]]] = defaultdict(set)
        self._token = secrets.token_bytes(_TOKEN)
        self._thread: threading.Thread | None = None
        if size > 1:
            # A counter in the key keeps ranks that reuse a store from reading outdated
            # addresses.
            times = store.add(f"messages/{rank}", 1)
            self._store = dist.PrefixStore(f"messages/{times}", store)
            self._open()

    def find(self, rank: int) -> list[str]:
        """Return host, port and token of a rank. The store is read only once, because its host may be lost later.

        Raises:
            RuntimeError: the rank did not publish them within the store's timeout.
        """
        if rank not in self._addresses:
            self._addresses[rank] = self._store.get(str(rank)).decode().split()
        return self._addresses[rank]

    def send(
        self, dest: int, name: str, parts: Sequence[Tensor | bytes]
    ) -> Future[None]:
        """Begin to send bytes or host tensors as one message. The future is done when the receiver has taken it.

        Raises:
            RuntimeError: the store does not have the address of that rank.
        """
        self.find(dest)
        sent: Future[None] = Future()
        data = [part if isinstance(part, bytes) else _bytes_of(part) for part in parts]
        head = json.dumps([name, [len(part) for part in data]]).encode()
        with self._changed:
            if dest in self._gone:
                sent.set_exception(ConnectionError(self._gone[dest]))
                return sent
            self._number += 1
            chunks: list[bytes | memoryview] = [
                _HEAD.pack(self._number, len(head)) + head,
                *data,
            ]
            if sum(map(len, chunks)) <= _SMALL:
                chunks = [b"".join(chunks)]
            connection = self._to(dest)
            connection.under_way[self._number] = sent
            if left := _sent_at_once(connection, chunks):
                connection.queued += 1
                self._loop.call_soon_threadsafe(connection.outbox.put_nowait, left)
        return sent

    def receive(self, source: int, name: str, timeout: timedelta) -> list[Tensor]:
        """Wait for the next message of this name from `source`, and return its parts, [n] uint8 each.

        Raises:
            OSError: the process of that rank has ended, or it did not send in time.
            RuntimeError: the store does not have the address of that rank.
        """
        self.find(source)
        with self._changed:
            arrived = self._arrived[source, name]
            if not arrived and source not in self._gone:
                connection = self._to(source)
                connection.waiting += 1
                self._changed.wait_for(
                    lambda: arrived or source in self._gone, timeout.total_seconds()
                )
                connection.waiting -= 1
            if not arrived:
                raise (
                    ConnectionError(self._gone[source])
                    if source in self._gone
                    else TimeoutError("timed out")
                )
            message = arrived.popleft()
            if not arrived:
                del self._arrived[source, name]
        message.say_taken()
        return message.parts

    def close(self) -> None:
        """Close all connections. Ranks that wait for this one get an error."""
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join()

    def _open(self) -> None:
        address = own_address()
        listening = socket.create_server(
            (address, 0), family=family_of(address), backlog=4096
        )
        listening.setblocking(False)
        self._loop = asyncio.SelectorEventLoop()
        self._serving = self._loop.create_task(self._serve(listening))
        self._thread = threading.Thread(target=self._run, name="messages", daemon=True)
        self._thread.start()
        self._store.set(
            str(self.rank),
            f"{address} {listening.getsockname()[1]} {self._token.hex()}",
        )

    def _to(self, rank: int) -> _Connection:
        """Return the connection to a rank, opening one if needed, and close idle ones."""
        connection = self._connections.pop(rank, None)
        if connection is None:
            connection = _Connection()
            self._loop.call_soon_threadsafe(self._begin, rank, connection)
        self._connections[rank] = connection
        for peer, idle in list(self._connections.items())[:-MOST_IDLE]:
            if not idle.under_way and not idle.waiting:
                del self._connections[peer]
                self._loop.call_soon_threadsafe(self._end, idle)
        return connection

    # All methods below run in the event loop's thread.

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        self._loop.close()

    async def _serve(self, listening: socket.socket) -> None:
        with listening:
            async with asyncio.TaskGroup() as self._tasks:
                while True:
                    try:
                        link, _ = await self._loop.sock_accept(listening)
                    # The peer has already left, or the process is out of file
                    # descriptors. Try again later.
                    except OSError:
                        await asyncio.sleep(_RETRY_SECONDS)
                        continue
                    self._tasks.create_task(self._read(link))

    def _begin(self, rank: int, connection: _Connection) -> None:
        connection.task = self._tasks.create_task(self._speak(rank, connection))

    def _end(self, connection: _Connection) -> None:
        if connection.task is not None:
            connection.task.cancel()

    async def _speak(self, rank: int, connection: _Connection) -> None:
        """Send what is queued for a rank until the connection is closed. If it breaks, mark that rank as gone."""
        host, port, token = self._addresses[rank]
        try:
            with socket.socket(family_of(host)) as link:
                link.setblocking(False)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await self._loop.sock_connect(link, (host, int(port)))
                await self._loop.sock_sendall(
                    link, _HELLO.pack(bytes.fromhex(token), self.rank)
                )
                with self._changed:
                    connection.link = link
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._write(link, connection))
                    both.create_task(self._note_taken(link, connection))
        except* OSError as errors:
            reason = f"Connection closed by peer {host}:{port} ({errors.exceptions[0]})".removesuffix(
                " ()"
            )
            if reading := self._reading.get(rank):
                await asyncio.wait(reading, timeout=_LAST_WORDS)
            with self._changed:
                self._gone[rank] = reason
                self._connections.pop(rank, None)
                self._changed.notify_all()
            for sent in connection.under_way.values():
                sent.set_exception(ConnectionError(reason))

    async def _note_taken(self, link: socket.socket, connection: _Connection) -> None:
        while True:
            (number,) = _NUMBER.unpack(await self._exactly(link, _NUMBER.size))
            with self._changed:
                sent = connection.under_way.pop(number)
            sent.set_result(None)

    async def _read(self, link: socket.socket) -> None:
        """Receive messages on an incoming connection until the sender closes it."""
        with suppress(OSError), link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(_HELLO_SECONDS):
                token, source = _HELLO.unpack(await self._exactly(link, _HELLO.size))
            if not secrets.compare_digest(token, self._token):
                return
            task, lock = asyncio.current_task(), threading.Lock()
            assert task is not None
            self._reading[source].add(task)
            try:
                while True:
                    number, size = _HEAD.unpack(await self._exactly(link, _HEAD.size))
                    name, sizes = json.loads(await self._exactly(link, size))
                    parts = [torch.empty(size, dtype=torch.uint8) for size in sizes]
                    for part in parts:
                        await self._fill(link, part.numpy().data)
                    with self._changed:
                        self._arrived[source, name].append(
                            _Message(parts, number, link, lock)
                        )
                        self._changed.notify_all()
            finally:
                self._reading[source].discard(task)

    async def _exactly(self, link: socket.socket, count: int) -> bytearray:
        data = bytearray(count)
        await self._fill(link, memoryview(data))
        return data

    async def _fill(self, link: socket.socket, data: memoryview) -> None:
        while data:
            if not (count := await self._loop.sock_recv_into(link, data)):
                raise ConnectionError
            if data := data[count:]:
                # Let other connections proceed during a large message.
                await asyncio.sleep(0)

    async def _write(self, link: socket.socket, connection: _Connection) -> None:
        while True:
            for data in await connection.outbox.get():
                await self._loop.sock_sendall(link, data)
            with self._changed:
                connection.queued -= 1


def _sent_at_once(
    connection: _Connection, chunks: Sequence[bytes | memoryview]
) -> Sequence[bytes | memoryview]:
    """Send a small message directly if nothing is queued before it, and return what is left to send.

    This saves the event loop's thread a wake-up.
    """
    if connection.link is None or connection.queued or len(chunks) > 1:
        return chunks
    # The loop notices the error, and reports it to all waiting threads.
    with suppress(OSError):
        chunks = (
            [left] if (left := chunks[0][connection.link.send(chunks[0]) :]) else []
        )
    return chunks


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data
