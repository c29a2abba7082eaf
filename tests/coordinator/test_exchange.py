"""Reports, decisions and liveness on real ranks."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from megaverl.coordinator import Server, complete_set, tree_children, tree_parent
from megaverl.coordinator.decide import (
    DECISION_SIZE,
    REPORT_SIZE,
    Flag,
    GradientReport,
    Participant,
    Progress,
    Reason,
    Rules,
    Verdict,
)
from megaverl.distributed.liveness import Liveness, Timeouts
from megaverl.distributed.worlds import PendingSends
from tests.distributed.test_heartbeat import beat
from tests.launcher import Launcher


def test_decisions_reach_every_rank_of_every_role(launch: Launcher) -> None:
    ended = launch.ranks(4, "tests.coordinator.ranks:rounds", num=20)
    actor, same, critic, alone = ended.check()
    assert actor["seen"] == same["seen"], "the second rank hears what the first does"
    clip = 1.0 / (4.0 + 1e-6)
    assert [one[:4] for one in actor["seen"]] == [[0, 0, 1, clip], [0, 0, 2, clip]]
    assert [one[0:3] for one in critic["seen"]] == [[0, 0, 1], [Verdict.SKIP, Reason.STALE, 1]]
    assert [one[4] for one in critic["seen"]] == [0, 1] and critic["next_schedule"] == 1, "that of a skip waits"
    for told in (actor, same, critic, alone):
        assert "the run ends: critic: its loss or gradient is not finite" in told["stopped"]
    assert alone["progress"]["versions"] == {"actor": 22, "critic": 21}
    # the first rank of a role of two: a report, a decision, and the decision passed on
    assert actor["bytes"] == 8 * (REPORT_SIZE + 2 * DECISION_SIZE)
    assert critic["bytes"] == 8 * (REPORT_SIZE + DECISION_SIZE)
    for rank, told in enumerate((actor, same, critic, alone)):
        decides, collected, answer, error = told["committed"]
        assert decides == (rank == 3) and answer == {"by": 3} and error == "rank 3: the disk is full"
        assert collected == [*({"rank": other} for other in range(4)), 3], "on the rank that commits"


@pytest.mark.parametrize(
    ("rank", "how", "words"),
    [
        (1, "stalled", "rank 1 (actor+reward+rollout, here) stalls: it was in actor_update"),
        (1, "killed", "rank 1 (actor+reward+rollout, here) is gone: it was in actor_update"),
        (2, "killed", "rank 2 (critic, here) is gone: it was in critic_update"),
        (3, "killed", "rank 3 (coordinator, here) is gone: it was in start"),
    ],
)
def test_a_lost_rank_is_named_on_every_rank(launch: Launcher, rank: int, how: str, words: str) -> None:
    ended = launch.ranks(4, "tests.coordinator.ranks:lost", deadline=12.0, rank=rank, how=how)
    for other in range(4):
        if other == rank and how == "killed":
            continue
        told = str(ended.results[other]) + ended.output[other]
        assert words in told, (other, told)
        assert ended.seconds[other] < 11, "ended by itself"


@pytest.mark.parametrize("stage", ["values", "actor_update"])
def test_a_rank_that_waits_on_its_device_is_not_accused(launch: Launcher, stage: str) -> None:
    """Under NCCL a rank that waits for others is in no frame of torch.distributed, be it further or in that stage."""
    ended = launch.ranks(4, "tests.coordinator.ranks:waits_on_the_device", deadline=12.0, stage=stage)
    for result, output in zip(ended.results, ended.output, strict=True):
        told = str(result) + output
        assert "rank 1 (actor+reward+rollout, here) stalls: it was in step 2: values" in told
        assert "rank 0 (actor+reward+rollout, here) stalls" not in told


def test_a_role_that_does_not_report_with_its_partner(launch: Launcher) -> None:
    first, second, critic, alone = launch.ranks(4, "tests.coordinator.ranks:unheard", deadline=20.0).check()
    assert first == second == alone == "rank 2 (critic, here) died or stalled: no report of critic came"
    assert critic == ""


def test_reports_that_name_each_other_are_decided_on_together() -> None:
    def of(partners: int) -> GradientReport:
        return GradientReport(0, 0, 8.0, 1.0, partners=partners)

    assert complete_set({}) == complete_set({0: of(0b11)}) == complete_set({0: of(0b101), 1: of(0b101)}) == []
    assert complete_set({0: of(0b11), 1: of(0b11)}) == [0, 1]
    assert complete_set({0: of(0b11), 1: of(0b10)}) == [1], "the second is one update behind, alone"


def test_the_coordinators_own_role_goes_on_when_the_others_are_answered() -> None:
    """So that what a step has cost is known where it ends, whoever reported last."""
    ended, sent = threading.Event(), list[tuple[int, bool]]()

    def send(rank: int, name: str, numbers: object) -> PendingSends:
        sent.append((rank, server.own[0].empty()))
        return PendingSends()

    def receive(*given: object) -> list[float]:
        assert ended.wait(30)
        return GradientReport(0, 0, 0.0, 0.0, flags=Flag.DONE).numbers()

    participants = (Participant("actor", 0), Participant("critic", 1))
    fabric = SimpleNamespace(rank=0, timeout=timedelta(seconds=30))
    end: Any = SimpleNamespace(fabric=fabric, participants=participants, liveness=None, send=send, receive=receive)
    server = Server(end, Rules(), Progress())
    for step, order in enumerate(([0, 1], [1, 0])):
        for number in order:
            server.take(number, GradientReport(step, step, 8.0, 16.0, divided_by=8.0, partners=0b11))
        assert server.own[0].get_nowait().applies
    ended.set()
    server.close()
    assert sent == [(1, True)] * 2


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13])
def test_the_tree_reaches_every_rank_once(size: int) -> None:
    ranks, root = list(range(10, 10 + size)), 10 + size // 2
    reached = [child for rank in ranks for child in tree_children(ranks, root, rank)]
    assert sorted([*reached, root]) == ranks
    assert all(rank in tree_children(ranks, root, tree_parent(ranks, root, rank)) for rank in ranks if rank != root)


def test_who_keeps_the_store_is_named_when_it_is_silent_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    liveness = Liveness(store, 0, 1, coordinator=0, timeouts=Timeouts(stalled_after=9.0))
    liveness.leave()
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    keeper = "rank 0, which keeps the job's store,"
    assert liveness._without_a_store(silent=31.2) == f"{keeper} has not been heard of for 31 s: nothing was heard of it"
    liveness._seen[0] = (beat(doing="step 2: values", host="here"), 0.0)
    known = "it was in step 2: values for 3 s (process 7 on here)"
    assert liveness._without_a_store(silent=31.2) == f"{keeper} has not been heard of for 31 s: {known}"
    assert liveness._without_a_store(RuntimeError("reset")) == f"{keeper} is gone: {known}"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agent = "torchrun's agent, which keeps the job's store,"
    assert liveness._without_a_store(silent=31.2) == f"{agent} has not been heard of for 31 s"
    assert liveness._without_a_store(RuntimeError("reset")) == f"{agent} is gone (reset)"
