"""Control messages over TCP sockets of ZeroMQ, encrypted and authenticated with CURVE.

    rank's main thread          rank's side thread            controller's event loop
    receive()  <-- queue <----  DEALER  <----- TCP -------->  ROUTER
    send()     --> PAIR  ---->     | answers Where            | probes every connection
                                   | monitor: connection      | twice a second
                                   | broke

A rank's side thread owns its socket, so a rank answers `Where` while its main thread is
in a long call. The ROUTER is asked to refuse messages to peers that are gone
(ROUTER_MANDATORY), so an empty probe notices a closed connection within half a second.
ZeroMQ's own heartbeats run in its I/O thread, without Python's interpreter lock: a rank
that holds the lock for a minute is not taken for lost, and a node that has lost its
power is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from megaverl.controller.failures import ControllerLost
from megaverl.controller.messages import (
    End,
    Failed,
    ToRank,
    Where,
    decode_for_rank,
    encode,
)
from megaverl.controller.status_board import StatusBoard
from megaverl.controller.transport import Lost, Received
from megaverl.distributed.curve_sockets import (
    LINGER,
    RANK_BYTES,
    Address,
    OneKey,
    bind_router,
    connect_dealer,
    pack_ranks,
    unpack_ranks,
)
from megaverl.distributed.heartbeat import Heartbeat
from megaverl.errors import FAILED, TrainingStopped

PROBE_INTERVAL = 0.5  # seconds between two probes of all connections
_CONNECTION_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
HELLO = b"hello"
_CLOSE = b"close"


class ZmqController:
    """Controller's end: one ROUTER socket for all ranks. Use it from one event loop.

    Args:
        host: address of the interface that ranks reach this one at.
        num_ranks: ranks of the job; they are named by their numbers.

    Example:
        transport = ZmqController("10.0.0.1", num_ranks=16)
        store.set("controller", transport.address.encode())
        await transport.join(timeout=600)
        controller = Controller(transport, num_ranks=16)
    """

    def __init__(self, host: str, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Its thread answers handshakes while the program computes.
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        client_keys = zmq.curve_keypair()
        self._authenticator.configure_curve_callback(
            domain="*", credentials_provider=OneKey(client_keys[0])
        )
        self._socket = self._context.socket(zmq.ROUTER)
        self.address = bind_router(self._socket, host, client_keys)
        self._events: asyncio.Queue[Received | Lost] = asyncio.Queue()
        # By rank that has joined: the peer that its messages go to.
        self._routes: dict[int, bytes] = {}
        self._lost: set[int] = set()
        self._all_joined = asyncio.Event()
        self._is_reading_soon = False
        self._probing: asyncio.Task[None] | None = None

    async def join(self, timeout: float) -> None:
        """Wait until every rank has connected.

        Raises:
            TrainingStopped: some did not in time; the message names them.
        """
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        self._read_soon()
        try:
            await asyncio.wait_for(self._all_joined.wait(), timeout)
        except TimeoutError as error:
            absent = sorted(set(range(self.num_ranks)) - self._routes.keys())
            shown = ", ".join(map(str, absent[:8])) + (
                f" and {len(absent) - 8} more" if len(absent) > 8 else ""
            )
            raise TrainingStopped(
                f"ranks {shown} did not connect to the controller within {timeout:g} s."
            ) from error
        # Probing starts only now: an empty message to a rank that has not joined yet
        # would count as a loss.
        self._probing = asyncio.ensure_future(self._probe())

    def send(self, ranks: Sequence[int], message: bytes) -> None:
        """Send one message to several ranks, without blocking. A relay receives it once for all of its ranks."""
        by_peer: dict[bytes, list[int]] = {}
        for rank in ranks:
            if rank not in self._lost and rank in self._routes:
                by_peer.setdefault(self._routes[rank], []).append(rank)
        for peer, relayed in by_peer.items():
            frames = (
                [peer, message]
                if len(peer) == RANK_BYTES
                else [peer, pack_ranks(relayed), message]
            )
            try:
                self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                # The first rank of a node is the host of its relay, so it is noted
                # first as the cause.
                self._note_lost(
                    sorted(
                        rank for rank, route in self._routes.items() if route == peer
                    )
                )
        self._read_soon()

    async def receive(self) -> Received | Lost:
        """Wait for the next message or loss."""
        return await self._events.get()

    async def close(self) -> None:
        """Close the socket; messages on their way are delivered for up to two seconds."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(self._socket)
        self._authenticator.stop()
        self._socket.close()
        # Waits for the linger time of sockets at most.
        await asyncio.to_thread(self._context.term)

    def _note_lost(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in self._lost:
                self._lost.add(rank)
                self._events.put_nowait(
                    Lost(rank, "its process ended, or its node is not reachable")
                )

    def _read_soon(self) -> None:
        """Read in the loop's next turn: the socket's descriptor wakes up the loop only once for what arrives.

        A send takes such an event as well.
        """
        if not self._is_reading_soon:
            self._is_reading_soon = True
            asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        """Take all messages that have arrived."""
        self._is_reading_soon = False
        while not self._socket.closed:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(peer) == RANK_BYTES and len(frames) == 1:
                self._take(peer, unpack_ranks(peer)[0], frames[0])
            elif len(peer) != RANK_BYTES and len(frames) == 2:
                for rank in unpack_ranks(frames[0]):
                    self._take(peer, rank, frames[1])

    def _take(self, peer: bytes, rank: int, message: bytes) -> None:
        if message == HELLO:
            if rank < self.num_ranks:
                self._routes[rank] = peer
            if len(self._routes) == self.num_ranks:
                self._all_joined.set()
        elif not message:  # a relay's word that a rank behind it is lost
            self._note_lost([rank])
        else:
            self._events.put_nowait(Received(rank, message))

    async def _probe(self) -> None:
        """Send an empty message to every rank now and then; the socket refuses one whose connection is closed."""
        while True:
            await asyncio.sleep(PROBE_INTERVAL)
            self.send(range(self.num_ranks), b"")


class ZmqRank:
    """One rank's end: a DEALER socket that a side thread owns. Use it from the rank's main thread.

    Args:
        board: answers `Where`.
        coordinator: name of the controller's rank in messages.
        leave_after: seconds in which the main thread must have said `stay` once the run has failed; then the process
            ends, because a collective that waits for a lost rank cannot be interrupted.
        lost_after: seconds without a message after which the controller counts as lost; None: only a broken connection
            does.
        launcher: process id of the launcher that started this rank. Once it has ended, the run fails, because nobody
            would end a rank that hangs. None: nobody is missed.
        end_process: ends the process; it is given the reason. Default: prints it first.
        context: shared by several ranks of one process, as in a benchmark; default: one of its own.

    Attributes:
        reason: why the run fails; None: nothing is known to have failed.

    Example:
        with ZmqRank(Address.decode(store.get("controller")), rank, board) as transport:
            served = run_blocking(serve(rank, transport, workers, mover, board))
    """

    def __init__(
        self,
        address: Address,
        rank: int,
        board: StatusBoard,
        *,
        coordinator: str = "the controller's rank",
        leave_after: float = 10.0,
        lost_after: float | None = None,
        launcher: int | None = None,
        end_process: Callable[[str], None] | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.rank = rank
        self.reason: str | None = None
        self._board = board
        self._coordinator = coordinator
        self._leave_after, self._lost_after = leave_after, lost_after
        self._launcher = launcher
        self._end_process = end_process or self._print_and_end
        # None marks a broken connection. The side thread fills it while the main thread
        # is inside a collective, where it cannot poll a socket.
        self._inbox: queue.SimpleQueue[ToRank | None] = queue.SimpleQueue()
        self._greeted, self._found = threading.Event(), threading.Event()
        # When the process ends; None: the run has not failed, or the main thread stays.
        self._leave_at: float | None = None
        self._is_connected = self._is_lost = False
        # When the last message came, and what the coordinator's rank did then.
        self._heard_at = time.monotonic()
        self._beat: Heartbeat | None = None
        self._owns_context = context is None
        self._context = zmq.Context() if context is None else context
        # ZeroMQ sockets belong to one thread. The main thread therefore hands its
        # messages to the side thread through an in-process pair.
        self._to_side = self._context.socket(zmq.PAIR)
        self._to_side.linger = LINGER
        self._side_endpoint = f"inproc://rank{rank}"
        self._to_side.bind(self._side_endpoint)
        self._thread = threading.Thread(
            target=self._run, args=(address,), name="megaverl-controller", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> ZmqRank:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def send(self, message: bytes) -> None:
        """Send a message to the controller, without blocking."""
        self._to_side.send(message)

    async def receive(self) -> ToRank:
        """Block until the next message but `Where` is here. Nothing is awaited: `serving.run_blocking` drives it."""
        message = self._inbox.get()
        if message is None:
            self._inbox.put(None)  # for a further call
            raise ControllerLost(self.reason)
        return message

    def wait_for_greeting(self, seconds: float) -> None:
        """Wait until the first message of the controller is here, which it sends once all ranks have connected.

        Raises:
            ControllerLost: it is lost, or it sends none within `seconds`.
        """
        if not self._greeted.wait(seconds):
            raise ControllerLost(
                f"rank {self.rank}: {self._coordinator} was not heard of within {seconds:g} s."
            )
        if self.reason is not None:
            raise ControllerLost(self.reason)

    def wait_for_reason(self, seconds: float) -> str | None:
        """Wait up to `seconds` until it is known why the run fails, and return it."""
        self._found.wait(seconds)
        return self.reason

    def stay(self) -> None:
        """Note that the main thread has left its call, so that the process ends by itself."""
        self._leave_at = None

    def close(self) -> None:
        """End the side thread once everything has been sent."""
        self._to_side.send(_CLOSE)
        self._thread.join()
        self._to_side.close()
        if self._owns_context:
            self._context.term()

    def _run(self, address: Address) -> None:
        """Own the socket: pass on messages both ways, answer `Where`, notice a broken connection."""
        context = self._context
        from_main = context.socket(zmq.PAIR)
        from_main.connect(self._side_endpoint)
        socket = context.socket(zmq.DEALER)
        monitor = socket.get_monitor_socket(_CONNECTION_EVENTS)
        connect_dealer(socket, address, pack_ranks([self.rank]))
        socket.send(HELLO)
        poller = zmq.Poller()
        for source in (from_main, socket, monitor):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._poll_milliseconds()))
            if from_main in ready:
                message = from_main.recv()
                if message == _CLOSE:
                    break
                # A socket without a peer would block.
                if not self._is_lost:
                    socket.send(message)
            if socket in ready:
                self._heard_at = time.monotonic()
                self._take(socket.recv(), socket)
            if monitor in ready and self._is_broken(
                recv_monitor_message(monitor)["event"]
            ):
                # A broken connection stays broken: one that came back would hide lost
                # messages.
                socket.disconnect(address.endpoint)
                poller.unregister(monitor)
                self._lose(self._describe_broken_connection())
            elif not ready:
                self._look_at_clock()
            # The controller's probes bring this loop here twice a second.
            if self._launcher is not None and os.getppid() != self._launcher:
                self._report_launcher(self._launcher, socket)
        socket.disable_monitor()
        for source in (monitor, from_main, socket):
            source.close()

    def _is_broken(self, event: int) -> bool:
        """Return whether an event of the connection ends it. Attempts before the first success are repeated."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_connected = True
        return (
            self._is_connected
            and event == zmq.EVENT_DISCONNECTED
            or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )

    def _take(self, message: bytes, socket: zmq.Socket[bytes]) -> None:
        if not message:  # a probe
            return
        decoded = decode_for_rank(message)
        if isinstance(decoded, Where):
            self._beat = decoded.beat
            self._greeted.set()
            with contextlib.suppress(zmq.Again):  # the controller is gone
                socket.send(encode(self._board.answer(decoded.question)), zmq.NOBLOCK)
            return
        # The reason comes first: the main thread reads it once it has the message.
        if isinstance(decoded, End) and decoded.reason:
            self._fail(decoded.reason)
        self._inbox.put(decoded)

    def _look_at_clock(self) -> None:
        """End the process if the main thread should have left, and notice a silent controller.

        Called when no message has come, so that a busy interpreter does not count as
        silence.
        """
        now = time.monotonic()
        if self._leave_at is not None and now > self._leave_at:
            self._leave_at = None
            self._end_process(self.reason or "")
        silent = now - self._heard_at
        if (
            self._lost_after is not None
            and silent > self._lost_after
            and not self._is_lost
        ):
            self._lose(
                f"{self._coordinator} has not been heard of for {silent:.0f} s: "
                f"{self._beat or 'nothing was heard of it'}"
            )

    def _report_launcher(self, launcher: int, socket: zmq.Socket[bytes]) -> None:
        """Tell the controller once that the launcher has ended."""
        self._launcher = None
        if not self._is_lost:
            text = f"rank {self.rank}: its launcher (process {launcher}) is gone"
            socket.send(encode(Failed(text)))

    def _describe_broken_connection(self) -> str:
        if self._beat is not None:
            return f"{self._coordinator} is gone: {self._beat}"
        return (
            f"rank {self.rank}: the connection to the controller broke. Its process ended, or its node is not "
            "reachable; the output of the coordinator's rank says more."
        )

    def _lose(self, reason: str) -> None:
        """Note that the controller is lost."""
        self._is_lost = True
        self._fail(reason)
        self._inbox.put(None)

    def _fail(self, reason: str) -> None:
        """Note why the run fails, unless that is known, and give the main thread some time to leave."""
        if self.reason is None:
            self.reason = reason
            self._leave_at = time.monotonic() + self._leave_after
            self._found.set()
            self._greeted.set()

    def _print_and_end(self, reason: str) -> None:
        text = f"rank {self.rank} leaves a call that does not end: {reason}"
        with contextlib.suppress(Exception):
            print(text, file=sys.stderr, flush=True)
        os._exit(FAILED)

    def _poll_milliseconds(self) -> int | None:
        """Return the time until `_look_at_clock` has something to do."""
        deadlines = [] if self._leave_at is None else [self._leave_at]
        if self._lost_after is not None and not self._is_lost:
            deadlines.append(self._heard_at + self._lost_after)
        if not deadlines:
            return None
        return max(int((min(deadlines) - time.monotonic()) * 1000), 0) + 1
