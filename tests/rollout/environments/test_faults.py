"""Faults of environments: further attempts, replacements, lost episodes, pauses, and the end of a run."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.errors import EpisodeError
from megaverl.rollout.engine import Generation
from megaverl.rollout.environments import (
    FAILED,
    Attempt,
    Begun,
    FailedCall,
    FaultLimits,
    Faults,
    Limits,
    Outcome,
    Request,
    Turns,
    View,
    play,
)

STOP, TURNS = 3, 3


class Unreliable:
    """Episodes of three turns whose environment fails as `fails` says, in simulated time.

    Args:
        fails: (episode, calls of its environment before this one) -> whether the call fails.
    """

    def __init__(self, count: int, fails, limits: FaultLimits, group: int = 4) -> None:
        self.count, self.fails, self.group = count, fails, group
        self.calls = [0] * count
        self.turns = [0] * count
        self.slept: list[float] = []
        self.faults = Faults("broken", limits, sleep=self.slept.append)
        self.attempts: list[dict[int, Attempt]] = []

    def _call(self, number: int) -> bool:
        self.calls[number] += 1
        return self.fails(number, self.calls[number] - 1)

    def begin(self, attempts: Mapping[int, Attempt]) -> dict[int, Begun | FailedCall]:
        self.attempts.append(dict(attempts))
        results: dict[int, Begun | FailedCall] = {}
        for number, attempt in attempts.items():
            self.faults.wait_before(attempt)
            self.turns[number] = 0
            begun = Begun({"a": [5, number]}, ["a"])
            results[number] = FailedCall("no server") if self._call(number) else begun
        return results

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Write tokens that depend on the seed alone, as an engine does."""
        return [
            Generation([100 * r.replacement + r.turn + 7, STOP], [-0.5, -1.0], "stop")
            for r in requests
        ]

    def step(self, turns: Mapping[int, Mapping[str, list[list[int]]]]):
        results: dict[int, Turns | FailedCall] = {}
        for number in turns:
            self.turns[number] += 1
            over = self.turns[number] == TURNS
            outcome = Outcome([8, self.turns[number]], reward=1.0, done=over)
            turn = Turns({"a": outcome}, ["a"])
            results[number] = (
                FailedCall("reset by peer") if self._call(number) else turn
            )
        return results

    def play(self) -> list[View]:
        episodes = play(
            [[1, number] for number in range(self.count)],
            ["a"],
            begin=self.begin,
            generate=self.generate,
            step=self.step,
            limits=Limits(9, 3, 99),
            faults=self.faults,
            group_size=self.group,
        )
        return [views["a"] for views in episodes]


def never(number: int, call: int) -> bool:
    return False


LIMITS = FaultLimits(retries=3, backoff_seconds=1.0, pause_above=1.0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), rate=st.floats(0.0, 0.4))
def test_what_is_tried_again_is_what_a_run_without_faults_plays(
    seed: int, rate: float
) -> None:
    """Every episode has the tokens of a run without faults, other draws, or nothing at all."""
    draw = random.Random(seed)
    expected = Unreliable(8, never, LIMITS).play()
    unreliable = Unreliable(8, lambda number, call: draw.random() < rate, LIMITS)
    replaced = set()
    try:
        views = unreliable.play()
    except EpisodeError as error:
        # All of the first two rounds failed.
        assert "for every episode since the run began" in str(error)
        return
    for attempts in unreliable.attempts:
        replaced |= {number for number, one in attempts.items() if one.replacement}
    for number, (view, right) in enumerate(zip(views, expected, strict=True)):
        if view.finish_reason == FAILED:
            assert (view.prompt, view.tokens, view.rewards) == ([1, number], [], [])
        elif number not in replaced:
            assert view == right
        else:
            assert view.tokens[0] >= 100 and view.rewards == right.rewards
    metrics = unreliable.faults.metrics()
    lost = sum(view.finish_reason == FAILED for view in views)
    assert metrics["environment/failed_fraction"] == lost / 8
    begun_again = sum(map(len, unreliable.attempts)) - 8
    assert metrics["environment/retries"] + metrics["environment/replacements"] == (
        begun_again
    )


