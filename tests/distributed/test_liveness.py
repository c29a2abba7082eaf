"""Lost and stalled ranks of a job, which liveness names on every rank; and who commits checkpoints."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from megaverl.distributed.heartbeat import RankWatch
from megaverl.distributed.liveness import Liveness
from tests.distributed.test_heartbeat import beat
from tests.launcher import Launcher


def test_the_coordinator_commits_for_all(launch: Launcher) -> None:
    ended = launch.ranks(4, "tests.distributed.liveness_ranks:committed")
    for rank, (decides, collected, answer, error) in enumerate(ended.check()):
        assert (
            decides == (rank == 3)
            and answer == {"by": 3}
            and error == "rank 3: the disk is full"
        )
        assert collected == [*({"rank": other} for other in range(4)), 3], (
            "on the rank that commits"
        )


@pytest.mark.parametrize(
    ("rank", "how", "words"),
    [
        (
            1,
            "stalled",
            "rank 1 (actor+reward+rollout, here) stalls: it was in actor_update",
        ),
        (
            1,
            "killed",
            "rank 1 (actor+reward+rollout, here) is gone: it was in actor_update",
        ),
        (2, "killed", "rank 2 (critic, here) is gone: it was in critic_update"),
        (3, "killed", "rank 3 (coordinator, here) is gone: it was in wait"),
    ],
)
def test_a_lost_rank_is_named_on_every_rank(
    launch: Launcher, rank: int, how: str, words: str
) -> None:
    ended = launch.ranks(
        4, "tests.distributed.liveness_ranks:lost", deadline=12.0, rank=rank, how=how
    )
    for other in range(4):
        if other == rank and how == "killed":
            continue
        told = str(ended.results[other]) + ended.output[other]
        assert words in told, (other, told)
        assert ended.seconds[other] < 11, "ended by itself"


@pytest.mark.parametrize("stage", ["values", "actor_update"])
def test_a_rank_that_waits_on_its_device_is_not_accused(
    launch: Launcher, stage: str
) -> None:
    """Under NCCL a rank that waits for others is in no frame of torch.distributed, be it further or in that stage."""
    ended = launch.ranks(
        4,
        "tests.distributed.liveness_ranks:waits_on_the_device",
        deadline=12.0,
        stage=stage,
    )
    for result, output in zip(ended.results, ended.output, strict=True):
        told = str(result) + output
        assert (
            "rank 1 (actor+reward+rollout, here) stalls: it was in step 2: values"
            in told
        )
        assert "rank 0 (actor+reward+rollout, here) stalls" not in told


def test_a_program_watches_the_ranks_by_itself() -> None:
    """Meanwhile the other ranks may be silent for as long as they like, and the coordinator's heartbeat goes on."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = RankWatch(stalled_after=9.0, interval=0.05, lost_after=0.6)
    ended: list[int] = []

    def join(rank: int) -> Liveness:
        return Liveness(store, rank, 2, coordinator=0, watch=watch, end=ended.append)

    with ThreadPoolExecutor() as threads:
        first, second = threads.map(join, range(2))
    # The coordinator has read both heartbeats.
    time.sleep(3 * watch.interval)
    with second.handed_over():
        with first.handed_over():
            for liveness in (second, first):
                liveness.answer()
                liveness.status("values", 1)
            time.sleep(3 * watch.lost_after)
            assert (first.failure_reason, second.failure_reason) == (None, None)
            assert second.last_heard(0).startswith("it was in step 1: values for")
        # The coordinator's rank is the first to come back.
        time.sleep(3 * watch.interval)
        assert first.failure_reason is None
    time.sleep(3 * watch.interval)
    assert first.last_heard(1).startswith("it was in step 1: values for")
    assert (first.failure_reason, ended) == (None, [])
    first.leave()
    second.leave()


def test_who_keeps_the_store_is_named_when_it_is_silent_or_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    liveness = Liveness(store, 0, 1, coordinator=0, watch=RankWatch(stalled_after=9.0))
    liveness.leave()
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    keeper = "rank 0, which keeps the job's store,"
    assert (
        liveness._without_a_store(silent=31.2)
        == f"{keeper} has not been heard of for 31 s: nothing was heard of it"
    )
    liveness._seen[0] = (beat(doing="step 2: values", host="here"), 0.0)
    known = "it was in step 2: values for 3 s (process 7 on here)"
    assert (
        liveness._without_a_store(silent=31.2)
        == f"{keeper} has not been heard of for 31 s: {known}"
    )
    assert (
        liveness._without_a_store(RuntimeError("reset")) == f"{keeper} is gone: {known}"
    )
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agent = "torchrun's agent, which keeps the job's store,"
    assert (
        liveness._without_a_store(silent=31.2)
        == f"{agent} has not been heard of for 31 s"
    )
    assert (
        liveness._without_a_store(RuntimeError("reset")) == f"{agent} is gone (reset)"
    )
