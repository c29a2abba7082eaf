"""Weights that go from the actor's ranks to vLLM's servers shard to shard, all servers at once: the calling side.

The rank that talks to the servers announces each delivery to the actor's ranks and
calls all servers meanwhile:

    this rank                      actor's ranks                       servers' workers
    announce delivery N  ------->  open the link, send their shards
    POST /collective_rpc ------------------------------------------->  open the link, receive their shards
    wait for all         <-------  done N
                         <-------------------------------------------  bytes, or an error

All of them form one group (`weights/server_link.py`), which is kept while the servers
stay the same. A server that fails ends the group for all; the others are served again
without it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch.distributed as dist

from megaverl.distributed.store import address_towards, keep_store
from megaverl.errors import MegaverlError, ReshardError, RolloutError
from megaverl.rollout.server_api import (
    InferenceServer,
    ServerLost,
    VLLMShardServer,
    is_loopback,
)
from megaverl.weights.reshard import RankTotals
from megaverl.weights.server_link import LinkAddress, report_failure
from megaverl.weights.transports import DeltaMode

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02
GRACE_SECONDS = 30.0  # beyond a link's own limit, for a rank that reports a failure


class Announcement(NamedTuple):
    """Description of a delivery for the actor's ranks.

    Attributes:
        live: send the actor's own tensors, on its main thread; otherwise the copies in host memory, beside it.
    """

    link: dict[str, Any]
    live: bool


class DeliveryBoard:
    """Announcements of deliveries, and the senders' answers, in the job's store.

    Args:
        store: of the actor's and the rollout's ranks. A connection of its own is made, since other threads of the
            process use theirs.
        name: unique among the runs of this job.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        # A connection of its own: the store's client blocks, and several threads ask at
        # once.
        self._store = dist.PrefixStore(f"servers/{name}", store.clone())  # type: ignore[attr-defined]  # it has the method

    def announce(self, number: int, announcement: Announcement) -> None:
        """Announce a delivery to the senders. Numbers count from 0."""
        self._store.set(f"delivery/{number}", json.dumps(announcement))

    def announced(self, number: int) -> Announcement | None:
        """Return a delivery's announcement, or None if there is none yet."""
        key = f"delivery/{number}"
        return (
            Announcement(*json.loads(self._store.get(key)))
            if self._store.check([key])
            else None
        )

    def done(self, number: int, error: str | None = None) -> None:
        """Report that a sender has done its part, or why it could not."""
        if error is not None:
            # The first error is kept. Later ones are mostly its consequences.
            self._store.compare_set(f"error/{number}", "", error)
        self._store.add(f"done/{number}", 1)

    def outcome(self, number: int, num_senders: int, seconds: float) -> str | None:
        """Wait for all senders; return the first error.

        Raises:
            ReshardError: a sender has not answered.
        """
        end = time.monotonic() + seconds
        # `add(..., 0)` reads the count without waiting for the key, as `get` would.
        while (count := self._store.add(f"done/{number}", 0)) < num_senders:
            if time.monotonic() > end:
                raise ReshardError(
                    f"{num_senders - count} of the actor's {num_senders} ranks have not sent their weights to the "
                    f"servers within {seconds:g} s (rollout.servers.load_timeout_seconds)."
                )
            time.sleep(POLL_SECONDS)
        return (
            self._store.get(f"error/{number}").decode()
            if self._store.check([f"error/{number}"])
            else None
        )

    def finish(self, version: str) -> None:
        """Report that all servers have a version, or that it has failed."""
        self._store.set(f"finished/{version}", "")

    def is_finished(self, version: str) -> bool:
        """Return whether `finish` was called."""
        return bool(self._store.check([f"finished/{version}"]))


