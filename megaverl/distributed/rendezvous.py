"""Rendezvous before any process group exists: first the agents of all nodes meet, then all ranks introduce themselves.

Every participant learns whether they fit together, and which ones are missing. torch's
own rendezvous blocks for ten minutes in a call that no signal interrupts, logs nothing
meanwhile, and then shows a traceback.

    meet():       nodes write who they are -> node 0 decides -> all nodes read the verdict
    introduce():  ranks write NodeInfo     -> rank 0 decides -> all ranks read the verdict
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from megaverl.distributed.failures import cause_of
from megaverl.distributed.placement import Node, ranks_named
from megaverl.distributed.store import keep_store, patiently, reach_store
from megaverl.errors import ConfigError, TrainingStopped

# Extra seconds that the others wait for the verdict of the first node or rank, after it
# has stopped waiting for them.
NODE_GRACE, RANK_GRACE = 5.0, 10.0
STRANGER = 10.0  # seconds within which the host of a store identifies its job
_CALL = timedelta(seconds=10)
_WRONG, _VERDICT, _HEARD, _JOB = (
    "agents/wrong",
    "agents/verdict",
    "agents/heard",
    "agents/job",
)


def meet(host: str, port: int, node: int, count: int, patience: float) -> dist.Store:
    """Wait until the agents of all nodes are here, before any of them starts its ranks.

    Args:
        host: host of the first node.
        port: port of its store.
        node: number of this node.
        count: number of nodes.
        patience: seconds to wait for the others.

    Returns:
        The store, which the first node hosts. Keep a reference to it.

    Raises:
        TrainingStopped: nodes are missing, two nodes have the same number, or the port is taken. All nodes that reached
            the first node's store raise the same message; nodes that find another program there raise within seconds.
    """
    end, me = (
        time.monotonic() + patience,
        f"process {os.getpid()} on {socket.gethostname()}",
    )
    if node == 0:
        store: dist.Store = keep_store(host, port, _CALL)
    else:
        try:
            store = reach_store(
                host,
                port,
                _CALL,
                end,
                lambda seen: _tell(f"node 0 at {host}:{port} ({seen})", end),
            )
        except TimeoutError as error:
            raise TrainingStopped(
                f"node 0 did not come within {patience:g} s (JOIN_MINUTES) at {host}:{port} (MASTER_ADDR, "
                f"MASTER_PORT), where node {node}, {me}, has looked for it: {error}."
            ) from error
    try:
        if node == 0:
            store.set(_JOB, f"{count} {me}")
        _find_others(store, f"{host}:{port}", node, count, me, end)
        store.set(_who(node), me)
        if node == 0:
            verdict = _verdict_on_nodes(store, count, end, patience)
            store.set(_VERDICT, verdict)
        else:
            _until(
                lambda: store.check([_VERDICT]),
                end + NODE_GRACE,
                lambda: _tell(_waiting(store, count), end),
            )
            verdict = store.get(_VERDICT).decode()
        # Node 0 hosts the store, and must not end before the others have read a bad
        # verdict.
        store.add(_HEARD, 1)
        if node == 0 and verdict:
            num_present = count - len(_missing(store, count))
            _until(
                lambda: store.add(_HEARD, 0) >= num_present,
                time.monotonic() + NODE_GRACE,
            )
    except dist.DistError as error:
        raise TrainingStopped(
            f"node 0 at {host}:{port} has ended, or cannot be reached any more ({cause_of(error)})"
        ) from error
    if verdict:
        raise TrainingStopped(verdict)
    return store


def _find_others(
    store: dist.Store, address: str, node: int, count: int, me: str, end: float
) -> None:
    """Check that the store belongs to this job, and that no other node has this number.

    Raises:
        TrainingStopped: the check failed. Other nodes that wait here raise it too.
    """
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
        wrong = (
            f"{_twice(f'node {node}', times, store.get(_who(node)).decode(), me)} Two jobs, or two nodes with one "
            f"NODE_RANK, use {address}: end one of them, or give this one another MASTER_PORT."
        )
    if wrong:
        store.compare_set(_WRONG, "", wrong)
        with suppress(dist.DistError):  # node 0 may have read it and ended
            _until(
                lambda: store.check([_VERDICT]), min(end, time.monotonic() + NODE_GRACE)
            )
        raise TrainingStopped(wrong)


def _verdict_on_nodes(
    store: dist.Store, count: int, end: float, patience: float
) -> str:
    """Return the first node's verdict: what is wrong, or "" if all nodes are here."""
    everyone = [_who(node) for node in range(count)]
    _until(
        lambda: store.check(everyone) or store.check([_WRONG]),
        end,
        lambda: _tell(_waiting(store, count), end),
    )
    if store.check([_WRONG]):
        return store.get(_WRONG).decode()
    if not (absent := _missing(store, count)):
        return ""
    present = [
        store.get(_who(node)).decode() for node in range(count) if node not in absent
    ]
    return (
        f"{ranks_named(absent, noun='node')} of {count} did not come within {patience:g} s (JOIN_MINUTES). Here: "
        f"{', '.join(present)}. Look at what is missing (NODE_RANK counts from 0), or start the job with fewer "
        "(NNODES)."
    )


