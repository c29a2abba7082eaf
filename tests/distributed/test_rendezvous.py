"""Who comes, who does not, and who does not fit: on threads that share a store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megaverl.distributed import rendezvous
from megaverl.distributed.placement import Node
from megaverl.distributed.rendezvous import NodeInfo, digests, introduce
from megaverl.errors import ConfigError, TrainingStopped

SHORT = timedelta(seconds=0.3)


def meet(
    facts: dict[int, NodeInfo], size: int, timeout: timedelta = SHORT
) -> list[object]:
    """What every rank is told."""
    store = dist.HashStore()

    def one(rank: int) -> object:
        try:
            return introduce(store, rank, size, facts[rank], timeout)
        except (ConfigError, TrainingStopped) as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, facts))


def test_all_hear_of_the_nodes() -> None:
    agreed = {"version": "1"}
    facts = {
        0: NodeInfo("a", ("actor",), agreed, memory=9e9),
        1: NodeInfo("a", ("actor",), agreed, memory=8e9),
        2: NodeInfo("b", ("rollout",), agreed),
    }
    found = meet(facts, 3, timedelta(seconds=20))
    assert found == [(Node("a", 2, ("actor",), 8e9), Node("b", 1, ("rollout",)))] * 3


def test_every_difference_is_told_to_all() -> None:
    facts = {
        0: NodeInfo("a", (), {"torch": "2.13", "algorithm": "x1"}),
        1: NodeInfo("b", (), {"torch": "2.12", "algorithm": "x2"}),
        2: NodeInfo("a", (), {"torch": "2.13"}),
    }
    found = meet(facts, 3, timedelta(seconds=20))
    assert all(isinstance(error, ConfigError) for error in found)
    assert len({str(error) for error in found}) == 1
    for words in (
        "torch differs: 2.12 on rank 1 (b), 2.13 on rank 0 (a)",
        "algorithm differs: x2 on rank 1 (b), x1",
        "algorithm differs: None on rank 2",
        "node a: rank 2 is on it, and so are earlier ranks",
    ):
        assert words in str(found[0])


def test_keys_of_the_configuration_are_named() -> None:
    first = {
        "actor": {"optimizer": {"lr": 1e-6, "clip_grad": 1.0}},
        "data": {"train": ["a"]},
    }
    other = {"actor": {"optimizer": {"lr": 1e-5, "eps": 2.0}}, "data": {"train": ["a"]}}
    given = {0: first, 1: other, 2: first}
    facts = {
        n: NodeInfo("abc"[n], agreed=digests(said, {"torch": "2"}), sections=said)
        for n, said in given.items()
    }
    (told,) = {str(error) for error in meet(facts, 3, timedelta(seconds=20))}
    assert told == "\n  - ".join(
        ["the nodes do not fit together:"]
        + [
            f"actor.optimizer.{what} on rank 0 (a). All nodes need the same."
            for what in (
                "lr differs: 1e-05 on rank 1 (b), 1e-06",
                "clip_grad differs: nothing on rank 1 (b), 1.0",
                "eps differs: 2.0 on rank 1 (b), nothing",
            )
        ]
    )


def test_a_rank_that_does_not_come_is_named_on_all() -> None:
    found = meet({0: NodeInfo("a"), 1: NodeInfo("b")}, 4)
    assert all(
        "ranks 2-3 of 4 did not come within 0.3 s" in str(error) for error in found
    )
    assert all("here: ranks 0-1 on a, b" in str(error) for error in found)


def test_a_first_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RANK_GRACE", 0.1)
    (error,) = meet({1: NodeInfo("b")}, 2)
    assert "rank 0 did not come within 0.3 s" in str(error)


def test_another_job_at_the_same_rendezvous() -> None:
    store = dist.HashStore()
    introduce(store, 0, 1, NodeInfo("a", process=11), SHORT)
    with pytest.raises(
        TrainingStopped,
        match="rank 0 is there 2 times: process 11 on a came first, then process 12 on b",
    ):
        introduce(store, 0, 1, NodeInfo("b", process=12), SHORT)


def test_a_section_that_differs_has_another_digest() -> None:
    one, other = ({"actor": {"tp": tp}, "data": {"train": ["x"]}} for tp in (1, 2))
    first, second = digests(one, {"torch": "2.13"}), digests(other, {"torch": "2.13"})
    assert [name for name in first if first[name] != second[name]] == [
        "configuration section actor"
    ]
    assert first["version of torch"] == "2.13"
