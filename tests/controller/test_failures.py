"""Which rank and call an error names, from the evidence that has come in."""

from __future__ import annotations

from megaverl.controller.failures import (
    LostRank,
    PassedDeadline,
    RaisedError,
    explain,
    find_blocking_ranks,
    find_cause,
)
from megaverl.controller.messages import ErrorReport, Status

BROKEN = ErrorReport(
    "RuntimeError", "Connection closed by peer", "trace", is_secondary=True
)
OWN = ErrorReport("ValueError", "bad reward", "Traceback ...\nValueError: bad reward")


def status(call: int, name: str = "actor.update", *, is_idle: bool = False) -> Status:
    return Status(1, call, name, "forward", 12.0, is_idle)


def test_a_lost_rank_comes_before_the_errors_of_its_peers() -> None:
    lost = LostRank(2, "its process ended")
    assert (
        find_cause(
            [
                RaisedError(0, "actor.update", BROKEN),
                lost,
                RaisedError(1, "actor.update", BROKEN),
            ]
        )
        == lost
    )
    error = explain(lost, {2: "actor.update", 0: "actor.update"})
    assert str(error) == "rank 2 was lost in actor.update: its process ended."
    assert (error.ranks, error.call) == ((2,), "actor.update")


def test_what_a_rank_raised_comes_before_its_own_end() -> None:
    raised = RaisedError(3, "reward.score", OWN)
    assert (
        find_cause(
            [
                RaisedError(0, "reward.score", BROKEN),
                raised,
                LostRank(3, "its process ended"),
            ]
        )
        == raised
    )
    assert str(explain(raised, {})).startswith(
        "rank 3 failed in reward.score: ValueError: bad reward\nTraceback"
    )


def test_an_error_after_a_loss_is_not_its_cause() -> None:
    lost = LostRank(1, "its process ended")
    assert find_cause([lost, RaisedError(0, "actor.update", OWN)]) == lost


def test_a_rank_that_does_not_answer_holds_the_others_up() -> None:
    missed = PassedDeadline(
        "actor.update", 60.0, {0: "actor.update", 1: "actor.update"}, {0: status(7)}
    )
    assert find_blocking_ranks(missed) == (1,)
    text = str(explain(missed, {}))
    assert (
        "rank 1 did not finish actor.update in time (60 s): rank 1 does not answer"
        in text
    )


def test_the_rank_furthest_behind_holds_the_others_up() -> None:
    unfinished = {0: "actor.update", 1: "critic.values", 2: "actor.update"}
    statuses = {0: status(9), 1: status(7, "critic.values"), 2: status(9)}
    missed = PassedDeadline("actor.update", 60.0, unfinished, statuses)
    error = explain(missed, {})
    assert error.ranks == (1,)
    assert (
        "rank 1 did not finish critic.values in time, and held up actor.update (60 s)"
        in str(error)
    )
    assert "rank 1 is in critic.values, stage forward, for 12 s" in str(error)


def test_ranks_that_wait_for_the_programs_answer_hold_nobody_up() -> None:
    asking = Status(1, 7, "critic.update", "critic_update", 12.0, False, True)
    unfinished = {0: "critic.update", 1: "actor.update"}
    missed = PassedDeadline(
        "critic.update", 60.0, unfinished, {0: asking, 1: status(9)}
    )
    assert find_blocking_ranks(missed) == (1,)
    both = PassedDeadline("critic.update", 60.0, {0: "critic.update"}, {0: asking})
    assert "rank 0 waits in critic.update for the program's answer" in str(
        explain(both, {})
    )


def test_many_ranks_are_not_all_listed() -> None:
    ranks = range(100)
    missed = PassedDeadline(
        "actor.update",
        5.0,
        dict.fromkeys(ranks, "actor.update"),
        dict.fromkeys(ranks, status(3)),
    )
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more did not finish" in str(
        explain(missed, {})
    )
