"""Before any group is made: every rank says who it is, and all hear whether they fit together."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megaverl.distributed.placement import Node, ranks_named
from megaverl.errors import ConfigError, TrainingStopped

# How much longer the others wait for the first rank's verdict than it waits for them.
GRACE = timedelta(seconds=10)


@dataclass(frozen=True)
class NodeInfo:
    """What a rank says of itself.

    Attributes:
        node: name of its machine.
        claims: roles that the node's command line named.
        agreed: what must be the same everywhere, by name: digests of the configuration's sections, versions.
        sections: of the configuration, plain values by name; looked at where their digests differ.
        memory: bytes of its GPU; 0: it has none.
        agent: number of the torchrun agent that started it: two agents on one machine are two nodes.
    """

    node: str = field(default_factory=socket.gethostname)
    claims: tuple[str, ...] = ()
    agreed: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)
    process: int = field(default_factory=os.getpid)
    memory: float = 0.0
    agent: int = field(default_factory=lambda: int(os.environ.get("GROUP_RANK", "0")))


_SECTION = "configuration section "


def digests(sections: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, str]:
    """What `NodeInfo.agreed` wants: a digest of every section of the configuration, and versions as they are.

    Args:
        sections: name -> plain values (`Config.to_dict()`).
        versions: name -> version; "torch", "megatron-core", "megaverl", ...
    """

    def digest(value: Any) -> str:
        return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=6).hexdigest()

    found = {_SECTION + name: digest(value) for name, value in sections.items()}
    return found | {f"version of {name}": version for name, version in versions.items()}


def introduce(store: dist.Store, rank: int, size: int, facts: NodeInfo, timeout: timedelta) -> tuple[Node, ...]:
    """Say who this rank is; returns the job's nodes in the order of their ranks. Every rank takes part.

    Raises:
        ConfigError: nodes that differ in what must be the same, or whose ranks are not neighbours; every difference.
        TrainingStopped: ranks that did not come in time, or a rank that is there twice; by number, on every rank.
    """
    if (times := store.add(f"introductions/here/{rank}", 1)) > 1:
        raise TrainingStopped(_tell_of_two_jobs(store, rank, times, facts, timeout))
    told = {f"introductions/sections/{facts.agreed[_SECTION + name]}": each for name, each in facts.sections.items()}
    if told and not store.check(list(told)):  # one asks; who comes first, or differs, tells
        for key, section in told.items():
            store.set(key, json.dumps(section))
    store.set(f"introductions/facts/{rank}", json.dumps(asdict(replace(facts, sections={}))))
    if store.add("introductions/count", 1) == size:
        store.set("introductions/complete", "")
    if rank == 0:
        store.set("introductions/verdict", json.dumps(_verdict(store, size, timeout)))
    try:
        store.wait(["introductions/verdict"], timeout + GRACE)
    except dist.DistError as error:
        raise TrainingStopped(
            f"rank 0 did not come within {timeout.total_seconds():g} s (run.timeout_minutes); rank {rank} on "
            f"{facts.node} has waited. Look at the node with rank 0."
        ) from error
    verdict = json.loads(store.get("introductions/verdict"))
    store.add("introductions/heard", 1)
    if rank == 0:
        _until_heard(store, verdict["here"])
    if verdict["missing"]:
        raise TrainingStopped(verdict["missing"])
    if verdict["mistakes"]:
        raise ConfigError("\n  - ".join(["the nodes do not fit together:", *verdict["mistakes"]]))
    return tuple(Node(name, count, tuple(claims), memory) for name, count, claims, memory in verdict["nodes"])


def _tell_of_two_jobs(store: dist.Store, rank: int, times: int, facts: NodeInfo, timeout: timedelta) -> str:
    """What all ranks of both jobs are told; a job that has begun hears nothing of it, and goes on."""
    first = json.loads(store.get(f"introductions/facts/{rank}"))
    text = (
        f"rank {rank} is there {times} times: process {first['process']} on {first['node']} came first, then process "
        f"{facts.process} on {facts.node}. Two jobs use this rendezvous: end the other one, or give this one an "
        "address, a port and an id of its own."
    )
    store.compare_set("introductions/twice", "", text)
    store.add("introductions/count", 1)
    store.set("introductions/complete", "")
    try:
        store.wait(["introductions/verdict"], timeout + GRACE)
        verdict = json.loads(store.get("introductions/verdict"))
        store.add("introductions/heard", 1)
    except dist.DistError:
        return text
    return str(verdict["missing"] or text)


def _until_heard(store: dist.Store, count: int) -> None:
    """The store may end with this rank, if it raises what it has found: the others are to have heard it before."""
    end = time.monotonic() + GRACE.total_seconds()
    while store.add("introductions/heard", 0) < count and time.monotonic() < end:
        time.sleep(0.01)


def _verdict(store: dist.Store, size: int, timeout: timedelta) -> dict[str, Any]:
    """What the first rank finds: nodes, or what is wrong."""
    try:
        store.wait(["introductions/complete"], timeout)
    except dist.DistError:
        here = [rank for rank in range(size) if store.check([f"introductions/facts/{rank}"])]
        missing = sorted(set(range(size)) - set(here))
        nodes = sorted({json.loads(store.get(f"introductions/facts/{rank}"))["node"] for rank in here})
        text = (
            f"{ranks_named(missing)} of {size} did not come within {timeout.total_seconds():g} s "
            f"(run.timeout_minutes); here: {ranks_named(here)} on {', '.join(nodes)}. Look at the node that "
            "is missing, or start the job with fewer."
        )
        return {"missing": text, "mistakes": [], "nodes": [], "here": len(here)}
    if store.check(["introductions/twice"]):
        count = int(store.add("introductions/count", 0))
        return {"missing": store.get("introductions/twice").decode(), "mistakes": [], "nodes": [], "here": count}
    found = [json.loads(data) for data in store.multi_get([f"introductions/facts/{rank}" for rank in range(size)])]
    nodes, mistakes = _nodes(found)
    return {"missing": "", "mistakes": [*mistakes, *_differences(found, store)], "nodes": nodes, "here": size}


def _nodes(found: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, int, list[str], float]], list[str]]:
    """(name, ranks, claims, memory) of every node; and what is wrong. Nodes of one name are told apart by agent."""
    nodes: list[tuple[tuple[str, int], int, list[str], float]] = []
    mistakes = []
    for rank, facts in enumerate(found):
        key, claims, memory = (facts["node"], facts["agent"]), list(facts["claims"]), float(facts["memory"])
        if nodes and nodes[-1][0] == key:
            if claims != nodes[-1][2]:
                mistakes.append(f"node {key[0]}: rank {rank} claims {claims}, and the ranks before it {nodes[-1][2]}.")
            nodes[-1] = (key, nodes[-1][1] + 1, nodes[-1][2], min(nodes[-1][3], memory))
        elif any(key == other[0] for other in nodes):
            mistakes.append(
                f"node {key[0]}: rank {rank} is on it, and so are earlier ranks, with another node's between them. "
                "Names of nodes must differ, and a node's ranks be neighbours."
            )
        else:
            nodes.append((key, 1, claims, memory))
    names = [key[0] for key, *_ in nodes]
    return [
        (name if names.count(name) == 1 else f"{name}.{agent}", count, claims, memory)
        for (name, agent), count, claims, memory in nodes
    ], mistakes


def _differences(found: Sequence[Mapping[str, Any]], store: dist.Store) -> list[str]:
    """Every key of the configuration, and every version, in which ranks differ from the first one."""
    first = found[0]["agreed"]
    mistakes = []
    for name in sorted({name for facts in found for name in facts["agreed"]}):
        others: dict[str | None, list[int]] = {}
        for rank, facts in enumerate(found):
            others.setdefault(facts["agreed"].get(name), []).append(rank)
        for value, ranks in others.items():
            if value != first.get(name):
                on = ", ".join(dict.fromkeys(found[rank]["node"] for rank in ranks))
                for what, theirs, firsts in _inside(store, name, value, first.get(name)):
                    mistakes.append(
                        f"{what} differs: {theirs} on {ranks_named(ranks)} ({on}), {firsts} on rank 0 "
                        f"({found[0]['node']}). All nodes need the same."
                    )
    return mistakes


def _inside(store: dist.Store, name: str, value: str | None, first: str | None) -> list[tuple[str, Any, Any]]:
    """(what, theirs, the first's): the keys that differ of a section of the configuration, where both are known."""
    keys = [f"introductions/sections/{digest}" for digest in (value, first)]
    if not name.startswith(_SECTION) or not all(store.check([key]) for key in keys):
        return [(name, value, first)]
    theirs, firsts = (dict(_leaves(name.removeprefix(_SECTION), json.loads(store.get(key)))) for key in keys)
    differing = [key for key in {**firsts, **theirs} if theirs.get(key, "nothing") != firsts.get(key, "nothing")]
    return [(key, theirs.get(key, "nothing"), firsts.get(key, "nothing")) for key in differing]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """(dotted key, value as JSON) of everything in a section."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    else:
        yield name, json.dumps(value)
