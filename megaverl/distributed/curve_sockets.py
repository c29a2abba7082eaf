"""Sockets of ZeroMQ between the ranks of a job, encrypted and authenticated with CURVE.

A server makes a key pair of its own and one for all of its peers, and hands both public
keys and the peers' secret key to the ranks over the job's store. A peer without them
cannot connect.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

HEARTBEAT_INTERVAL = 2_000  # milliseconds between ZeroMQ's heartbeats
# Milliseconds without an answer after which a connection counts as broken.
HEARTBEAT_TIMEOUT = 30_000
# Milliseconds for messages that are on their way when a socket is closed.
LINGER = 2_000
# Bytes of a rank number in an identity and in a message.
RANK_BYTES = 4


class Address(msgspec.Struct, frozen=True):
    """Endpoint and keys that a peer needs to connect. The job's store hands them to the ranks.

    Attributes:
        endpoint: such as "tcp://10.0.0.1:41234".
        server_key: public key of the server. public_key, secret_key: the peers' key pair.
    """

    endpoint: str
    server_key: bytes
    public_key: bytes
    secret_key: bytes

    def encode(self) -> bytes:
        """Return the address as bytes for the store."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """Return what `encode` was called on."""
        return msgspec.msgpack.decode(data, type=cls)


class OneKey:
    """Credentials provider of ZeroMQ's authenticator that admits one public key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a peer with this key may connect."""
        return key == self._key


def bind_router(socket: Any, host: str, client_keys: tuple[bytes, bytes]) -> Address:
    """Make a ROUTER socket a server for peers with these keys; return what peers need to connect."""
    server_key, server_secret = zmq.curve_keypair()
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = server_key, server_secret
    # Refuse a message to a peer that is gone, so that its loss is noticed.
    socket.router_mandatory = True
    socket.linger = LINGER
    # No limit on the number of messages: senders bound what is on its way.
    socket.sndhwm = socket.rcvhwm = 0
    set_heartbeat(socket)
    endpoint_host = f"[{host}]" if ":" in host else host
    socket.ipv6 = ":" in host
    port = socket.bind_to_random_port(f"tcp://{endpoint_host}")
    return Address(f"tcp://{endpoint_host}:{port}", server_key, *client_keys)


def connect_dealer(socket: Any, address: Address, identity: bytes) -> None:
    """Connect a DEALER socket to a ROUTER."""
    socket.identity = identity
    socket.curve_serverkey = address.server_key
    socket.curve_publickey, socket.curve_secretkey = (
        address.public_key,
        address.secret_key,
    )
    socket.linger = LINGER
    socket.sndhwm = socket.rcvhwm = 0
    socket.ipv6 = "[" in address.endpoint
    set_heartbeat(socket)
    socket.connect(address.endpoint)


def pack_ranks(ranks: Iterable[int]) -> bytes:
    """Return rank numbers as bytes."""
    return b"".join(rank.to_bytes(RANK_BYTES, "big") for rank in ranks)


def unpack_ranks(data: bytes) -> list[int]:
    """Return the rank numbers that `pack_ranks` was given."""
    return [
        int.from_bytes(data[i : i + RANK_BYTES], "big")
        for i in range(0, len(data), RANK_BYTES)
    ]


def set_heartbeat(socket: Any) -> None:
    socket.heartbeat_ivl = HEARTBEAT_INTERVAL
    socket.heartbeat_timeout = HEARTBEAT_TIMEOUT