def test_waits_grow_and_a_lost_episode_has_no_turns(caplog) -> None:
    unreliable = Unreliable(8, lambda number, call: number == 2, LIMITS)
    views = unreliable.play()
    assert unreliable.slept == [1.0, 2.0, 4.0]
    # The same fault of later attempts is no news.
    (logged,) = caplog.messages
    assert logged == (
        "environment 'broken': an attempt at an episode failed, and the episode is tried again. no server"
    )
    assert [view.finish_reason for view in views] == [
        *["stop"] * 2,
        FAILED,
        *["stop"] * 5,
    ]
    assert views[2].conversations() == [views[2]]


def test_a_group_that_would_be_too_small_gets_other_draws() -> None:
    """Two of four are enough for a baseline. The third one that fails is replaced."""
    broken = {0: 99, 1: 99, 2: LIMITS.retries + 1}
    unreliable = Unreliable(
        4, lambda number, call: call < broken.get(number, 0), LIMITS
    )
    views = unreliable.play()
    assert [view.finish_reason for view in views] == [FAILED, FAILED, "stop", "stop"]
    assert views[2].tokens[0] == 107 and views[3].tokens[0] == 7
    assert unreliable.faults.metrics()["environment/replacements"] == 1


def test_a_run_pauses_while_most_attempts_fail_and_goes_on(caplog) -> None:
    """Twelve of sixteen episodes fail until the server is back, after two pauses."""
    limits = FaultLimits(retries=0, pause_above=0.5, pause_seconds=30.0, pauses=3)
    unreliable = Unreliable(16, never, limits)
    unreliable.fails = lambda number, call: (
        number < 12 and unreliable.slept.count(30.0) < 2
    )
    views = unreliable.play()
    assert {view.finish_reason for view in views} == {"stop"}
    assert unreliable.slept.count(30.0) == 2
    assert "12 of the last 12 attempts" in caplog.text
    assert "The run pauses for 30 s" in caplog.text
    assert unreliable.faults.metrics()["environment/pause_seconds"] == 60.0


def test_a_run_whose_environment_stays_away_ends_in_words() -> None:
    limits = FaultLimits(retries=0, pause_above=0.5, pause_seconds=30.0, pauses=2)
    unreliable = Unreliable(16, lambda number, call: number < 12, limits)
    with pytest.raises(EpisodeError, match="2 pauses of 30 s did not help. no server"):
        unreliable.play()


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_that_has_never_worked_is_a_mistake(method: str) -> None:
    """Its second round of failures ends the run, without all retries and pauses."""
    broken = Unreliable(
        4, lambda number, call: method == "reset" or call % 2 == 1, LIMITS
    )
    with pytest.raises(EpisodeError, match=rf"{method}\(\) has failed for every"):
        broken.play()
    assert broken.slept == [1.0] * 4
    # What has worked once may fail later.
    later = Unreliable(4, never, LIMITS)
    later.play()
    later.fails = lambda number, call: later.calls[number] < 7
    assert {view.finish_reason for view in later.play()} == {"stop"}


def test_a_pause_is_not_followed_by_another_for_the_same_failures() -> None:
    """After the pause the window is empty: one more failure among episodes that go on is no reason."""
    limits = FaultLimits(retries=1, backoff_seconds=0.0, pause_seconds=30.0)
    unreliable = Unreliable(16, never, limits)
    unreliable.fails = lambda number, call: (
        (number < 12 and call == 0) or (number == 15 and call == 1)
    )
    views = unreliable.play()
    assert {view.finish_reason for view in views} == {"stop"}
    assert unreliable.slept.count(30.0) == 1


def test_episodes_that_end_well_count_against_a_pause() -> None:
    limits = FaultLimits(retries=1, backoff_seconds=0.0, pause_seconds=30.0)
    unreliable = Unreliable(16, never, limits)
    for _ in range(3):
        unreliable.play()
    begun = list(unreliable.calls)
    unreliable.fails = lambda number, call: number < 9 and call == begun[number]
    views = unreliable.play()
    assert {view.finish_reason for view in views} == {"stop"}
    assert unreliable.faults.metrics()["environment/faults"] == 9
    assert 30.0 not in unreliable.slept
