"""What user code raises becomes one error; a real Ctrl-C stays an interrupt."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from megaverl.errors import EpisodeError, RewardError
from megaverl.rewards import RewardSample, build_reward, register_reward, registry
from megaverl.trainer.contracts import Promise, keep
from megaverl.user_code import describe, exits_raise, show, user_code


class Hostile(Exception):
    def __str__(self) -> str:
        raise ValueError("no message")

    def __repr__(self) -> str:
        raise SystemExit(0)


def endless() -> None:
    endless()


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    "handler",
    [signal.default_int_handler, signal.SIG_IGN],
    ids=["by default", "ignored"],
)
def test_an_interrupt_that_code_raises_is_an_error_whether_or_not_the_process_ignores_sigint(
    handler: Any,
) -> None:
    """A process that a script has started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        guard = user_code(lambda error: RewardError(f"it raised {describe(error)}"))
        with (
            pytest.raises(RewardError, match="^it raised KeyboardInterrupt: mine"),
            guard,
        ):
            raise KeyboardInterrupt("mine")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: exit(), "SystemExit"),  # noqa: PLR1722
        (raising(SystemExit(0)), "SystemExit: 0"),
        (raising(KeyboardInterrupt("mine")), "KeyboardInterrupt: mine"),
        (raising(GeneratorExit()), "GeneratorExit"),
        (raising(StopIteration(1)), "StopIteration: 1"),
        (raising(asyncio.CancelledError()), "CancelledError"),
        (
            raising(BaseExceptionGroup("both", [SystemExit(0), KeyboardInterrupt()])),
            "BaseExceptionGroup: both",
        ),
        (endless, "RecursionError"),
        (
            raising(Hostile()),
            r"Hostile: \(its message cannot be shown: __str__ raised ValueError\)",
        ),
        (
            raising(ValueError("half of a pair: \ud800, and \0")),
            "ValueError: half of a pair: \ufffd, and \ufffd",
        ),
    ],
)
def test_whatever_code_raises_is_one_error(
    call: Callable[[], None], words: str
) -> None:
    guard = user_code(lambda error: RewardError(f"it raised {describe(error)}"))
    with pytest.raises(RewardError, match=f"^it raised {words}"), guard:
        call()


def test_errors_that_are_kept_pass() -> None:
    guard = user_code(lambda error: RewardError("other"), keep=EpisodeError)
    with pytest.raises(EpisodeError, match="^mine$"), guard:
        raise EpisodeError("mine")


@pytest.mark.parametrize("swallows", [None, KeyboardInterrupt, BaseException])
def test_a_real_interrupt_stays_one(swallows: type[BaseException] | None) -> None:
    """Also where user code catches it, or raises something else in its place."""
    with (
        pytest.raises(KeyboardInterrupt),
        user_code(lambda error: RewardError("taken for its own")),
    ):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            if swallows is None:
                raise
            if swallows is BaseException:
                raise ValueError("instead") from error


def test_an_interrupt_that_a_thread_raises_is_its_own() -> None:
    found: list[str] = []

    def work() -> None:
        try:
            with user_code(lambda error: RewardError(describe(error))):
                raise KeyboardInterrupt
        except RewardError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["KeyboardInterrupt"]


def test_a_value_that_cannot_be_shown_is_named_by_its_type() -> None:
    assert show(Hostile()) == "Hostile (cannot be shown: __repr__ raised SystemExit)"


class NoNumber(float):
    def __float__(self) -> float:
        raise SystemExit(0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (SystemExit(0), "raised SystemExit: 0, on sample 0 of 1"),
        (10**400, "returned int"),
        (NoNumber(1), "NoNumber"),
    ],
)
@pytest.mark.parametrize("batched", [False, True])
def test_a_reward_names_its_sample_whatever_it_raises(
    value: object, words: str, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.reward_names()
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))

    @register_reward("bad", batched=batched)
    def bad(response: str) -> object:
        if isinstance(value, BaseException):
            raise value
        return [value] if batched else value

    words = words.replace("sample 0 of 1", "a batch of 1 samples") if batched else words
    with pytest.raises(RewardError, match=f"reward 'bad' .*{words}"):
        build_reward("bad").score([RewardSample("p", "r")])


def test_a_promise_names_what_the_part_raised_even_where_it_leaves_the_process() -> (
    None
):
    promises: list[Promise] = [
        ("leaves", lambda: os._exit(0)),
        ("exits", raising(SystemExit(0))),
    ]
    with exits_raise():
        problems = [kept.problem for kept in keep(promises)]
        assert all(problem.startswith("SystemExit: 0 (") for problem in problems)
        if (child := os.fork()) == 0:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


EXITS = """
import multiprocessing, os, sys, threading
from megaverl.errors import RewardError
from megaverl.user_code import describe, exits_fail, user_code

def inside():
    try:
        with user_code(lambda error: RewardError(describe(error))):
            os._exit(0)
    except RewardError as error:
        print("caught", error, flush=True)

with exits_fail():
    inside()
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    child = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
    child.start()
    child.join()
    print("child", child.exitcode, flush=True)
    if sys.argv[1] == "stray":
        os._exit(0)
    if sys.argv[1] == "own":
        os._exit(75)
os._exit(0)
"""


@pytest.mark.parametrize(("how", "code"), [("stray", 1), ("own", 75), ("after", 0)])
def test_a_process_does_not_leave_a_run_with_exit_code_0(how: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITS, how], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == ["caught SystemExit: 0"] * 2 + ["child 0"]
    assert ("os._exit(0) was called before the run was over" in done.stderr) == (
        how == "stray"
    )
