"""Servers that come and go: who they are, which of them hold the current weights, who takes the next request.

A server is in use where it says that it holds this very version. It is told so by one rank alone, and only after its
log-probs of some tokens were compared with the trainer's. So ranks need not speak of servers to each other, and one
that was started again, with whatever weights, is out until it has been given these.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from megaverl.announcements import announcements
from megaverl.errors import RolloutError
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

if TYPE_CHECKING:
    from megaverl.config.roles import ServersConfig

logger = logging.getLogger(__name__)
POOL_FILE = "rollout_servers.txt"  # in the run's folder
KINDS: dict[str, type[InferenceServer]] = {"vllm": VLLMServer, "sglang": SGLangServer}

MOST_LOADS = 3  # failures in a row to bring a server the weights, before it is given up


@dataclass(frozen=True)
class PublishedWeights:
    """A version of the weights, in a folder that servers see.

    Attributes:
        name: of this version, which no other run and no other version has.
        tokens, log_probs: what a server with these weights says of the tokens after the first.
        tolerance: largest mean difference, in nats.
    """

    folder: str
    name: str
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    tolerance: float = 0.0


@dataclass
class Member:
    """A server of the pool.

    Attributes:
        state: waiting (it has not been heard yet, or has old weights), ready, lost, or refused for good.
        running: this rank's requests at it.
        why: what it said last, where it is not ready.
        asked: a thread speaks with it.
        checked: it is a server that this run can use.
        failed_loads: in a row.
        is_announced: the console was told that it joined, and not that it left.
        reads: the folder that it is reading.
        compared: log-probs of the trainer and of the server, when it was last given weights.
    """

    server: InferenceServer
    state: Literal["waiting", "ready", "lost", "refused"] = "waiting"
    running: int = 0
    why: str = "it has not been asked yet"
    asked: bool = False
    checked: bool = False
    failed_loads: int = 0
    is_announced: bool = False
    reads: str | None = None
    compared: tuple[Sequence[float], Sequence[float]] | None = None


class ServerPool:
    """The servers of a run, as one rank sees them.

    Args:
        addresses: who belongs to it now; asked anew at every look.
        connect: URL -> the server.
        expected: what each must be.
        admits: this rank brings weights to servers; the others only use those that have them.
        most_running: requests of this rank at each server at once.
        turn: this rank's number, so that ranks do not all begin with the same server.
        wait_seconds: how long it may be empty.
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
        wait_seconds: float,
        poll_seconds: float,
    ) -> None:
        self._addresses, self._connect, self._expected = addresses, connect, expected
        self._admits, self._most_running, self._turn = admits, most_running, turn
        self._wait_seconds, self._poll_seconds = wait_seconds, poll_seconds
        self.members: dict[str, Member] = {}
        self.weights: PublishedWeights | None = None
        self._strangers: set[str] = set()  # lines of a file that name no server
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    # --- who belongs to it ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Ask all servers what they are, before anything is done with them.

        Raises:
            RolloutError: every server that this run cannot use, and why. One that does not answer may still come.
        """
        self._take_up()
        self._each(self._examine)
        self._raise_refused()

    def use(self, weights: PublishedWeights) -> None:
        """From here on only servers with these weights are used. On the rank that admits, all that answer have them on
        return, and later ones get them as they come.

        Raises:
            RolloutError: no server took them in the time that there is; or, at the first version, one is refused.
        """
        with self._changed:
            is_first, self.weights = self.weights is None, weights
            for member in self.members.values():
                if member.state == "ready":
                    member.state, member.why = "waiting", "its weights are old"
        if not self._admits:
            return
        self.look()
        if is_first:
            self._raise_refused()
        self._wait_for_one(watched=False)
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, args=(self._closed,), name="servers", daemon=True)
            self._watcher.start()

    def being_read(self) -> set[str]:
        """Folders that servers are reading; after `use` no other than its own is added. To be kept: vLLM's server ends
        when a folder is gone."""
        with self._changed:
            return {member.reads for member in self.members.values() if member.reads is not None}

    def look(self) -> None:
        """Take up who has come, leave out who has gone, and ask all that are not in use; not those that somebody is
        asking already, as one that reads weights for minutes must not hold up the others."""
        self._take_up()
        self._each(self._ask)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, somebody looks every now and then; on the rank that admits somebody always does."""
        self.look()
        if self._admits:
            yield
            return
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(over,), name="servers", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()

    def close(self) -> None:
        """Nobody looks any more."""
        self._closed.set()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(self._poll_seconds):
            try:
                self.look()
            except RolloutError as error:  # of a file that cannot be read now
                logger.warning("%s", error)

    def _take_up(self) -> None:
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
            logger.warning("rollout server left out: %s", error)

    def _each(self, ask: Callable[[Member], None]) -> None:
        with self._changed:
            free = [each for each in self.members.values() if not each.asked and each.state in ("waiting", "lost")]
            for member in free:
                member.asked = True

        def ask_and_free(member: Member) -> None:
            try:
                ask(member)
            finally:
                member.asked = False

        if free:
            with ThreadPoolExecutor(len(free)) as threads:
                list(threads.map(ask_and_free, free))

    def _raise_refused(self) -> None:
        refused = [member.why for member in self.members.values() if member.state == "refused"]
        if refused:
            raise RolloutError("rollout.servers: " + "\n".join(refused))

    # --- one server -----------------------------------------------------------------------------------------------

    def _examine(self, member: Member) -> None:
        """Whether it can be used at all."""
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
        if found := member.server.problems(self._expected):
            raise ServerRefused(f"{member.server.url}: {'; '.join(found)}.")
        member.checked = True

    def _ask(self, member: Member) -> None:
        """Whether it holds the current weights; where this rank admits, they are brought to it."""
        weights = self.weights
        if weights is None:
            return
        try:
            member.server.healthy()
            if member.server.weight_version() != weights.name:
                if not self._admits:
                    return
                self._check(member)
                self._bring(member, weights)
        except ServerLost as error:
            self._set(member, "lost", str(error))
        except ServerRefused as error:
            self._set(member, "refused", str(error))
        else:
            with self._changed:
                if self.weights is weights:  # and not newer ones by now
                    self._set(member, "ready", "")

    def _bring(self, member: Member, weights: PublishedWeights) -> None:
        server = member.server
        with self._changed:
            if self.weights is not weights:  # newer ones have come meanwhile, and this folder may be gone
                return
            member.reads = weights.folder
        try:
            server.load(weights.folder)
            self._compare(member, weights)
            server.name_weights(weights.name)
            if (name := server.weight_version()) != weights.name:
                raise ServerRefused(f"{server.url}: was given weights {weights.name}, and says that it has {name}.")
        except ServerLost as error:
            member.failed_loads += 1
            if member.failed_loads < MOST_LOADS:
                raise
            raise ServerRefused(f"{error} That was the {MOST_LOADS}rd time that it did not take weights.") from error
        finally:
            member.reads = None
        member.failed_loads = 0

    def _compare(self, member: Member, weights: PublishedWeights) -> None:
        """That it has these weights, by its log-probs of some tokens."""
        if not weights.tokens:
            return
        url, found = member.server.url, member.server.log_probs(weights.tokens)
        if not (mean := _mean_difference(weights.log_probs, found)) <= weights.tolerance:  # nan is no agreement either
            raise ServerRefused(
                f"{url}: has other weights than {weights.folder} after reading it: its log-probs of {len(found)} "
                f"tokens are {mean:.3g} from the trainer's in the mean, and {weights.tolerance:g} is allowed. It must "
                "see that very folder, and compute as the trainer does (dtype, quantisation)."
            )
        before, member.compared = member.compared, (weights.log_probs, found)
        if before is not None and found == before[1]:
            changed = _mean_difference(weights.log_probs, before[0])
            if changed > weights.tolerance / 5:
                raise ServerRefused(
                    f"{url}: says that it has read {weights.folder}, and its log-probs of {len(found)} tokens are what "
                    f"they were before, to the bit; the trainer's have changed by {changed:.3g} in the mean."
                )

    def _set(self, member: Member, state: Literal["ready", "lost", "refused"], why: str) -> None:
        with self._changed:
            before, member.state, member.why = member.state, state, why
            self._announce(member, why)
            self._changed.notify_all()
        if state != before:
            log = logger.info if state == "ready" else logger.warning
            log("rollout server %s is %s. %s", member.server.url, state, why)

    def _announce(self, member: Member, why: str) -> None:
        """Tell the console that a server joined or left, from the rank that brings weights to servers.

        A server that only waits for the next weights has not left. The caller holds the lock.
        """
        url = member.server.url
        is_in_pool = self.members.get(url) is member and member.state in ("ready", "waiting")
        if not self._admits or is_in_pool == member.is_announced:
            return
        if is_in_pool and member.state != "ready":  # not in use before it has the weights
            return
        member.is_announced = is_in_pool
        count = sum(each.is_announced for each in self.members.values())
        if is_in_pool:
            announcements.info("rollout server %s joined (%d in the pool)", url, count)
        else:
            announcements.warning(
                "rollout server %s left (%d in the pool): %s", url, count, why.removeprefix(f"{url}: ")
            )

    # --- requests -------------------------------------------------------------------------------------------------

    def lost(self, member: Member, error: ServerLost) -> None:
        """A request to it failed: nobody uses it until it answers again."""
        self._set(member, "lost", str(error))

    @contextmanager
    def least_loaded(self, stopped: Callable[[], bool]) -> Iterator[Member]:
        """A server that is ready and has the fewest of this rank's requests; waits for one.

        Raises:
            RolloutError: there was none for `wait_seconds`, or nobody wants one any more.
        """
        member = self._wait_for_one(stopped)
        try:
            yield member
        finally:
            with self._changed:
                member.running -= 1
                self._changed.notify_all()

    def _wait_for_one(self, stopped: Callable[[], bool] | None = None, *, watched: bool = True) -> Member:
        """The next to be used; its request is counted where `stopped` is given.

        Args:
            watched: somebody else looks.
        """
        empty_since: float | None = None
        while True:
            with self._changed:
                if stopped is not None and stopped():
                    raise RolloutError("another request has failed.")
                ready = [member for member in self.members.values() if member.state == "ready"]
                free = [member for member in ready if member.running < self._most_running]
                if free or (ready and stopped is None):
                    first = self._turn % len(free or ready)
                    chosen = min((free or ready)[first:] + (free or ready)[:first], key=lambda each: each.running)
                    chosen.running += stopped is not None
                    return chosen
                empty_since = None if ready else empty_since or time.monotonic()
                if empty_since is not None and time.monotonic() - empty_since > self._wait_seconds:
                    raise RolloutError(self._why_empty())
                if watched:
                    self._changed.wait(self._poll_seconds)
            if not watched:
                self._closed.wait(self._poll_seconds)
                self.look()

    def _why_empty(self) -> str:
        each = "\n".join(f"{url}: {member.why}" for url, member in self.members.items()) or "It is empty."
        return (
            f"no rollout server could be used for {self._wait_seconds:g} s (rollout.servers.wait_seconds). {each}\n"
            "Start one, add it with `megaverl rollout-pool add`, and start the run again."
        )


