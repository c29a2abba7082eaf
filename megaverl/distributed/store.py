"""The job's store: the first node hosts it, and the others connect to it or report what they find in its place.

torch's own client blocks forever, in a call that no signal interrupts, if a program
accepts the connection and sends nothing. If a program sends something else, it blocks
until its timeout.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Literal

import psutil
import torch.distributed as dist

from megaverl.distributed.failures import cause_of
from megaverl.errors import TrainingStopped
from megaverl.processes import raise_open_files

LOOPBACK = "127.0.0.1"
EVERY = 0.1  # seconds between two attempts
GREETING = 10.0  # seconds that a store may take to answer; two attempts are made
# Seconds until a wait is first reported, and between reports.
_FIRST_WORD, _NEXT_WORD = 5.0, 60.0
_CONNECT = 2.0


def keep_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Start the job's store in this process. It listens only at the address of `host`.

    A store has no password: whoever can connect to it can change the run.

    Args:
        host: name or address by which the other ranks reach it.
        port: 0: any free port.

    Raises:
        TrainingStopped: the port is taken, or the host is unknown.
    """
    raise_open_files()  # every rank of the job opens a connection
    # Bound before torch's server starts, which would listen on all interfaces.
    try:
        listening = _listening(host, port)
        bound_host, port = listening.getsockname()[:2]
        # A server on all interfaces is reached by the loopback from here.
        bound_host = (
            LOOPBACK if bound_host == "::" or bound_host == "0.0.0.0" else bound_host
        )
        fd = listening.detach()
        return dist.TCPStore(
            bound_host,
            port,
            None,
            True,
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=fd,
        )
    except (OSError, dist.DistError) as error:
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        cause = f"cannot be opened for {host} ({cause_of(error)})"
        cause = (
            "is taken: another job or program uses it. Choose another MASTER_PORT."
            if taken
            else cause
        )
        raise TrainingStopped(f"port {port} of this node {cause}") from error


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the first of the host's addresses that belongs to this machine.

    If none does (a load balancer, address translation), it listens at the first
    interface in GLOO_SOCKET_IFNAME. Without that variable it listens at all interfaces
    and warns. A name that resolves to the loopback only here (Debian's 127.0.1.1) is
    treated the same way, because it has another address elsewhere.
    """
    addresses = [
        (family, address)
        for family, *_, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )
    ]
    if host not in ("localhost", *(address[0] for _, address in addresses)):
        addresses = [
            (family, address)
            for family, address in addresses
            if not ip_address(address[0]).is_loopback
        ]
    if addresses:
        for interface_address in _named_interface():
            addresses.append((family_of(interface_address), (interface_address, port)))
    for family, address in addresses:
        try:
            # The first address of this machine wins.
            return socket.create_server(address, family=family)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    print(
        f"warning: {host} (MASTER_ADDR) is no address of this node that other nodes can reach, so the job's store "
        "listens on all interfaces. Set MASTER_ADDR to an address, or block MASTER_PORT for other machines.",
        file=sys.stderr,
        flush=True,
    )
    both = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", port),
        family=socket.AF_INET6 if both else socket.AF_INET,
        dualstack_ipv6=both,
    )


def own_address() -> str:
    """Return the address at which other ranks reach this one.

    It is the first interface in GLOO_SOCKET_IFNAME, as in a gloo group. Otherwise it is
    the address on the route to MASTER_ADDR, or the address of this machine's name. The
    loopback address is the last resort.
    """
    addresses = _named_interface()
    with suppress(OSError):
        if host := os.environ.get("MASTER_ADDR"):
            addresses += [
                source
                for _, source in _routes_to(host)
                if host in ("localhost", source) or not ip_address(source).is_loopback
            ]
        named = {
            str(address[0])
            for *_, address in socket.getaddrinfo(socket.gethostname(), 9)
        }
        addresses += sorted(
            address for address in named if not ip_address(address).is_loopback
        )
    return [*addresses, LOOPBACK][0]


def address_towards(host: str) -> str:
    """Return this machine's address on the route to `host`; `own_address()` if the host is unknown or on the loopback.

    Processes on `host` and on this job's nodes reach this machine there.
    """
    with suppress(OSError):
        for address, source in _routes_to(host):
            if not ip_address(address).is_loopback:
                return source
    return own_address()


def _routes_to(host: str) -> Iterator[tuple[str, str]]:
    """Yield each address of a host, with this machine's address on the route to it."""
    for family, *_, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # selects a route without sending anything
            yield str(address[0]), str(probe.getsockname()[0])


def family_of(
    address: str,
) -> Literal[socket.AddressFamily.AF_INET, socket.AddressFamily.AF_INET6]:
    """Return the address family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _named_interface() -> list[str]:
    """Return the addresses of the first interface in GLOO_SOCKET_IFNAME, which connects the job's nodes."""
    interface = psutil.net_if_addrs().get(
        os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0], []
    )
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [
        entry.address
        for family in families
        for entry in interface
        if entry.family == family
    ]
    return [address for address in addresses if not ip_address(address).is_link_local]


