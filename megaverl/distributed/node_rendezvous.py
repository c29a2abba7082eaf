"""Before torchrun's agents start any rank: those of all nodes meet, or each says who is missing, and ends.

torch's own waits for ten minutes in a call that no signal ends, says nothing meanwhile, and then shows a traceback.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from megaverl.distributed.placement import ranks_text
from megaverl.distributed.store import keep_store, patiently, reach_store
from megaverl.errors import TrainingStopped

GRACE = 5.0  # seconds that others are given to hear the first node's verdict
STRANGER = 10.0  # seconds within which a store's keeper says whose it is
_CALL = timedelta(seconds=10)
_WRONG, _VERDICT, _HEARD, _JOB = "agents/wrong", "agents/verdict", "agents/heard", "agents/job"


def meet(host: str, port: int, node: int, count: int, patience: float) -> dist.Store:
    """Returns when the agents of all nodes are here, with the store that the first one keeps: hold on to it.

    Args:
        host, port: of the first node. node: number of this one. patience: seconds.

    Raises:
        TrainingStopped: nodes that did not come, a number that two nodes have, a port that is taken; the same words on
            all that have come to the first node's store, and within seconds on those that find something else there.
    """
    end = time.monotonic() + patience
    me = f"process {os.getpid()} on {socket.gethostname()}"
    store = keep_store(host, port, _CALL) if node == 0 else _store_of(host, port, node, end, patience)
    try:
        if node == 0:
            store.set(_JOB, f"{count} {me}")
        _find_others(store, f"{host}:{port}", node, count, me, end)
        store.set(_who(node), me)
        if node == 0:
            verdict = _verdict(store, count, end, patience)
            store.set(_VERDICT, verdict)
        else:
            _until(lambda: store.check([_VERDICT]), end + GRACE, lambda: _tell(_waiting(store, count), end))
            verdict = store.get(_VERDICT).decode()
        store.add(_HEARD, 1)
        if node == 0 and verdict:
            here = count - len(_missing(store, count))
            _until(lambda: store.add(_HEARD, 0) >= here, time.monotonic() + GRACE)
    except dist.DistError as error:
        raise TrainingStopped(
            f"node 0 at {host}:{port} has ended, or cannot be reached any more ({str(error).splitlines()[0][:160]})"
        ) from error
    if verdict:
        raise TrainingStopped(verdict)
    return store


def _find_others(store: dist.Store, address: str, node: int, count: int, me: str, end: float) -> None:
    """Raise a TrainingStopped, for all who wait here, if the store is another job's or another has this number."""
    if not _until(lambda: store.check([_JOB]), min(end, time.monotonic() + STRANGER)):
        raise TrainingStopped(
            f"{address} (MASTER_ADDR, MASTER_PORT) is the store of another program of torch, such as a job that "
            f"torchrun started, and of no node 0 of this one. Give all nodes another MASTER_PORT. Here: {me}."
        )
    number, _, keeper = store.get(_JOB).decode().partition(" ")
    wrong = ""
    if int(number) != count:
        wrong = (
            f"node 0 at {address} ({keeper}) is that of a job of {number} nodes, and node {node} ({me}) of one of "
            f"{count} (NNODES). Give all nodes one NNODES, or, if these are two jobs, one of them another MASTER_PORT."
        )
    elif (times := store.add(f"agents/here/{node}", 1)) > 1:
        first = store.get(_who(node)).decode()
        wrong = (
            f"node {node} is there {times} times: {first} came first, then {me}. Two jobs, or two nodes with one "
            f"NODE_RANK, use {address}: end one of them, or give this one another MASTER_PORT."
        )
    if wrong:
        store.compare_set(_WRONG, "", wrong)
        _until(lambda: store.check([_VERDICT]), min(end, time.monotonic() + GRACE))
        raise TrainingStopped(wrong)


def _verdict(store: dist.Store, count: int, end: float, patience: float) -> str:
    """What is wrong, as the first node sees it; empty: all are here."""
    everyone = [_who(node) for node in range(count)]
    _until(lambda: store.check(everyone) or store.check([_WRONG]), end, lambda: _tell(_waiting(store, count), end))
    if store.check([_WRONG]):
        return store.get(_WRONG).decode()
    if not (absent := _missing(store, count)):
        return ""
    here = [store.get(_who(node)).decode() for node in range(count) if node not in absent]
    return (
        f"{_nodes(absent)} of {count} did not come within {patience:g} s (JOIN_MINUTES). Here: {', '.join(here)}. Look "
        "at what is missing (NODE_RANK counts from 0), or start the job with fewer (NNODES)."
    )


def _store_of(host: str, port: int, node: int, end: float, patience: float) -> dist.Store:
    """The first node's, as soon as it is there."""
    found = reach_store(host, port, _CALL, end, lambda seen: _tell(f"node 0 at {host}:{port} ({seen})", end))
    if not isinstance(found, str):
        return found
    raise TrainingStopped(
        f"node 0 did not come within {patience:g} s (JOIN_MINUTES) at {host}:{port} (MASTER_ADDR, MASTER_PORT), where "
        f"node {node}, process {os.getpid()} on {socket.gethostname()}, has looked for it: {found}."
    )


def _who(node: int) -> str:
    return f"agents/who/{node}"


def _missing(store: dist.Store, count: int) -> list[int]:
    return [node for node in range(count) if not store.check([_who(node)])]


def _waiting(store: dist.Store, count: int) -> str:
    absent = _missing(store, count)
    return f"{_nodes(absent)} of {count}" if absent else "node 0"


def _nodes(numbers: list[int]) -> str:
    return f"node{'s' * (len(numbers) > 1)} {ranks_text(numbers)}"


def _tell(what: str, end: float) -> None:
    left = max(0.0, end - time.monotonic())
    print(f"waiting for {what}, for {left:.0f} s more at most (JOIN_MINUTES)", file=sys.stderr, flush=True)


def _until(holds: Callable[[], bool], end: float, tell: Callable[[], None] = lambda: None) -> bool:
    return any(holds() for _ in patiently(end, tell))
