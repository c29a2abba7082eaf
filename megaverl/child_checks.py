"""Checks in a child process with a deadline, for checks that execute code of the user.

Such code may raise, exit, block or print, without affecting the command that checks it.
The child answers after each check. So the parent knows which check ended or blocked it,
and continues with the next one in another child.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from megaverl.errors import ConfigError, MegaverlError
from megaverl.plugins import load_module
from megaverl.user_code import describe

# A module that imports torch or transformers takes a few seconds. One that takes a
# minute is regarded as blocked.
DEADLINE_SECONDS = 60.0
# Bytes at the end of the child's error output, of which messages quote the last line.
_TAIL = 600

# Set in a child process. Code that starts a run when it is imported would otherwise
# check itself endlessly.
CHECKING = "_MEGAVERL_CHECKING"

Check = Mapping[str, Any]


class CheckResult(NamedTuple):
    """Outcome of one check.

    Attributes:
        problem: the problem, or "".
        num_rows: number of rows of a data source, for checks that count them.
        left_out: what could not be checked here, with the reason, or "".
    """

    problem: str = ""
    num_rows: int | None = None
    left_out: str = ""


CheckRunner = Callable[[Check], CheckResult]


def run_in_children(
    runner: str,
    context: Any,
    checks: Sequence[Check],
    deadline: float = DEADLINE_SECONDS,
) -> Iterator[CheckResult]:
    """Run checks in a child process, and after a crash or block in another one; yield their results in order.

    Args:
        runner: `module:function` of megaverl. The child calls it once with `context`; the returned function runs a
            check.
        context: a JSON value.
        checks: JSON mappings. `doing` describes the check in messages: "it is loaded" by default. A check with
            `may_wait` waits for something outside, such as a hub; if its deadline passes, it is skipped.
        deadline: seconds for each check.
    """
    left = list(checks)
    while left:
        done = 0
        for result in _run_in_a_child(runner, context, left, deadline):
            yield result
            done += 1
        left = left[done:] if done else []


def probe_modules(
    names: Sequence[str], deadline: float = DEADLINE_SECONDS
) -> list[str]:
    """Import `reward_modules` in a child process; return the problem of each, or ""."""
    checks = [
        {"key": f"reward_modules.{index}", "name": name}
        for index, name in enumerate(names)
    ]
    results = run_in_children(
        "megaverl.child_checks:make_module_runner", None, checks, deadline
    )
    return [result.problem for result in results]


def refuse_in_a_check() -> None:
    """Refuse to start a run in a process that only checks code.

    Raises:
        ConfigError: this is such a process.
    """
    if CHECKING in os.environ:
        raise ConfigError(
            "it starts a run when it is imported, and the ranks import it. Put the call that starts the run under "
            "`if __name__ == '__main__':`."
        )


def make_module_runner(context: None) -> CheckRunner:
    """Return a function that imports the module of one check."""

    def run(check: Check) -> CheckResult:
        key, name = check["key"], check["name"]
        return catch_problem(key, name, lambda: load_module(name, key))

    return run


def catch_problem(key: str, name: str, check: Callable[[], object]) -> CheckResult:
    """Run one check. Return its result, or the problem with the key's value. A check without a result has passed."""
    try:
        result = check()
    except MegaverlError as error:
        text = str(error)
        for prefix in (f"{key}: ", "reward.function: ", "reward_modules: ", "data: "):
            text = text.removeprefix(prefix)
        return CheckResult(text if name in text else f"found {name!r}. {text}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # The user's code may raise anything, even SystemExit.
        problem = f"found {name!r}, which raises {describe(error)[:200]}"
        return CheckResult(problem)
    return result if isinstance(result, CheckResult) else CheckResult()


def _run_in_a_child(
    runner: str, context: Any, checks: Sequence[Check], deadline: float
) -> Iterator[CheckResult]:
    """Yield the results of checks in order, up to the first one that ends the process or blocks."""
    request = json.dumps({"runner": runner, "context": context, "checks": list(checks)})
    command = [sys.executable, "-c", "from megaverl.child_checks import main; main()"]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", CHECKING: "1"},
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            # If the child has ended already, reading its answer below shows that.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request.encode())
                process.stdin.close()
            for check in checks:
                line = _line_of(process.stdout, deadline)
                if line is None:
                    late = f"did not finish within {deadline:g} s as {check.get('doing', 'it is loaded')}."
                    yield (
                        CheckResult(left_out=late)
                        if check.get("may_wait")
                        else CheckResult(late)
                    )
                    return
                if not line:
                    code = process.wait()
                    ended = (
                        f"by signal {-code}" if code < 0 else f"with exit code {code}"
                    )
                    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _TAIL))
                    tail = errors.read().decode(errors="replace").strip()
                    last_words = (
                        f" Its last words: {tail.splitlines()[-1]}" if tail else ""
                    )
                    yield CheckResult(
                        f"ends the process {ended} as {check.get('doing', 'it is loaded')}.{last_words}"
                    )
                    return
                yield CheckResult(*json.loads(line))
        finally:
            _end(process)


def _line_of(stream: IO[bytes], deadline: float) -> bytes | None:
    """Return the next line; empty at the end of the stream, None after the deadline."""
    line = b""
    end = time.monotonic() + deadline
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, end - time.monotonic())):
                return None
            part = os.read(stream.fileno(), 1)
            if not part:
                return b""
            line += part
    return line


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child and everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def main() -> None:
    """Run the checks that the parent sends. Output of user code is discarded."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    silent = os.open(os.devnull, os.O_RDWR)
    request = json.loads(sys.stdin.read())
    os.dup2(silent, 0)
    os.dup2(silent, 1)
    module, _, function = request["runner"].partition(":")
    run = getattr(importlib.import_module(module), function)(request["context"])
    for check in request["checks"]:
        answers.write(json.dumps(run(check)) + "\n")
        answers.flush()
    answers.close()
    # End at once, without waiting for threads that user code has started.
    os._exit(0)