def _mean_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def addresses_of(config: ServersConfig, watched: Path) -> list[str]:
    """Who belongs to the pool now: `urls` and what `dns` resolves to, and what the watched file adds and takes out.

    Raises:
        RolloutError: the file cannot be read.
    """
    found = dict.fromkeys([*config.urls, *(_resolved(config.dns) if config.dns else ())])
    for line in lines_of(watched):
        if line.startswith("-"):
            found.pop(line[1:].strip(), None)
        else:
            found[line] = None
    return list(found)


def token_of(servers: ServersConfig) -> str | None:
    """The servers' token, out of the environment.

    Raises:
        RolloutError: it is not there.
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
    """What `megaverl rollout-pool` writes and a run reads."""
    return Path(servers.file) if servers.file is not None else run_dir / POOL_FILE


def connect(
    servers: ServersConfig, url: str, token: str | None, server: type[InferenceServer] | None = None
) -> InferenceServer:
    """Return one server of the pool.

    Args:
        server: its class; None: that of its kind, which takes weights from a folder.

    Raises:
        ServerRefused: no URL of a server, or one beyond the loopback without a token.
    """
    if problem := url_problem(url):
        raise ServerRefused(problem)
    if token is None and not is_loopback(url):
        raise ServerRefused(f"{url}: is not on the loopback, and there is no token (rollout.servers.token_env).")
    server = server or KINDS[servers.kind]
    return server(url, token, generating=servers.timeout_seconds, loading=servers.load_timeout_seconds)


def lines_of(watched: Path) -> list[str]:
    """What a watched file says: a URL a line, or `-` and a URL that is taken out; `#` begins a remark."""
    try:
        text = watched.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RolloutError(f"rollout.servers.file={watched}: cannot be read ({error}).") from error
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line.rstrip("/") for line in lines if line]


def change(watched: Path, urls: Sequence[str], *, adds: bool) -> None:
    """Say in a watched file that servers are in the pool, or out of it. Whole or not at all, as others read it."""
    urls = [url.rstrip("/") for url in urls]
    kept = [line for line in lines_of(watched) if line.removeprefix("-").strip() not in urls]
    lines = [*kept, *(url if adds else f"-{url}" for url in urls)]
    temporary = watched.with_name(watched.name + ".tmp")
    try:
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        temporary.rename(watched)
    except OSError as error:
        raise RolloutError(f"{watched}: cannot be written ({error}).") from error


def _resolved(url: str) -> list[str]:
    """One URL for every address of a name."""
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError as error:
        logger.warning("rollout.servers.dns=%s: cannot be resolved (%s).", url, error)
        return []
    hosts = sorted({str(each[4][0]) for each in found})
    return [f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}" for host in hosts]