def reach_store(
    host: str, port: int, timeout: timedelta, end: float, tell: Callable[[str], None]
) -> dist.Store:
    """Connect to the first node's store as soon as it exists.

    Args:
        timeout: timeout of calls to the store.
        end: deadline on the monotonic clock.
        tell: called now and then during a long wait, with the last observation.

    Raises:
        TimeoutError: the store did not appear by `end`; the message is the last observation.
        TrainingStopped: another program answers. A first node that is merely late does not answer at all.
    """
    seen = "no answer"
    rounds = patiently(end, lambda: tell(seen))
    # Refused connections mean that the first node is not up yet.
    for _ in rounds:
        try:
            store = store_at(host, port)
        except OSError as error:
            seen = str(error)
        else:
            store.set_timeout(timeout)
            return store
    raise TimeoutError(seen)


def job_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store of the torchrun job that this process belongs to, its rank and the number of ranks.

    Raises:
        TrainingStopped: the store cannot be reached, or its port is taken by another program.
    """
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's agent hosts the store already.
            store = next(dist.rendezvous("env://", timeout=timeout))[0]
        # torch's own store would wait for all ranks, and not report which are missing.
        elif rank == 0:
            store = keep_store(host, port, timeout)
        else:
            store = reach_store(
                host,
                port,
                timeout,
                time.monotonic() + timeout.total_seconds(),
                lambda seen: None,
            )
    except (dist.DistError, OSError, ValueError, KeyError) as error:
        cause = f"is the first node up, and reachable? ({cause_of(error)})"
        raise TrainingStopped(f"no store at {address}: {cause}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # A restarted job must not read what the attempt before has left.
    return dist.PrefixStore(f"megaverl/job/{attempt}", store), rank, size


def store_at(host: str, port: int) -> dist.Store:
    """Connect to the store at this address.

    Raises:
        OSError: nothing listens there.
        TrainingStopped: another program answers.
    """
    for _ in range(2):  # the first attempt may hit a store that is just ending
        # A quick test, which ends at once if nothing listens.
        socket.create_connection((host, port), timeout=_CONNECT).close()
        if store := _greeted(host, port):
            return store
    raise TrainingStopped(
        f"{host}:{port} (MASTER_ADDR, MASTER_PORT) is not a job's store: another program {_what_answers(host, port)}. "
        "Give all nodes another MASTER_PORT, or correct MASTER_ADDR."
    )


def patiently(end: float, tell: Callable[[], None]) -> Iterator[None]:
    """Yield once per polling round until `end` (monotonic seconds), and call `tell` now and then."""
    next_word = time.monotonic() + _FIRST_WORD
    yield
    while (now := time.monotonic()) < end:
        if now >= next_word:
            tell()
            next_word = now + _NEXT_WORD
        time.sleep(EVERY)
        yield


def _greeted(host: str, port: int) -> dist.Store | None:
    """Connect to a store, and return None if the program there is none.

    The attempt runs in a thread, because it may never return.
    """
    connected: list[dist.Store] = []

    def connect() -> None:
        try:
            # torch takes up to 1.5 times this timeout, and blocks forever without an
            # answer.
            seconds = timedelta(seconds=GREETING / 2)
            connected.append(
                dist.TCPStore(host, port, None, False, seconds, wait_for_workers=False)
            )
        except dist.DistError:
            return

    thread = threading.Thread(target=connect, name="greeting", daemon=True)
    with _without_errors_of_torch():
        thread.start()
        # The thread stays behind if the program there never answers.
        thread.join(GREETING)
    return connected[0] if connected else None


def _what_answers(host: str, port: int) -> str:
    """Return what a program that is not a store does when it is contacted."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            data = connection.recv(120)
    except TimeoutError:
        return "takes connections and says nothing"
    except OSError:
        data = b""
    line = data.splitlines()[0].decode("ascii", "replace")[:60] if data else ""
    return f"answers {line!r}" if line else "takes connections and closes them"


@contextmanager
def _without_errors_of_torch() -> Iterator[None]:
    """Return a context that discards stderr.

    torch's C++ code prints a stack trace of every failed attempt, at any log level, and
    the raised error says enough.
    """
    # File descriptor 2, because C++ does not use Python's `sys.stderr`.
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
