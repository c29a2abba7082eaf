"""Before torchrun's agents start any rank: those of all nodes meet, or each says who is missing, and ends.

torch's own waits for ten minutes in a call that no signal ends, says nothing meanwhile, and then shows a traceback.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from megaverl.errors import TrainingStopped
from megaverl.placement import ranks_text

GRACE = 5.0  # seconds that others are given to hear the first node's verdict
_EVERY = 0.1
_CALL = timedelta(seconds=10)


def meet(host: str, port: int, node: int, count: int, patience: float) -> dist.Store:
    """Returns when the agents of all nodes are here, with the store that the first one keeps: hold on to it.

    Args:
        host, port: of the first node. node: number of this one. patience: seconds.

    Raises:
        TrainingStopped: nodes that did not come, a number that two nodes have, a port that is taken; the same words on
            all of them.
    """
    end = time.monotonic() + patience
    store = _first_store(port) if node == 0 else _store_of(host, port, node, end, patience)
    try:
        times = store.add(f"agents/here/{node}", 1)
        me = f"process {os.getpid()} on {socket.gethostname()}"
        if times > 1:
            first = store.get(f"agents/who/{node}").decode()
            twice = (
                f"node {node} is there {times} times: {first} came first, then {me}. Two jobs, or two nodes with one "
                f"NODE_RANK, use {host}:{port}: end one of them, or give this one another MASTER_PORT."
            )
            store.compare_set("agents/twice", "", twice)
            _until(lambda: store.check(["agents/verdict"]), min(end, time.monotonic() + GRACE))
            raise TrainingStopped(twice)
        store.set(f"agents/who/{node}", me)
        if node == 0:
            verdict = _verdict(store, count, end, patience)
            store.set("agents/verdict", verdict)
        else:
            _until(lambda: store.check(["agents/verdict"]), end + GRACE)
            verdict = store.get("agents/verdict").decode()
        store.add("agents/heard", 1)
        if node == 0 and verdict:
            here = sum(store.check([f"agents/who/{other}"]) for other in range(count))
            _until(lambda: store.add("agents/heard", 0) >= here, time.monotonic() + GRACE)
    except dist.DistError as error:
        raise TrainingStopped(
            f"node 0 at {host}:{port} has ended, or cannot be reached any more ({str(error).splitlines()[0][:160]})"
        ) from error
    if verdict:
        raise TrainingStopped(verdict)
    return store


def _verdict(store: dist.Store, count: int, end: float, patience: float) -> str:
    """What is wrong, as the first node sees it; empty: all are here."""

    def missing() -> list[int]:
        return [node for node in range(count) if not store.check([f"agents/who/{node}"])]

    _until(lambda: not missing() or store.check(["agents/twice"]), end)
    if store.check(["agents/twice"]):
        return store.get("agents/twice").decode()
    if not (absent := missing()):
        return ""
    here = [store.get(f"agents/who/{node}").decode() for node in range(count) if node not in absent]
    nodes = f"node{'s' * (len(absent) > 1)} {ranks_text(absent)}"
    return (
        f"{nodes} of {count} did not come within {patience:g} s (JOIN_MINUTES). Here: {', '.join(here)}. Look at what "
        "is missing (NODE_RANK counts from 0), or start the job with fewer (NNODES)."
    )


def _first_store(port: int) -> dist.Store:
    try:
        return dist.TCPStore("localhost", port, None, True, _CALL, wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        taken = "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
        cause = f"cannot be opened ({str(error).splitlines()[0][:160]})"
        cause = "is taken: another job or program uses it. Choose another MASTER_PORT." if taken else cause
        raise TrainingStopped(f"port {port} of this node {cause}") from error


def _store_of(host: str, port: int, node: int, end: float, patience: float) -> dist.Store:
    """The first node's, as soon as it is there."""
    said = "no answer"
    while time.monotonic() < end:
        try:
            socket.create_connection((host, port), timeout=2.0).close()
            with _without_errors_of_torch():
                return dist.TCPStore(host, port, None, False, _CALL, wait_for_workers=False)
        except OSError as error:
            said = str(error)
        except dist.DistError as error:
            said = f"what answers is no job's store ({str(error).splitlines()[0][:100]})"
        time.sleep(_EVERY)
    raise TrainingStopped(
        f"node 0 did not come within {patience:g} s (JOIN_MINUTES) at {host}:{port} (MASTER_ADDR, MASTER_PORT), where "
        f"node {node}, process {os.getpid()} on {socket.gethostname()}, has looked for it: {said}."
    )


@contextmanager
def _without_errors_of_torch() -> Iterator[None]:
    """Of a try that fails torch's C++ prints its stack, whatever its level; what it raises says enough."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _until(holds: Callable[[], bool], end: float) -> None:
    while not holds() and time.monotonic() < end:
        time.sleep(_EVERY)
