"""A process that answers line by line: its deadline, its end, and what stands between two reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megaverl.errors import RewardError
from megaverl.rewards import math_worker
from megaverl.rewards.line_process import LineProcess, ProcessDied
from megaverl.rewards.math_worker import MathWorker

Start = Callable[..., LineProcess]
ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A Python program as such a process, ended with the test."""
    started = []

    def start_one(
        program: str, environment: dict[str, str] | None = None
    ) -> LineProcess:
        process = LineProcess(
            [sys.executable, "-c", program], environment or {}, folder=str(tmp_path)
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.close()


def test_one_answer_for_each_request(start: Start) -> None:
    process = start(ECHO)
    for request in ([1, "a\nb"], {"long": "x" * 200_000}, None):
        process.send(request)
        assert process.answer(60.0) == request


def test_answers_that_come_together_are_kept_apart(start: Start) -> None:
    process = start("print('1\\n[2]\\n3')")
    assert [process.answer(60.0) for _ in range(3)] == [1, [2], 3]
    with pytest.raises(ProcessDied, match="code 0"):
        process.answer(60.0)


def test_an_answer_that_trickles_does_not_move_its_deadline(start: Start) -> None:
    """Thirty parts of an answer, none of them late, together later than the deadline."""
    process = start(
        "import time\nfor _ in range(30): print(1, end='', flush=True); time.sleep(0.1)\nprint()"
    )
    with pytest.raises(TimeoutError):
        process.answer(1.0)
    assert process.answer(60.0) == int("1" * 30), "what has come is kept"


def test_the_deadline_may_be_over_already(start: Start) -> None:
    process = start(ECHO)
    for seconds in (0.0, -1.0):
        with pytest.raises(TimeoutError):
            process.answer(seconds)


def test_a_process_that_ends_is_told_by_its_code(start: Start) -> None:
    process = start(
        "import os, sys; sys.stdin.readline(); print('no line', end='', flush=True); os._exit(7)"
    )
    process.send("go")
    for act in (lambda: process.answer(60.0), lambda: process.send("again")):
        with pytest.raises((ProcessDied, ValueError)) as error:
            act()
        if isinstance(error.value, ProcessDied):
            assert error.value.code == 7 and str(error.value) == "it ended with code 7"
    killed = start(ECHO)
    killed._process.kill()
    killed._process.wait()
    with pytest.raises(ProcessDied) as died:
        killed.send("x" * 1_000_000)
    assert died.value.code == -9


def test_nothing_is_left_of_a_closed_one(start: Start) -> None:
    process = start(ECHO)
    process.close()
    assert process._process.returncode == -9
    assert not Path("/proc", str(process._process.pid)).exists()
    process.close()


def test_its_environment_and_folder_are_those_given(
    start: Start, tmp_path: Path
) -> None:
    process = start(
        "import json, os; print(json.dumps([dict(os.environ), os.getcwd()]))",
        {"ONE": "1"},
    )
    environment, folder = process.answer(60.0)
    assert environment.items() >= {"ONE": "1"}.items() and "HOME" not in environment
    assert folder == str(tmp_path)


def test_what_it_says_beside_is_not_shown(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    process = start(
        "import sys; print('beside', file=sys.stderr, flush=True); print(json := 1)"
    )
    assert process.answer(60.0) == 1
    assert capfd.readouterr() == ("", "")


def test_the_math_worker_that_does_not_start_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setattr(math_worker, "START_SECONDS", 0.0)
    worker = MathWorker()
    with pytest.raises(
        RewardError, match="'math_verify': its process did not start within 0 s"
    ):
        worker.equal("1", "1", 60.0)
    assert worker._process is None


def test_the_math_worker_by_hand() -> None:
    """What the message of a dead one tells to try: only answers come, whatever the libraries print."""
    pytest.importorskip("math_verify")
    import subprocess

    requests = [
        ["1/2", "0.5"],
        ["$\\frac{1}{2}$", "so it is $0.5$"],
        ["\\boxed{3}", "4"],
        ["\\(2\\)", "2"],
        ["2", ""],
    ]
    done = subprocess.run(
        [sys.executable, "-m", "megaverl.rewards.math_worker"],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        check=True,
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        True,
        True,
        True,
        False,
        True,
        False,
    ]


def test_a_math_worker_counts_what_took_too_long_and_goes_on() -> None:
    pytest.importorskip("math_verify")
    worker = MathWorker()
    try:
        assert worker.equal("1/2", "0.5", 60.0)
        first = worker._process
        assert not worker.equal("7", "$10^{10^{10^{10}}}$", 1.0)
        assert worker.num_timeouts == 1 and worker._process is None
        assert first is not None and first._process.returncode == -9
        assert worker.equal("1/2", "0.5", 60.0) and worker._process is not first
        assert worker.num_timeouts == 1
    finally:
        worker.close()
    assert worker._process is None
    worker.close()


def test_one_math_worker_of_this_process() -> None:
    assert MathWorker.shared() is MathWorker.shared()
