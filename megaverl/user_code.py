"""Boundary around the user's code: whatever it raises becomes one error of megaverl.

Rewards, environments, data functions, losses, trackers and other plug-ins may raise
anything, including exceptions that are not an `Exception`: `exit()` raises SystemExit,
and a script may raise KeyboardInterrupt. Such an exception must not end the run by
itself, and never with exit code 0. So every call of user code is inside `user_code`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from megaverl.errors import FAILED
from megaverl.outside import clean

SHOWN_VALUE = 60  # characters of a value in a message


class _Interrupts:
    """Number of SIGINTs so far. It tells a real Ctrl-C from a KeyboardInterrupt that code raises."""

    count = 0


class _Calls(threading.local):
    """Number of calls of user code that a thread is inside of."""

    depth = 0


_calls = _Calls()


def describe(error: BaseException) -> str:
    """Return "Type: message" of an exception as printable text, even if its `__str__` raises."""
    name = type(error).__name__
    try:
        message = str(error)
    except BaseException as broken:  # the exception's own code
        if isinstance(broken, KeyboardInterrupt) and _is_real(
            broken, _Interrupts.count
        ):
            raise
        message = (
            f"(its message cannot be shown: __str__ raised {type(broken).__name__})"
        )
    return clean(f"{name}: {message}" if message else name)


def show(value: Any, limit: int = SHOWN_VALUE) -> str:
    """Return the type and the beginning of the repr of a user's value, even if its `__repr__` raises."""
    try:
        text = repr(value)
    except BaseException as error:  # the value's own code
        text = f"(cannot be shown: __repr__ raised {type(error).__name__})"
    return clean(f"{type(value).__name__} {text[:limit]}")


def where_raised(error: BaseException, file: str | None = None) -> str:
    """Return " (FILE, line N)" of the innermost frame in which an exception, or its cause, was raised, or "".

    Args:
        file: consider only frames of this file.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    counted = [frame for frame in frames if file is None or frame.filename == file]
    return f" ({counted[-1].filename}, line {counted[-1].lineno})" if counted else ""


@contextmanager
def user_code(
    problem: Callable[[BaseException], Exception],
    *,
    keep: type[Exception] | tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Run a call of user code, and raise `problem` of anything that it raises. A real Ctrl-C stays a KeyboardInterrupt.

    Args:
        problem: makes the error from the exception; `describe` gives its text.
        keep: exceptions that are passed on unchanged.

    Example:
        with user_code(lambda error: RewardError(f"reward 'mine' raised {describe(error)}")):
            value = function(sample)
    """
    _count_interrupts()
    before = _Interrupts.count
    _calls.depth += 1
    try:
        yield
    except keep:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and _is_real(error, before):
            raise
        if _was_interrupted(before):
            raise KeyboardInterrupt from error
        raise problem(error) from error
    finally:
        _calls.depth -= 1
    # User code may have caught the interrupt, as a bare `except:` does.
    if _was_interrupted(before):
        raise KeyboardInterrupt


@contextmanager
def exits_raise() -> Iterator[None]:
    """Let `os._exit` raise SystemExit in this process, so that a check reports it. Child processes still exit."""

    def leave(status: int) -> NoReturn:
        raise SystemExit(status)

    with _exits_call(leave):
        yield


@contextmanager
def exits_fail() -> Iterator[None]:
    """Keep `os._exit` from ending a run as if it had succeeded, in this process.

    A rank's parent sees only its exit code, and takes 0 for success. Inside
    `user_code`, `os._exit` raises SystemExit, so the error names the function.
    Elsewhere a call with status 0 is reported and ends the process with `FAILED`. Child
    processes still exit.

    C code that calls `_exit` is not caught here. The launch agent detects it
    (`elastic_agent`), and so do the ranks that remain. If no rank remains, a plain
    torchrun reports success (docs/reference.md, exit codes).
    """
    exit_process = os._exit

    def leave(status: int) -> NoReturn:
        if _calls.depth:
            raise SystemExit(status)
        if status == 0:
            caller = "".join(traceback.format_stack(limit=3)[:-1]).rstrip()
            print(
                f"error: os._exit(0) was called before the run was over, at\n{caller}",
                file=sys.stderr,
                flush=True,
            )
        exit_process(status or FAILED)

    with _exits_call(leave):
        yield


@contextmanager
def _exits_call(leave: Callable[[int], NoReturn]) -> Iterator[None]:
    """Make `os._exit` call another function in this process, but not in its forked copies."""
    process, exit_process = os.getpid(), os._exit

    def in_this_process(status: int) -> NoReturn:
        if os.getpid() != process:
            exit_process(status)
        leave(status)

    os._exit = in_this_process
    try:
        yield
    finally:
        os._exit = exit_process


def _was_interrupted(before: int) -> bool:
    return (
        _Interrupts.count != before
        and threading.current_thread() is threading.main_thread()
    )


def _is_real(error: KeyboardInterrupt, before: int) -> bool:
    """Return whether a KeyboardInterrupt comes from a signal.

    Signals only reach the main thread. If a program has its own handler, interrupts are
    not counted, and every KeyboardInterrupt in the main thread is regarded as real. A
    process that ignores SIGINT, as one that a script has started in the background
    does, is never interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    return _Interrupts.count != before or handler not in (
        _note_interrupt,
        signal.SIG_IGN,
    )


def _count_interrupts() -> None:
    """Count SIGINTs from now on, unless the program handles them itself."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _note_interrupt)


def _note_interrupt(number: int, frame: FrameType | None) -> None:
    _Interrupts.count += 1
    signal.default_int_handler(number, frame)