def _who(node: int) -> str:
    return f"agents/who/{node}"


def _missing(store: dist.Store, count: int) -> list[int]:
    return [node for node in range(count) if not store.check([_who(node)])]


def _waiting(store: dist.Store, count: int) -> str:
    absent = _missing(store, count)
    return f"{ranks_named(absent, noun='node')} of {count}" if absent else "node 0"


def _tell(awaited: str, end: float) -> None:
    left = max(0.0, end - time.monotonic())
    print(
        f"waiting for {awaited}, for {left:.0f} s more at most (JOIN_MINUTES)",
        file=sys.stderr,
        flush=True,
    )


def _until(
    holds: Callable[[], bool], end: float, tell: Callable[[], None] = lambda: None
) -> bool:
    return any(holds() for _ in patiently(end, tell))


def _twice(name: str, times: int, first: str, second: str) -> str:
    return f"{name} is there {times} times: {first} came first, then {second}."


@dataclass(frozen=True)
class NodeInfo:
    """Description of a rank.

    Attributes:
        node: name of its machine.
        claims: roles that the node's command line names.
        agreed: values that must be the same everywhere, by name: digests of the configuration's sections, and versions.
        sections: sections of the configuration as plain values, compared if their digests differ.
        process: process id.
        memory: bytes of memory of its GPU; 0 without one.
        agent: number of the torchrun agent that started it. Two agents on one machine are two nodes.
    """

    node: str = field(default_factory=socket.gethostname)
    claims: tuple[str, ...] = ()
    agreed: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)
    process: int = field(default_factory=os.getpid)
    memory: float = 0.0
    agent: int = field(default_factory=lambda: int(os.environ.get("GROUP_RANK", "0")))


class _Verdict(msgspec.Struct):
    """Verdict of rank 0 on the ranks of a job.

    Attributes:
        here: number of ranks that will read it.
        stop: why the job stops, or "".
        mistakes: differences between the nodes.
        nodes: nodes in the order of their ranks.
    """

    here: int
    stop: str = ""
    mistakes: list[str] = []
    nodes: tuple[Node, ...] = ()


_SECTION = "configuration section "


def digests(sections: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, str]:
    """Return `NodeInfo.agreed`: a digest of every section of the configuration, and the versions.

    Args:
        sections: name -> plain values (`Config.to_dict()`).
        versions: name -> version, such as "torch", "megatron-core" and "megaverl".
    """

    def digest(value: Any) -> str:
        return hashlib.blake2b(
            json.dumps(value, sort_keys=True).encode(), digest_size=6
        ).hexdigest()

    section_digests = {
        _SECTION + name: digest(value) for name, value in sections.items()
    }
    return section_digests | {
        f"version of {name}": version for name, version in versions.items()
    }


