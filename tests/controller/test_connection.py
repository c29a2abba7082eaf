"""Lost and stalled ranks of a job, which the controller names on every rank; and who commits checkpoints."""

from __future__ import annotations

import pytest

from tests.launcher import Launcher


def test_the_coordinator_commits_for_all(launch: Launcher) -> None:
    ended = launch.ranks(4, "tests.controller.connection_ranks:committed")
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
        4, "tests.controller.connection_ranks:lost", deadline=12.0, rank=rank, how=how
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
        "tests.controller.connection_ranks:waits_on_the_device",
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


RANKS = "tests.controller.connection_ranks:several_programs"


def test_programs_run_one_after_another_over_one_connection(launch: Launcher) -> None:
    *others, last = launch.ranks(4, RANKS, end="leave").check()
    assert others == [[[], None]] * 3
    assert last == [[46, 50, 54, 86, 90, 94], None]


def test_an_error_of_all_ranks_is_each_ranks_own(launch: Launcher) -> None:
    assert launch.ranks(4, RANKS, end="alike").check() == [None] * 4


def test_a_rank_that_fails_between_programs_is_named_by_all(launch: Launcher) -> None:
    """Later programs end with the same words."""
    ended = launch.ranks(4, RANKS, end="failed")
    name = "rank 1 (actor+reward+rollout, here)"
    reason = f"{name} failed in export: ValueError: no room"
    for rank, result in enumerate(ended.check()):
        later = f"the run has failed before: {reason}"
        assert result == [None if rank == 1 else reason, later], ended.text


def test_a_rank_that_is_interrupted_is_named_by_the_others(launch: Launcher) -> None:
    ended = launch.ranks(4, RANKS, end="interrupted")
    name = "rank 1 (actor+reward+rollout, here)"
    for rank, result in enumerate(ended.check()):
        reason = result[1]
        reason = reason.removeprefix("the run has failed before: ")
        assert reason.startswith(f"{name} was in export and was interrupted on ")
        assert result[0] == (None if rank == 1 else reason)


def test_a_silent_coordinator_is_named_by_the_others(launch: Launcher) -> None:
    ended = launch.ranks(4, "tests.controller.connection_ranks:silent", deadline=20.0)
    words = "rank 3 (coordinator, here) has not been heard of for 5 s: it was in step 3: values"
    for rank in range(3):
        told = str(ended.results[rank]) + ended.output[rank]
        assert words in told, (rank, told)
