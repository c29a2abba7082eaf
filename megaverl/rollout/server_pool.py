"""Pool of inference servers that join and leave: which servers hold the current
weights, and which takes the next request.

A server is in use only if it reports the current version of the weights. One rank alone
sets that version, after it has compared the server's log-probs of some tokens with the
trainer's. So ranks need not communicate about servers, and a restarted server is unused
until it has received the current weights.

    waiting --(reports the current version, or was given it)--> ready
    ready   --(new weights are published)--> waiting
    any     --(no answer, or an internal error)--> lost --(answers again)--> ready
    any     --(wrong model, wrong weights, refused)--> refused, for good
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from megaverl.announcements import announcements
from megaverl.errors import RolloutError
from megaverl.rollout.prefix_routing import PrefixRouter
from megaverl.rollout.server_api import (
    ExpectedModel,
    InferenceServer,
    ServerLost,
    ServerRefused,
    SGLangServer,
    VLLMServer,
    is_loopback,
    url_problem,
)
from megaverl.sharding.weight import listed

if TYPE_CHECKING:
    from megaverl.config.roles import ServersConfig

logger = logging.getLogger(__name__)
POOL_FILE = "rollout_servers.txt"  # in the run's folder
KINDS: dict[str, type[InferenceServer]] = {"vllm": VLLMServer, "sglang": SGLangServer}

MOST_LOADS = 3  # consecutive failures to load weights before a server is refused


class ChangesFolder(NamedTuple):
    """Folder with the changes of one version since the one before it (`weights/change_files.py`)."""

    name: str
    folder: str


@dataclass(frozen=True)
class PublishedWeights:
    """A version of the weights that servers can get.

    Attributes:
        folder: where servers read whole weights. None: the actor's ranks send them.
        name: unique name of this version, over all runs.
        tokens: tokens for a comparison with the trainer.
        log_probs: the trainer's log-probs of these tokens after the first.
        tolerance: largest mean difference of log-probs, in nats.
        whole_name: name of the version in `folder`, if that is an earlier one.
        changes: versions since then, in order; the last one is this version.
        fingerprints: of the weights after the changes, for servers that apply them. Empty: they are not compared.
    """

    folder: str | None
    name: str
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    tolerance: float = 0.0
    whole_name: str = ""
    changes: tuple[ChangesFolder, ...] = ()
    fingerprints: Mapping[str, int] = field(default_factory=dict)

    @property
    def folders(self) -> tuple[str, ...]:
        """All folders that a server may read to get this version."""
        whole = () if self.folder is None else (self.folder,)
        return whole + tuple(changes.folder for changes in self.changes)

    def changes_since(self, version: str) -> tuple[ChangesFolder, ...] | None:
        """Return the changes that a server with this version lacks. None: it needs whole weights first."""
        if not self.changes:
            return None
        names = [self.whole_name, *(changes.name for changes in self.changes)]
        return self.changes[names.index(version) :] if version in names else None

    @property
    def source(self) -> str:
        """Return where servers get the weights, for messages."""
        return (
            self.folder
            if self.folder is not None
            else f"version {self.name} of the actor"
        )


class DeliversWeights(Protocol):
    """Object that brings weights to several servers at once, instead of a folder that each server reads."""

    def deliver(
        self, servers: Sequence[InferenceServer], *, live: bool
    ) -> Mapping[str, RolloutError]:
        """Bring the current weights to all servers; return the errors of those that did not take them, by URL.

        Args:
            live: the actor's ranks wait for this delivery, and send their own tensors.
        """


@dataclass
class Member:
    """A server of the pool.

    Attributes:
        state: waiting (not asked yet, or with old weights), ready, lost, or refused for good.
        running: this rank's requests on it.
        reason: the reason why it is not ready.
        is_asked: whether a thread is talking to it.
        checked: whether it has been found suitable for this run.
        failed_loads: consecutive failures to load weights.
        is_announced: whether the console has shown that it joined, and not yet that it left.
        reads: the folders that it is loading.
        holds: the version that this rank has completely brought to it. None: unknown, or a part of a version.
        needs_whole: it cannot apply changes, and waits for a version that is whole.
        lacks: the weights that it is to get by `DeliversWeights`.
        compared: the trainer's and the server's log-probs when it last loaded weights.
    """

    server: InferenceServer
    state: Literal["waiting", "ready", "lost", "refused"] = "waiting"
    running: int = 0
    reason: str = "it has not been asked yet"
    is_asked: bool = False
    checked: bool = False
    failed_loads: int = 0
    is_announced: bool = False
    reads: tuple[str, ...] = ()
    holds: str | None = None
    needs_whole: bool = False
    lacks: PublishedWeights | None = None
    compared: tuple[Sequence[float], Sequence[float]] | None = None


class ServerPool:
    """The servers of a run, as one rank sees them.

    Args:
        addresses: returns the URLs of the pool; called at every look.
        connect: URL -> client of the server.
        expected: requirements on each server.
        admits: whether this rank brings weights to servers. Other ranks only use servers that have them.
        most_running: limit of this rank's concurrent requests on each server.
        turn: this rank's index, so that ranks start with different servers.
        router: prefers servers that have read a prompt's beginning. None: only the load counts.
        wait_seconds: time for which the pool may have no usable server.

    Attributes:
        members: the servers by URL.
        weights: the version that servers must have to be used.
        transfer: brings weights to servers. None: servers read them from a folder.
        prepares_changes: whether later versions may be changes only (`PublishedWeights.changes`).
        changes_read: URL -> bytes of changes that the server's workers have read so far.

    Example:
        pool.check()                      # on the rank that admits
        pool.use(weights)                 # after every update
        with pool.watched(), pool.server_for(prompt, stopped) as member:
            member.server.generate(...)
    """

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        connect: Callable[[str], InferenceServer],
        expected: ExpectedModel,
        *,
        admits: bool,
        most_running: int,
        turn: int = 0,
        router: PrefixRouter | None = None,
        wait_seconds: float,
        poll_seconds: float,
    ) -> None:
        self._addresses, self._connect, self._expected = addresses, connect, expected
        self._admits, self._most_running, self._turn = admits, most_running, turn
        self._router = router
        self._wait_seconds, self._poll_seconds = wait_seconds, poll_seconds
        self.members: dict[str, Member] = {}
        self.weights: PublishedWeights | None = None
        self.transfer: DeliversWeights | None = None
        self.prepares_changes = False
        self.changes_read: Counter[str] = Counter()
        # Held while weights are delivered: by a thread for late servers, or by a
        # reshard.
        self._delivering = threading.Lock()
        # Lines of the watched file that are not a usable URL.
        self._strangers: set[str] = set()
        # Guards members and weights, and wakes requests that wait for a server.
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    # --- who belongs to it ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check all servers before they are used. A server that does not answer may still come later.

        Raises:
            RolloutError: names every server that this run cannot use, with the reason.
        """
        self._take_up()
        self._each(self._examine)
        self._raise_refused()

    def use(self, weights: PublishedWeights, *, live: bool = False) -> None:
        """Use only servers with these weights from now on.

        On the rank that admits, all servers that answer have the weights when this
        returns, and later ones get them as they come.

        Args:
            live: the actor's ranks wait to send the weights, and the caller is inside `only_reshard_delivers`.

        Raises:
            RolloutError: no server loaded them in time, or a server is refused at the first version.
            ReshardError: the actor's ranks could not send them.
        """
        with self._changed:
            is_first, self.weights = self.weights is None, weights
            if self._router is not None:
                # Servers empty their caches when they take new weights.
                self._router.forget()
            # Old weights must not answer any request from here on.
            for member in self.members.values():
                if member.state == "ready":
                    member.state, member.reason = "waiting", "its weights are old"
        if not self._admits:
            return
        self.look(live=live)
        if is_first:
            self._raise_refused()
        # Without a server the run cannot go on. A server may still be starting.
        self._wait_for_one(watched=False, live=live)
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=self._watch, args=(self._closed,), name="servers", daemon=True
            )
            self._watcher.start()

    def being_read(self) -> set[str]:
        """Return the folders that servers are loading. They must not be deleted, since
        a vLLM server crashes if its folder vanishes.

        After `use`, only that call's folder can be added.
        """
        with self._changed:
            return {
                folder for member in self.members.values() for folder in member.reads
            }

    def takes_changes(self) -> bool:
        """Return whether all servers in use, and those that wait for weights, can apply changes."""
        with self._changed:
            return not any(
                member.needs_whole
                or (member.state == "ready" and not member.server.applies_changes)
                for member in self.members.values()
            )

    def look(self, *, live: bool = False) -> None:
        """Add new servers, remove those that have left, and query those that are not in use.

        Servers that another thread is querying are skipped, since loading weights may
        take minutes.
        """
        # Addresses may have changed since the last look.
        self._take_up()
        self._each(self._ask, then=partial(self._deliver, live=live))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch for servers that come back or join, while the block runs. On the rank
        that admits, a thread always watches.
        """
        self.look()
        if self._admits:
            yield
            return
        over = threading.Event()
        watcher = threading.Thread(
            target=self._watch, args=(over,), name="servers", daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            over.set()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(self._poll_seconds):
            try:
                self.look()
            except RolloutError as error:
                # The watched file cannot be read at the moment. The next look may
                # succeed.
                logger.warning("%s", error)

    def _take_up(self) -> None:
        # Without duplicates, in the order of the configuration.
        wanted = dict.fromkeys(self._addresses())
        with self._changed:
            for url in [url for url in self.members if url not in wanted]:
                member = self.members.pop(url)
                logger.warning("rollout server %s is out of the pool.", url)
                self._announce(member, "it was removed from the pool.")
            for url in wanted:
                if url not in self.members and url not in self._strangers:
                    self._add(url)
            self._changed.notify_all()

    def _add(self, url: str) -> None:
        try:
            self.members[url] = Member(self._connect(url))
        except ServerRefused as error:
            self._strangers.add(url)
            logger.warning("rollout server skipped: %s", error)

    @contextmanager
    def only_reshard_delivers(self) -> Iterator[None]:
        """Return a context in which weights are delivered by `use` alone, with `live`.

        It is entered as soon as no late server is being served.
        """
        with self._delivering:
            yield

    def _each(
        self,
        ask: Callable[[Member], None],
        then: Callable[[list[Member]], None] = lambda members: None,
    ) -> None:
        """Query all servers that no other thread queries, in threads, and pass them to `then`."""
        # Marked under the lock, so that no two threads query one server.
        with self._changed:
            free = [
                candidate
                # Ready servers are left alone, and refused ones stay out.
                for candidate in self.members.values()
                if not candidate.is_asked and candidate.state in ("waiting", "lost")
            ]
            for member in free:
                member.is_asked = True

        try:
            _in_threads(ask, free)
            then(free)
        finally:
            for member in free:
                member.is_asked = False

    def _raise_refused(self) -> None:
        refused = [
            member.reason
            for member in self.members.values()
            if member.state == "refused"
        ]
        if refused:
            raise RolloutError("rollout.servers: " + "\n".join(refused))

    # --- one server -----------------------------------------------------------------------------------------------

    def _examine(self, member: Member) -> None:
        """Check that a server answers and is suitable, and set its state."""
        try:
            member.server.healthy()
            self._check(member)
        except ServerLost as error:
            self._set(member, "lost", str(error))
        except ServerRefused as error:
            self._set(member, "refused", str(error))

    def _check(self, member: Member) -> None:
        if member.checked:
            return
        if problems := member.server.problems(self._expected):
            raise ServerRefused(f"{member.server.url}: {'; '.join(problems)}.")
        member.checked = True

    def _ask(self, member: Member) -> None:
        """Make a server ready if it has the current weights; on the rank that admits, bring them to it first.

        With `transfer`, `_deliver` brings them to all servers that lack them.
        """
        weights = self.weights
        if weights is None:
            return
        with self._judging(member, weights):
            member.server.healthy()
            # The server restarted, came late, or has old weights.
            if member.server.weight_version() != weights.name:
                if not self._admits:
                    member.lacks = weights
                    return
                self._check(member)
                if self.transfer is not None and weights.folder is None:
                    member.lacks = weights
                else:
                    self._check_takes(member, weights)
                    self._bring(member, weights, partial(self._load, member, weights))

    def _check_takes(self, member: Member, weights: PublishedWeights) -> None:
        """Check that a server can get these weights from their folders.

        Raises:
            ServerLost: it cannot apply changes. It gets the next version, which will be whole.
        """
        member.needs_whole = bool(weights.changes) and not member.server.applies_changes
        if member.needs_whole:
            raise ServerLost(
                f"{member.server.url}: takes whole weights only, and version {weights.name} has changes "
                "(reshard.delta). It gets the next version, which will be whole."
            )

    def _load(self, member: Member, weights: PublishedWeights, folder: str) -> None:
        """Let a server read the weights: only the changes if it holds an earlier version that they build on."""
        server, holds = member.server, member.holds
        # A server that was started again has another version than it was given.
        if holds is not None and server.weight_version() != holds:
            holds = None
        changes = None if holds is None else weights.changes_since(holds)
        # Until it has read everything, its weights are of no version.
        member.holds = None
        if changes is None:
            server.load(folder)
            changes = weights.changes
            if self.prepares_changes:
                server.prepare_changes(folder)
        if changes:
            folders = [each.folder for each in changes]
            check = bool(weights.fingerprints)
            nbytes, fingerprints = server.apply_changes(folders, check=check)
            # Servers are queried in threads.
            with self._changed:
                self.changes_read[server.url] += nbytes
            check_fingerprints(server.url, fingerprints, weights.fingerprints)
            logger.info(
                "rollout server %s read %d bytes of changes of %d versions, up to %s",
                server.url,
                nbytes,
                len(changes),
                weights.name,
            )
        member.holds = weights.name

    def _deliver(self, members: Sequence[Member], *, live: bool) -> None:
        """Bring the current weights to all members that lack them, in parallel.

        Args:
            live: see `use`.
        """
        outdated = [member for member in members if member.lacks is not None]
        # A server that was asked before newer weights were published, or by a rank that
        # brings none, is asked again.
        current = [
            member
            for member in outdated
            if self._admits and member.lacks is self.weights
        ]
        weights = self.weights
        for member in outdated:
            member.lacks = None
        # During a reshard, a late server is left for a later look: the reshard may be
        # waiting for just that one.
        if (
            not current
            or weights is None
            or not (live or self._delivering.acquire(blocking=False))
        ):
            return
        errors: Mapping[str, RolloutError] = {}
        try:
            assert self.transfer is not None
            # Newer weights were published while this thread waited for its turn.
            if self.weights is not weights:
                return
            errors = self.transfer.deliver(
                [member.server for member in current], live=live
            )
        finally:
            if not live:
                self._delivering.release()

        def conclude(member: Member) -> None:
            def raise_failure(folder: str) -> None:
                if (error := errors.get(member.server.url)) is not None:
                    raise error

            with self._judging(member, weights):
                self._bring(member, weights, raise_failure)

        _in_threads(conclude, current)

    @contextmanager
    def _judging(self, member: Member, weights: PublishedWeights) -> Iterator[None]:
        """Return a context whose body gives a server its weights or raises: the server's state follows from that."""
        try:
            yield
        except ServerLost as error:
            self._set(member, "lost", str(error))
        except ServerRefused as error:
            self._set(member, "refused", str(error))
        else:
            with self._changed:
                # Another version may have been published while this thread was waiting.
                if self.weights is weights and member.lacks is None:
                    self._set(member, "ready", "")

    def _bring(
        self, member: Member, weights: PublishedWeights, load: Callable[[str], None]
    ) -> None:
        """Let a server load the weights, prove that it has, and name them."""
        server = member.server
        with self._changed:
            # Newer weights have been published, and this folder may be gone.
            if self.weights is not weights:
                return
            member.reads = weights.folders
        try:
            load(weights.folder or "")
            self._compare(member, weights)
            # The name comes last: a server with the name has proven its weights.
            server.name_weights(weights.name)
            if (name := server.weight_version()) != weights.name:
                raise ServerRefused(
                    f"{server.url}: was given weights {weights.name}, and reports {name}."
                )
        except ServerLost as error:
            member.failed_loads += 1
            # A single failure may come from the network. Repeated ones come from the server.
            if member.failed_loads < MOST_LOADS:
                raise
            raise ServerRefused(
                f"{error} That was the {MOST_LOADS}rd time that it did not take weights."
            ) from error
        finally:
            member.reads = ()
        member.failed_loads = 0

    def _compare(self, member: Member, weights: PublishedWeights) -> None:
        """Compare the server's log-probs of some tokens with the trainer's, to prove that it loaded these weights.

        Raises:
            ServerRefused: they differ by more than the tolerance, or did not change though the trainer's did.
        """
        if not weights.tokens:
            return
        url, log_probs = member.server.url, member.server.log_probs(weights.tokens)
        # Written with `not` so that NaN counts as a difference.
        if (
            not (mean := _mean_difference(weights.log_probs, log_probs))
            <= weights.tolerance
        ):
            raise ServerRefused(
                f"{url}: has other weights than {weights.source} after reading it: its log-probs of {len(log_probs)} "
                f"tokens are {mean:.3g} from the trainer's in the mean, and {weights.tolerance:g} is allowed. It must "
                f"{'see that very folder, and ' if weights.folder else ''}compute as the trainer does (dtype, "
                "quantisation)."
            )
        # The same log-probs after an update prove that the server kept its old weights.
        before, member.compared = member.compared, (weights.log_probs, log_probs)
        if before is not None and log_probs == before[1]:
            changed = _mean_difference(weights.log_probs, before[0])
            if changed > weights.tolerance / 5:
                raise ServerRefused(
                    f"{url}: reports that it has read {weights.source}, and its log-probs of {len(log_probs)} tokens "
                    "are "
                    f"what they were before, to the bit; the trainer's have changed by {changed:.3g} in the mean."
                )

    def _set(
        self, member: Member, state: Literal["ready", "lost", "refused"], reason: str
    ) -> None:
        with self._changed:
            before, member.state, member.reason = member.state, state, reason
            # Another server may be started at the address, with another number of
            # workers.
            member.checked &= self.transfer is None or state != "lost"
            self._announce(member, reason)
            self._changed.notify_all()
        # Logged outside the lock.
        if state != before:
            log = logger.info if state == "ready" else logger.warning
            log("rollout server %s is %s. %s", member.server.url, state, reason)

    def _announce(self, member: Member, reason: str) -> None:
        """Show on the console that a server joined or left, from the rank that brings weights to servers.

        A server that only waits for the next weights has not left. The caller holds the
        lock.
        """
        url = member.server.url
        is_in_pool = self.members.get(url) is member and member.state in (
            "ready",
            "waiting",
        )
        if not self._admits or is_in_pool == member.is_announced:
            return
        # A new server has not joined before it has the weights.
        if is_in_pool and member.state != "ready":
            return
        member.is_announced = is_in_pool
        count = sum(member_.is_announced for member_ in self.members.values())
        if is_in_pool:
            announcements.info("rollout server %s joined (%d in the pool)", url, count)
        else:
            announcements.warning(
                "rollout server %s left (%d in the pool): %s",
                url,
                count,
                reason.removeprefix(f"{url}: "),
            )

    # --- requests -------------------------------------------------------------------------------------------------

    def lost(self, member: Member, error: ServerLost) -> None:
        """Take a server out of use after a failed request, until it answers again."""
        if self._router is not None:
            with self._changed:
                # It may have been started again, with an empty cache.
                self._router.forget(member.server.url)
        self._set(member, "lost", str(error))

    @contextmanager
    def server_for(
        self, token_ids: Sequence[int], stopped: Callable[[], bool]
    ) -> Iterator[Member]:
        """Yield a ready server for a prompt; wait until there is one.

        It is the one with the fewest of this rank's requests, or one that has read the
        prompt's beginning before (`PrefixRouter`).

        Raises:
            RolloutError: no server was ready for `wait_seconds`, or `stopped` returned True.
        """
        member = self._wait_for_one(stopped, token_ids=token_ids)
        try:
            yield member
        finally:
            with self._changed:
                member.running -= 1
                self._changed.notify_all()

    def _wait_for_one(
        self,
        stopped: Callable[[], bool] | None = None,
        *,
        token_ids: Sequence[int] = (),
        watched: bool = True,
        live: bool = False,
    ) -> Member:
        """Wait for a ready server and return it; count a request on it if `stopped` is given.

        Args:
            token_ids: the request's prompt.
            watched: whether another thread looks for servers; otherwise this one does.
            live: see `use`.
        """
        empty_since: float | None = None
        while True:
            with self._changed:
                if stopped is not None and stopped():
                    raise RolloutError("another request has failed.")
                ready = [
                    member
                    for member in self.members.values()
                    if member.state == "ready"
                ]
                # Ready servers that have reached their limit are not free.
                free = [
                    member for member in ready if member.running < self._most_running
                ]
                if free or (ready and stopped is None):
                    # Each rank sees only its own requests, so ranks begin at different
                    # servers to spread theirs.
                    first = self._turn % len(free or ready)
                    in_turn = (free or ready)[first:] + (free or ready)[:first]
                    chosen = self._choose(in_turn, token_ids)
                    # Counted under the lock, so that two requests do not both take the
                    # last place.
                    chosen.running += stopped is not None
                    return chosen
                # Measured since the last moment with a ready server.
                empty_since = None if ready else empty_since or time.monotonic()
                if (
                    empty_since is not None
                    and time.monotonic() - empty_since > self._wait_seconds
                ):
                    raise RolloutError(self._why_empty())
                if watched:
                    # `wait` releases the lock, so that other threads can report
                    # changes.
                    self._changed.wait(self._poll_seconds)
            if not watched:
                self._closed.wait(self._poll_seconds)
                self.look(live=live)

    def _choose(self, members: Sequence[Member], token_ids: Sequence[int]) -> Member:
        """Return the member for a prompt, the first of equals."""
        if self._router is None:
            return min(members, key=lambda candidate: candidate.running)
        by_url = {member.server.url: member for member in members}
        loads = {url: member.running for url, member in by_url.items()}
        return by_url[self._router.choose(token_ids, loads)]

    def _why_empty(self) -> str:
        reasons = (
            "\n".join(f"{url}: {member.reason}" for url, member in self.members.items())
            or "It is empty."
        )
        return (
            f"no rollout server could be used for {self._wait_seconds:g} s (rollout.servers.wait_seconds). {reasons}\n"
            "Start one, add it with `megaverl rollout-pool add`, and start the run again."
        )


