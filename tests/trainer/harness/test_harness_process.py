"""Processes of harnesses that fail: each error names the task, the reason and the log."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megaverl.config.evaluation import HarnessTask
from megaverl.errors import HarnessError
from megaverl.trainer.harness.harness_process import HarnessProcess, HarnessRequest
from tests.trainer.harness.environment import harness_python

BROKEN = """
import sys
from inspect_ai import task

@task
def broken():
    sys.exit(0)
"""


def request(task: str, python: str | None, minutes: float = 2.0) -> HarnessRequest:
    return HarnessRequest(
        task=HarnessTask.parse(task),
        base_url="http://127.0.0.1:9",
        token="secret",
        model="policy",
        most_tokens=64,
        limit=None,
        seed=0,
        options={},
        python=python,
        minutes=minutes,
    )


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a program that stands in the place of a harness's interpreter."""

    def write(text: str) -> str:
        file = tmp_path / "interpreter"
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return str(file)

    return write


def failure(request: HarnessRequest, run_dir: Path, refusal: str = "") -> str:
    """What the error of a harness says."""
    with HarnessProcess(request, run_dir) as process:
        with pytest.raises(HarnessError) as raised:
            process.results(refusal)
        assert str(process.log) in str(raised.value)
    return str(raised.value)


def test_a_task_that_exits_and_one_that_is_unknown(tmp_path: Path) -> None:
    """With the real packages, side by side."""
    python = harness_python()
    (tmp_path / "broken.py").write_text(BROKEN)
    exits = request(f"inspect:{tmp_path / 'broken.py'}@broken", python)
    unknown = request("lm-eval:no_such_task", python)
    with (
        HarnessProcess(exits, tmp_path) as first,
        HarnessProcess(unknown, tmp_path) as second,
    ):
        with pytest.raises(HarnessError, match="the task raised SystemExit: 0"):
            first.results()
        with pytest.raises(HarnessError, match="no task 'no_such_task'"):
            second.results()


def test_a_package_that_is_missing(tmp_path: Path) -> None:
    text = failure(request("inspect:any", sys.executable), tmp_path)
    assert "cannot import inspect_ai" in text
    assert "pip install 'megaverl[inspect]'" in text


def test_a_harness_that_prints_odd_bytes_and_fails(
    tmp_path: Path, script: Callable[[str], str]
) -> None:
    odd = script("#!/bin/sh\nprintf 'odd \\377\\000 bytes'\nexit 3\n")
    text = failure(request("lm-eval:any", odd), tmp_path, "no room")
    assert "ended with 3 and without results" in text
    assert "The last refused call: no room" in text
    assert "odd \ufffd\ufffd bytes" in text


def test_results_of_another_form(tmp_path: Path, script: Callable[[str], str]) -> None:
    results = tmp_path / "harness" / "lm-eval_any" / "results.json"
    odd = script(f"#!/bin/sh\necho '{{\"results\": [3]}}' > {results}\n")
    assert "not the form" in failure(request("lm-eval:any", odd), tmp_path)
    results.write_text("stale")
    odd = script(f"#!/bin/sh\nprintf '\\377' > {results}\n")
    assert "cannot be read" in failure(request("lm-eval:any", odd), tmp_path)


def test_a_harness_that_never_ends(
    tmp_path: Path, script: Callable[[str], str]
) -> None:
    """It and what it has started are gone afterwards: nobody holds the pipe that they have inherited."""
    os.mkfifo(tmp_path / "held")
    odd = script(
        f"#!/bin/sh\nexec 3> {tmp_path / 'held'}\necho begun >&3\n(sleep 20; echo late >&3) &\nwait\n"
    )
    asked = request("lm-eval:any", odd, minutes=1e-6)
    with (
        HarnessProcess(asked, tmp_path) as process,
        (tmp_path / "held").open() as held,
    ):
        assert held.readline() == "begun\n"
        with pytest.raises(HarnessError, match="evaluation.harness_minutes"):
            process.check_deadline()
        process.__exit__()
        assert held.read() == ""
    assert not process.is_running


def test_a_harness_is_no_rank(
    tmp_path: Path, script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    text = failure(request("lm-eval:any", script("#!/bin/sh\nexport\n")), tmp_path)
    log = (tmp_path / "logs" / "lm-eval_any.log").read_text()
    assert "OPENAI_API_KEY" in log and "TORCHELASTIC" not in log, text
    assert " RANK=" not in log
    assert os.environ["RANK"] == "0"
