"""Interface of transports for control messages: sockets (`zmq_transport`), and a simulation in tests/controller.

Every transport keeps the order of messages between the controller and one rank, in both
directions. Between two ranks there is no order. A connection that breaks stays broken:
the rank is lost, and the run ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megaverl.controller.messages import ToRank


@dataclass(frozen=True)
class Received:
    """Message from a rank."""

    rank: int
    message: bytes


@dataclass(frozen=True)
class Lost:
    """Connection to a rank that broke: its process ended, or its node is not reachable."""

    rank: int
    reason: str


class ControllerTransport(Protocol):
    """Controller's end. Used from the thread of one asyncio event loop."""

    def send(self, ranks: Sequence[int], message: bytes) -> None:
        """Send one message to several ranks, without blocking. A rank that is lost is skipped; `receive` reports it."""

    async def receive(self) -> Received | Lost:
        """Wait for the next message or loss."""


class RankTransport(Protocol):
    """One rank's end."""

    def send(self, message: bytes) -> None:
        """Send a message to the controller, without blocking."""

    async def receive(self) -> ToRank:
        """Wait for the next message but `Where`, which is answered elsewhere.

        Raises:
            ControllerLost: the connection to the controller broke.
        """