def introduce(
    store: dist.Store, rank: int, size: int, facts: NodeInfo, timeout: timedelta
) -> tuple[Node, ...]:
    """Publish this rank's description, and return the job's nodes in the order of their ranks. Collective over the job.

    Raises:
        ConfigError: nodes differ in values that must agree, or a node's ranks are not adjacent. Lists every difference.
        TrainingStopped: ranks did not arrive in time, or a rank exists twice. Names the ranks, and is raised on every
            rank.
    """
    store = dist.PrefixStore("introductions", store)
    # A counter detects two processes with one rank, which happens if two jobs use the
    # same store.
    if (times := store.add(f"here/{rank}", 1)) > 1:
        raise TrainingStopped(_stop_two_jobs(store, rank, times, facts, timeout))
    sections = {
        f"sections/{facts.agreed[_SECTION + name]}": section
        for name, section in facts.sections.items()
    }
    # Only the first rank with these digests writes its sections.
    if sections and not store.check(list(sections)):
        for key, section in sections.items():
            store.set(key, json.dumps(section))
    store.set(f"facts/{rank}", _encode(replace(facts, sections={})))
    if store.add("count", 1) == size:
        store.set("complete", "")
    if rank == 0:
        store.set("verdict", _encode(_verdict_on_ranks(store, size, timeout)))
    try:
        verdict = _hear(store, timeout)
    except dist.DistError as error:
        raise TrainingStopped(
            f"rank 0 did not come within {timeout.total_seconds():g} s (run.timeout_minutes); rank {rank} on "
            f"{facts.node} has waited. Look at the node with rank 0."
        ) from error
    # The store may end with this rank, so wait until all ranks have read the verdict.
    if rank == 0:
        _until(
            lambda: store.add("heard", 0) >= verdict.here,
            time.monotonic() + RANK_GRACE,
        )
    if verdict.stop:
        raise TrainingStopped(verdict.stop)
    if verdict.mistakes:
        raise ConfigError(
            "\n  - ".join(["the nodes do not fit together:", *verdict.mistakes])
        )
    return verdict.nodes


def _encode(value: NodeInfo | _Verdict) -> str:
    return msgspec.json.encode(value).decode()


def _facts_of(store: dist.Store, rank: int) -> NodeInfo:
    return msgspec.json.decode(store.get(f"facts/{rank}"), type=NodeInfo)


def _hear(store: dist.Store, timeout: timedelta) -> _Verdict:
    store.wait(["verdict"], timeout + timedelta(seconds=RANK_GRACE))
    verdict = msgspec.json.decode(store.get("verdict"), type=_Verdict)
    store.add("heard", 1)
    return verdict


def _stop_two_jobs(
    store: dist.Store, rank: int, times: int, facts: NodeInfo, timeout: timedelta
) -> str:
    """Return the message for all ranks of two jobs that use one store.

    A job that has already begun does not read it, and continues.
    """
    earlier, later = (
        f"process {process_facts.process} on {process_facts.node}"
        for process_facts in (_facts_of(store, rank), facts)
    )
    text = (
        f"{_twice(f'rank {rank}', times, earlier, later)} Two jobs use this rendezvous: end the other one, or "
        "give this one an address, a port and an id of its own."
    )
    store.compare_set("twice", "", text)
    store.add("count", 1)
    store.set("complete", "")
    try:
        return _hear(store, timeout).stop or text
    except dist.DistError:
        return text


