"""Relay of a node: the ranks of the node connect to it, and it alone connects to the controller.

    controller --- one connection a node ---> relay ---> rank 8
               (ranks 8..15, message)               ---> rank 9
                                                    ---> ...

With 1,024 ranks on 128 nodes the controller has 128 connections in the place of 1,024,
and sends a call 128 times. The controller's probes pass through the relay, which
reports a rank that is gone with an empty message.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from megaverl.controller.messages import End, encode
from megaverl.controller.zmq_transport import HELLO
from megaverl.distributed.curve_sockets import (
    RANK_BYTES,
    Address,
    OneKey,
    bind_router,
    connect_dealer,
    pack_ranks,
    unpack_ranks,
)
from megaverl.distributed.placement import ResolvedPlacement
from megaverl.distributed.store import own_address

# Number of ranks from which each node has a relay. The controller then has one
# connection per node instead of one per rank. Below it, direct connections take less
# time (`tools/bench_controller.py`).
RELAYED_FROM = 128
POLL_MILLISECONDS = 100  # until the thread looks whether it is to end
# Seconds after the loss of the controller until a relay that ends gives up on ranks that
# are still connected. Each of them has been told to leave by then.
LEAVE_SECONDS = 2.0
_NO_CONTROLLER = "the connection of the node's relay to the controller broke"


class Relay:
    """Thread that passes messages between the controller and the ranks of a node.

    Args:
        upstream: the controller's address.
        host: address that the node's ranks reach the relay at.
        node: number of the node, for the relay's name as a peer.
        ranks: ranks of the node.

    Example:
        with Relay(controller_address, "127.0.0.1", node=1, ranks=range(8, 16)) as relay:
            store.set("controller/node1", relay.address.encode())
    """

    def __init__(
        self, upstream: Address, host: str, node: int, ranks: Sequence[int]
    ) -> None:
        self._upstream = upstream
        self._node = node
        self._present = set(ranks)
        self._joined: set[int] = set()
        self._is_closing = threading.Event()
        # When the thread gives up on ranks that do not disconnect.
        self._give_up_at = math.inf
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        client_keys = (upstream.public_key, upstream.secret_key)
        self._authenticator.configure_curve_callback(
            domain="*", credentials_provider=OneKey(client_keys[0])
        )
        self._down = self._context.socket(zmq.ROUTER)
        self.address = bind_router(self._down, host, client_keys)
        self._thread = threading.Thread(
            target=self._run, name="megaverl-relay", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread once the node's ranks have disconnected.

        A rank may still run the program's last call after the relay's own rank has left.
        Without the relay it would lose the controller, and end itself inside that call.
        The controller waits for it as well, and gives up after `CallTimeouts`. Once the
        controller has left, the relay waits for at most `LEAVE_SECONDS`.
        """
        self._is_closing.set()
        self._thread.join()
        self._authenticator.stop()
        self._context.term()

    def _run(self) -> None:
        down, up = self._down, self._context.socket(zmq.DEALER)
        monitor = up.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        connect_dealer(up, self._upstream, b"relay" + pack_ranks([self._node]))
        poller = zmq.Poller()
        for source in (down, up, monitor):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(POLL_MILLISECONDS))
            if not ready and self._is_closing.is_set():
                # A probe: drops ranks that have disconnected.
                self._pass_down(sorted(self._joined), b"", up)
                if not self._joined or time.monotonic() > self._give_up_at:
                    break
            if down in ready:
                self._pass_up(down.recv_multipart(), up)
            if up in ready:
                ranks, message = up.recv_multipart()
                self._pass_down(unpack_ranks(ranks), message, up)
            if monitor in ready:
                recv_monitor_message(monitor)
                poller.unregister(monitor)
                self._give_up_at = time.monotonic() + LEAVE_SECONDS
                # The ranks learn it as the end of a failed run; a rank that stays in a
                # call ends itself.
                self._pass_down(sorted(self._joined), encode(End(_NO_CONTROLLER)), up)
        up.disable_monitor()
        for socket in (monitor, up, down):
            socket.close()

    def _pass_up(self, frames: list[bytes], up: zmq.Socket[bytes]) -> None:
        if len(frames) != 2 or len(frames[0]) != RANK_BYTES:
            return
        identity, message = frames
        rank = unpack_ranks(identity)[0]
        if rank not in self._present:
            return
        if message == HELLO:
            self._joined.add(rank)
        up.send_multipart([identity, message])

    def _pass_down(
        self, ranks: Sequence[int], message: bytes, up: zmq.Socket[bytes]
    ) -> None:
        for rank in ranks:
            if rank not in self._present:
                continue
            try:
                self._down.send_multipart(
                    [pack_ranks([rank]), message], flags=zmq.NOBLOCK
                )
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self._present.discard(rank)
                self._joined.discard(rank)
                # An empty message: the rank is lost. A controller that has left does not
                # take it, and the relay would wait for that when it ends.
                if self._give_up_at == math.inf:
                    up.send_multipart([pack_ranks([rank]), b""])


@contextmanager
def node_address(
    controller: Address,
    placement: ResolvedPlacement,
    rank: int,
    merge: Callable[[dict[str, str]], dict[str, str]],
) -> Iterator[Address]:
    """Yield the address that a rank connects to: the controller's, or that of its node's relay in a large job.

    The first rank of each node hosts the relay until the context ends. Collective over
    all ranks of the job.

    Args:
        rank: this rank in the job.
        merge: merges the dictionaries of all ranks, and returns the result on every rank. Collective.
    """
    if placement.size < RELAYED_FROM or len(placement.nodes) == 1:
        yield controller
        return
    node = placement.node_of(rank)
    node_ranks = [
        member for member in range(placement.size) if placement.node_of(member) == node
    ]
    relay = (
        Relay(controller, own_address(), node, node_ranks)
        if rank == node_ranks[0]
        else None
    )
    try:
        of_this_rank = (
            {} if relay is None else {str(node): relay.address.encode().hex()}
        )
        # Collective: the relays listen before any rank learns their address.
        addresses = merge(of_this_rank)
        yield Address.decode(bytes.fromhex(addresses[str(node)]))
    finally:
        if relay is not None:
            relay.close()