class ShardTransfer:
    """Brings the actor's weights to several servers at once. Used by the rank that talks to the servers.

    Args:
        board: tells the actor's ranks.
        num_senders: the actor's ranks.
        live_backend: backend of deliveries of the actor's own tensors.
        seconds: limit of every wait.
        delta: `reshard.delta`, for deliveries of the actor's own tensors.

    Attributes:
        bytes_received: bytes that all workers have received in all deliveries.
        last: numbers of the last delivery of the actor's own tensors, over all ranks.
    """

    def __init__(
        self,
        board: DeliveryBoard,
        num_senders: int,
        live_backend: str,
        seconds: float,
        delta: DeltaMode = "off",
    ) -> None:
        self._board, self._num_senders, self._live_backend, self._seconds = (
            board,
            num_senders,
            live_backend,
            seconds,
        )
        self._number = 0
        self._link: LinkAddress | None = None
        self._link_is_live = False
        self._urls: list[str] = []
        self._store: dist.Store | None = None  # of the link
        self._delta: DeltaMode = delta
        self.bytes_received = 0
        self.last = RankTotals()

    def deliver(
        self, servers: Sequence[InferenceServer], *, live: bool
    ) -> dict[str, RolloutError]:
        """Bring the weights to all servers; return the errors of those that did not take them, by URL.

        Args:
            live: the actor's ranks wait for this delivery, and send their own tensors. False: their copies.

        Raises:
            ReshardError: the actor's ranks could not send their own tensors.
        """
        failures: dict[str, RolloutError] = {}
        left = [server for server in servers if isinstance(server, VLLMShardServer)]
        assert len(left) == len(servers), "all servers of a run are of one kind"
        while left:
            try:
                errors = self._attempt(left, live=live)
            except (MegaverlError, dist.DistError) as error:
                # A server that comes late is no reason to end the run: it is tried
                # again.
                if live:
                    raise
                errors = {
                    server.url: ServerLost(f"{server.url}: {error}") for server in left
                }
            if not errors:
                break
            failures |= errors
            left = [server for server in left if server.url not in errors]
        return failures | _in_threads(lambda server: server.forget_cached(), left)

    def _attempt(
        self, servers: Sequence[VLLMShardServer], *, live: bool
    ) -> dict[str, RolloutError]:
        """Deliver to these servers; return the errors of the servers at fault. Without any, all servers have it all."""
        start = time.perf_counter()
        address = self._address(servers, live=live)
        # Numbers advance even if the attempt fails, because the senders count
        # announcements, too.
        number, self._number = self._number, self._number + 1
        self._board.announce(number, Announcement(address.to_json(), live))
        # Ranks of the link: the actor's ranks first, then each server's workers in the
        # order of the servers.
        first_ranks, first = {}, self._num_senders
        for server in servers:
            first_ranks[server.url] = first
            first += server.num_workers

        answers: dict[str, list[dict[str, Any]]] = {}

        def call(server: VLLMShardServer) -> None:
            try:
                answers[server.url] = server.receive(
                    address.to_json(), first_ranks[server.url]
                )
            except RolloutError as error:
                # The others may be waiting for this server in the link's store.
                assert self._store is not None
                report_failure(self._store, str(error))
                raise

        # All servers are called at once, since all of them take part in one group.
        lost = _in_threads(call, servers)
        # After the servers have answered, so that an error of a server is known first.
        sender_error = self._board.outcome(
            number, self._num_senders, self._seconds + GRACE_SECONDS
        )
        failed, at_fault = _failures_in(answers)
        errors = lost | failed
        if not errors and sender_error is None:
            received = sum(
                int(worker["bytes"]) for answer in answers.values() for worker in answer
            )
            self.bytes_received += received
            if live:
                worker = next(iter(answers.values()))[0]
                self.last = RankTotals(
                    int(worker.get("busiest_sent", 0)),
                    int(worker.get("busiest_whole", 0)),
                    worker.get("changed_fraction"),
                )
            logger.info(
                "weights went shard to shard to %d servers: %d bytes in %.3f s (%s)",
                len(servers),
                received,
                time.perf_counter() - start,
                ", ".join(server.url for server in servers),
            )
            return {}
        # A group that lost a member cannot be used again. The next attempt opens a new
        # one.
        self._link = None
        # Servers that were lost are at fault. If there are none, the senders are.
        at_fault |= lost
        if not at_fault and sender_error is not None:
            raise ReshardError(
                f"the actor's ranks could not send their weights to the servers: {sender_error}"
            )
        # Without a server at fault, all that failed are left out.
        return at_fault or errors

    def _address(
        self, servers: Sequence[VLLMShardServer], *, live: bool
    ) -> LinkAddress:
        """Return the address of the link to these servers: the last one, or one whose store is opened here."""
        urls = [server.url for server in servers]
        # A link is reused only for the same kind of delivery, because live deliveries and
        # copies send different tensors.
        if self._link is not None and urls == self._urls and self._link_is_live == live:
            return self._link
        backend = self._live_backend if live else "gloo"
        hosts = [
            urlsplit(server.url).hostname or ""
            for server in servers
            if not is_loopback(server.url)
        ]
        # Copies in host memory serve a late server once. Servers on this machine need
        # no network.
        delta = self._delta if live else "off"
        if delta == "auto" and not hosts:
            delta = "off"
        # The address by which servers reach this host, which may have several.
        host = address_towards(hosts[0] if hosts else "localhost")
        name = f"link_{os.urandom(4).hex()}"
        size = self._num_senders + sum(server.num_workers for server in servers)
        link = LinkAddress(
            host, 0, name, self._num_senders, size, backend, self._seconds, delta
        )
        # The store must outlive this call: servers join it when they are called.
        self._store = keep_store(host, 0, link.timeout)
        link = replace(link, port=self._store.port)
        self._link, self._link_is_live, self._urls = link, live, urls
        return link


def _in_threads(
    call: Callable[[VLLMShardServer], None], servers: Sequence[VLLMShardServer]
) -> dict[str, RolloutError]:
    """Call all servers at once; return the errors by URL."""
    errors: dict[str, RolloutError] = {}

    def call_one(server: VLLMShardServer) -> None:
        try:
            call(server)
        except RolloutError as error:
            errors[server.url] = error

    if servers:
        with ThreadPoolExecutor(len(servers)) as threads:
            list(threads.map(call_one, servers))
    return errors


def _failures_in(
    answers: Mapping[str, Sequence[Mapping[str, Any]]],
) -> tuple[dict[str, RolloutError], ...]:
    """Return the errors of all servers that failed, and those of servers at fault.

    A server is at fault if a worker has an error of its own. The others failed because
    a process of the link left it.
    """
    failed: dict[str, RolloutError] = {}
    at_fault: dict[str, RolloutError] = {}
    for url, workers in answers.items():
        errors = [worker for worker in workers if "error" in worker]
        if not errors:
            continue
        # A worker with an error of its own explains more than one that lost its peers.
        worst = max(errors, key=lambda worker: bool(worker.get("own")))
        failed[url] = ServerLost(
            f"{url}: did not receive the weights: {worst['error']}"
        )
        if worst.get("own"):
            at_fault[url] = failed[url]
    return failed, at_fault