def _in_threads(ask: Callable[[Member], None], members: Sequence[Member]) -> None:
    """Call `ask` with each member, in a thread each: one that does not answer must not delay the others."""
    if members:
        with ThreadPoolExecutor(len(members)) as threads:
            list(threads.map(ask, members))


def check_fingerprints(
    url: str, fingerprints: Mapping[str, int], expected: Mapping[str, int]
) -> None:
    """Check a server's weights after changes. Weights that the server holds in other bits are not compared.

    Raises:
        ServerLost: some differ. The server reads whole weights when it is tried again.
    """
    wrong = [
        name
        for name, fingerprint in fingerprints.items()
        if name in expected and fingerprint != expected[name]
    ]
    if wrong:
        raise ServerLost(
            f"{url}: its weights are not the actor's after the changes: {', '.join(listed(wrong))}. It reads whole "
            "weights next."
        )


def _mean_difference(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


def addresses_of(config: ServersConfig, watched: Path) -> list[str]:
    """List the pool's URLs: `urls`, the addresses of `dns`, and the additions and removals of the watched file.

    Raises:
        RolloutError: the file cannot be read.
    """
    addresses = dict.fromkeys(
        [*config.urls, *(_resolved(config.dns) if config.dns else ())]
    )
    for line in lines_of(watched):
        # Lines apply in order: a server may be added again after it was removed.
        if line.startswith("-"):
            addresses.pop(line[1:].strip(), None)
        else:
            addresses[line] = None
    return list(addresses)


def token_of(servers: ServersConfig) -> str | None:
    """Read the servers' token from the environment.

    Raises:
        RolloutError: the variable is unset or empty.
    """
    if servers.token_env is None:
        return None
    token = os.environ.get(servers.token_env)
    if not token:
        raise RolloutError(
            f"rollout.servers.token_env={servers.token_env}: the environment has no such variable, or it is empty. "
            "Set it to the servers' token on every rank."
        )
    return token


def watched_file(servers: ServersConfig, run_dir: Path) -> Path:
    """Return the path of the file that `megaverl rollout-pool` writes and a run watches."""
    return Path(servers.file) if servers.file is not None else run_dir / POOL_FILE


def connect(
    servers: ServersConfig,
    url: str,
    token: str | None,
    server: type[InferenceServer] | None = None,
) -> InferenceServer:
    """Return the client of one server of the pool.

    Args:
        server: its class; None: the class of its kind, which loads weights from a folder.

    Raises:
        ServerRefused: the URL is invalid, or it is not on the loopback and there is no token.
    """
    if problem := url_problem(url):
        raise ServerRefused(problem)
    if token is None and not is_loopback(url):
        raise ServerRefused(
            f"{url}: is not on the loopback, and there is no token (rollout.servers.token_env)."
        )
    server = server or KINDS[servers.kind]
    return server(
        url,
        token,
        generating=servers.timeout_seconds,
        loading=servers.load_timeout_seconds,
    )


def lines_of(watched: Path) -> list[str]:
    """Read the entries of a watched file: a URL adds a server, `-` and a URL removes one, and `#` starts a comment."""
    try:
        text = watched.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RolloutError(
            f"rollout.servers.file={watched}: cannot be read ({error})."
        ) from error
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line.rstrip("/") for line in lines if line]


def change(watched: Path, urls: Sequence[str], *, adds: bool) -> None:
    """Add servers to a watched file, or mark them as removed. The file is replaced atomically, as runs read it."""
    urls = [url.rstrip("/") for url in urls]
    # Older lines about these servers are dropped, so that the file does not grow.
    kept = [
        line for line in lines_of(watched) if line.removeprefix("-").strip() not in urls
    ]
    lines = [*kept, *(url if adds else f"-{url}" for url in urls)]
    # Runs that read the file see the old or the new one, never half of it.
    temporary = watched.with_name(watched.name + ".tmp")
    try:
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        temporary.rename(watched)
    except OSError as error:
        raise RolloutError(f"{watched}: cannot be written ({error}).") from error


def _resolved(url: str) -> list[str]:
    """List one URL for every address of a host name."""
    parts = urlsplit(url)
    try:
        entries = socket.getaddrinfo(
            parts.hostname, parts.port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        logger.warning("rollout.servers.dns=%s: cannot be resolved (%s).", url, error)
        return []
    hosts = sorted({str(entry[4][0]) for entry in entries})
    return [
        f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"
        for host in hosts
    ]
