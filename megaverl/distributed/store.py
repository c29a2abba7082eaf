"""The job's store, which the first node keeps: opened there, and reached from the others, which say what they find
instead.

torch's own client waits without end, in a call that no signal ends, for a program that takes connections and says
nothing, and until its deadline for one that says something else.
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
EVERY = 0.1  # seconds between two looks
GREETING = 10.0  # seconds that a store may take to greet; other programs are given them twice
_FIRST_WORD, _NEXT_WORD = 5.0, 60.0  # seconds until a wait is reported, and reported again
_CONNECT = 2.0


def keep_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """The job's store, of which this process is the keeper. It listens where `host` is, and nowhere else.

    A store has no password: whoever reaches it can change the run.

    Args:
        host: by which the other ranks reach it. port: 0: any that is free.

    Raises:
        TrainingStopped: the port is taken, or the host unknown.
    """
    raise_open_files()  # every rank of the job connects to it
    try:
        listening = _listening(host, port)
        own, port = listening.getsockname()[:2]
        own = LOOPBACK if own == "::" or own == "0.0.0.0" else own
        fd = listening.detach()
        return dist.TCPStore(
            own, port, None, True, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=fd
        )
    except (OSError, dist.DistError) as error:
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        cause = f"cannot be opened for {host} ({cause_of(error)})"
        cause = "is taken: another job or program uses it. Choose another MASTER_PORT." if taken else cause
        raise TrainingStopped(f"port {port} of this node {cause}") from error


def _listening(host: str, port: int) -> socket.socket:
    """Takes connections at the first of the host's addresses that is one of this machine.

    An address that is none of this machine's (a load balancer's, a translated network's) may lead here all the same:
    then at that of the first interface in GLOO_SOCKET_IFNAME. Where none is named, and for a name that means the
    loopback here (Debian's 127.0.1.1) and so another address elsewhere, at all of them.
    """
    found = [(family, address) for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if host not in ("localhost", *(address[0] for _, address in found)):
        found = [(family, address) for family, address in found if not ip_address(address[0]).is_loopback]
    if found:
        for each in _named_interface():
            found.append((family_of(each), (each, port)))
    for family, address in found:
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    print(
        f"warning: {host} (MASTER_ADDR) is no address of this node that others reach, so the job's store listens on "
        "all interfaces: name one by its address, or keep MASTER_PORT closed to machines that are none of the job's.",
        file=sys.stderr,
        flush=True,
    )
    both = socket.has_dualstack_ipv6()
    return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)


def own_address() -> str:
    """Where other ranks reach this one: at the first interface in GLOO_SOCKET_IFNAME, as in a gloo group. Where none is
    named: on the way to MASTER_ADDR, or by this machine's name; at the loopback if that leads nowhere else."""
    found = _named_interface()
    with suppress(OSError):
        if host := os.environ.get("MASTER_ADDR"):
            for family, *_, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
                with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)  # sends nothing
                    own = str(probe.getsockname()[0])
                    found += [own] if host in ("localhost", own) or not ip_address(own).is_loopback else []
        named = {str(address[0]) for *_, address in socket.getaddrinfo(socket.gethostname(), 9)}
        found += sorted(each for each in named if not ip_address(each).is_loopback)
    return [*found, LOOPBACK][0]


def family_of(address: str) -> Literal[socket.AddressFamily.AF_INET, socket.AddressFamily.AF_INET6]:
    """Of an address in digits."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _named_interface() -> list[str]:
    """The addresses of the first interface in GLOO_SOCKET_IFNAME, which leads to the job's other nodes."""
    interface = psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0], [])
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [each.address for family in families for each in interface if each.family == family]
    return [each for each in addresses if not ip_address(each).is_link_local]


def reach_store(host: str, port: int, timeout: timedelta, end: float, tell: Callable[[str], None]) -> dist.Store:
    """The first node's store, as soon as it is there.

    Args:
        timeout: of calls to the store.
        end: on the monotonic clock. tell: hears what is seen, each time that the wait is long.

    Raises:
        TimeoutError: it did not come until `end`; says what was seen last.
        TrainingStopped: what answers there is no store. A first node that is late is nobody who answers.
    """
    seen = "no answer"
    rounds = patiently(end, lambda: tell(seen))
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
    """The store of the torchrun job that this process belongs to, its rank and the number of ranks.

    Raises:
        TrainingStopped: the store cannot be reached, or its port is taken, by whom others then find there.
    """
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = next(dist.rendezvous("env://", timeout=timeout))[0]
        elif rank == 0:  # torch's own would wait for all ranks, and not say which are missing
            store = keep_store(host, port, timeout)
        else:
            store = reach_store(host, port, timeout, time.monotonic() + timeout.total_seconds(), lambda seen: None)
    except (dist.DistError, OSError, ValueError, KeyError) as error:
        cause = f"is the first node up, and reachable? ({cause_of(error)})"
        raise TrainingStopped(f"no store at {address}: {cause}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"megaverl/job/{attempt}", store), rank, size


def store_at(host: str, port: int) -> dist.Store:
    """The store that is there.

    Raises:
        OSError: nobody listens there.
        TrainingStopped: somebody does who is no store.
    """
    for _ in range(2):  # a first node that was just ending is gone the second time
        socket.create_connection((host, port), timeout=_CONNECT).close()
        if store := _greeted(host, port):
            return store
    raise TrainingStopped(
        f"at {host}:{port} (MASTER_ADDR, MASTER_PORT) another program {_what_answers(host, port)}, and no job's store. "
        "Give all nodes another MASTER_PORT, or correct MASTER_ADDR."
    )


def patiently(end: float, tell: Callable[[], None]) -> Iterator[None]:
    """Rounds of a wait until `end` (monotonic seconds), of which `tell` says now and then that it goes on."""
    next_word = time.monotonic() + _FIRST_WORD
    yield
    while (now := time.monotonic()) < end:
        if now >= next_word:
            tell()
            next_word = now + _NEXT_WORD
        time.sleep(EVERY)
        yield


def _greeted(host: str, port: int) -> dist.Store | None:
    """A connection to the store there; None: it is none. On a thread, which may never come back."""
    found: list[dist.Store] = []

    def connect() -> None:
        try:
            # torch takes up to half as long again; without an answer for ever
            seconds = timedelta(seconds=GREETING / 2)
            found.append(dist.TCPStore(host, port, None, False, seconds, wait_for_workers=False))
        except dist.DistError:
            return

    thread = threading.Thread(target=connect, name="greeting", daemon=True)
    with _without_errors_of_torch():
        thread.start()
        thread.join(GREETING)
    return found[0] if found else None


def _what_answers(host: str, port: int) -> str:
    """Of a program that is no store: what it does when it is spoken to."""
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
    """Of a try that fails torch's C++ prints its stack, whatever its level; what is raised says enough."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