def _verdict_on_ranks(store: dist.Store, size: int, timeout: timedelta) -> _Verdict:
    try:
        store.wait(["complete"], timeout)
    except dist.DistError:
        present = [rank for rank in range(size) if store.check([f"facts/{rank}"])]
        missing = sorted(set(range(size)) - set(present))
        nodes = sorted({_facts_of(store, rank).node for rank in present})
        text = (
            f"{ranks_named(missing)} of {size} did not come within {timeout.total_seconds():g} s "
            f"(run.timeout_minutes); here: {ranks_named(present)} on {', '.join(nodes)}. Look at the node that "
            "is missing, or start the job with fewer."
        )
        return _Verdict(len(present), text)
    if store.check(["twice"]):
        return _Verdict(store.add("count", 0), store.get("twice").decode())
    rank_facts = [
        msgspec.json.decode(data, type=NodeInfo)
        for data in store.multi_get([f"facts/{rank}" for rank in range(size)])
    ]
    nodes_found, mistakes = _nodes_of(rank_facts)
    mistakes += _differences(rank_facts, store)
    return _Verdict(size, mistakes=mistakes, nodes=nodes_found)


def _nodes_of(
    records: Sequence[NodeInfo],
) -> tuple[tuple[Node, ...], list[str]]:
    """Return every node, and what is wrong. Nodes with the same name are told apart by agent."""
    nodes: list[Node] = []
    keys: list[tuple[str, int]] = []
    mistakes = []
    for rank, facts in enumerate(records):
        key = (facts.node, facts.agent)
        if keys and keys[-1] == key:
            node = nodes[-1]
            if facts.claims != node.claims:
                mistakes.append(
                    f"node {node.name}: rank {rank} claims {list(facts.claims)}, and the ranks before it "
                    f"{list(node.claims)}."
                )
            memory = min(node.memory, facts.memory)
            nodes[-1] = replace(node, size=node.size + 1, memory=memory)
        elif key in keys:
            mistakes.append(
                f"node {facts.node}: rank {rank} is on it, and so are earlier ranks, with another node's between them. "
                "Names of nodes must differ, and a node's ranks be neighbours."
            )
        else:
            keys.append(key)
            nodes.append(Node(facts.node, 1, facts.claims, facts.memory))
    names = [node.name for node in nodes]
    named = (
        node if names.count(node.name) == 1 else replace(node, name=f"{name}.{agent}")
        for node, (name, agent) in zip(nodes, keys, strict=True)
    )
    return tuple(named), mistakes


def _differences(records: Sequence[NodeInfo], store: dist.Store) -> list[str]:
    """Return a message for every configuration key and version in which ranks differ from rank 0."""
    first = records[0].agreed
    mistakes = []
    for name in sorted({name for facts in records for name in facts.agreed}):
        ranks_by_value: dict[str | None, list[int]] = {}
        for rank, facts in enumerate(records):
            ranks_by_value.setdefault(facts.agreed.get(name), []).append(rank)
        for value, ranks in ranks_by_value.items():
            if value != first.get(name):
                on = ", ".join(dict.fromkeys(records[rank].node for rank in ranks))
                for setting, other_value, firsts in _inside(
                    store, name, value, first.get(name)
                ):
                    mistakes.append(
                        f"{setting} differs: {other_value} on {ranks_named(ranks)} ({on}), {firsts} on rank 0 "
                        f"({records[0].node}). All nodes need the same."
                    )
    return mistakes


def _inside(
    store: dist.Store, name: str, value: str | None, first: str | None
) -> list[tuple[str, Any, Any]]:
    """Return (key, their value, rank 0's value) of the differing keys of a section, if both sections are known."""
    keys = [f"sections/{digest}" for digest in (value, first)]
    if not name.startswith(_SECTION) or not all(store.check([key]) for key in keys):
        return [(name, value, first)]
    other_leaves, firsts = (
        dict(_leaves(name.removeprefix(_SECTION), json.loads(store.get(key))))
        for key in keys
    )
    differing = [
        key
        for key in {**firsts, **other_leaves}
        if other_leaves.get(key, "nothing") != firsts.get(key, "nothing")
    ]
    return [
        (key, other_leaves.get(key, "nothing"), firsts.get(key, "nothing"))
        for key in differing
    ]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as JSON) of every leaf of a section."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    else:
        yield name, json.dumps(value)
