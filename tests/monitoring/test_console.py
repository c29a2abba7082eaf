"""What reaches the terminal and what the log. Turning descriptors is tried in processes of their own."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megaverl.monitoring.console import Console
from tests.terminals import read_to_the_end

Finished = subprocess.CompletedProcess[str]


def run_script(tmp_path: Path, body: str, rank: int = 0) -> Finished:
    head = f"""
        import ctypes, logging, os, sys
        from megaverl.errors import DataError
        from megaverl.monitoring.console import redirect_output
        console = redirect_output({str(tmp_path)!r}, {rank})
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False
    )


def log_of(tmp_path: Path, rank: int = 0) -> str:
    return (tmp_path / f"rank_{rank}.log").read_text()


def test_libraries_go_to_the_log_and_the_console_to_the_terminal(
    tmp_path: Path,
) -> None:
    done = run_script(
        tmp_path,
        """
        print("from python")
        logging.warning("this is from logging")
        os.write(2, b"from a descriptor\\n")
        libc = ctypes.CDLL(None)
        libc.puts(b"from C")
        libc.fflush(None)
        os.system("echo from a child")
        console.print("for the person")
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "for the person\n", "")
    for source in ("python", "logging", "a descriptor", "C", "a child"):
        assert f"from {source}\n" in log_of(tmp_path)
    assert "for the person" not in log_of(tmp_path)


def test_a_line_is_in_the_log_at_once(tmp_path: Path) -> None:
    run_script(tmp_path, "print('before it was killed'); os._exit(9)")
    assert log_of(tmp_path) == "before it was killed\n"


def test_other_ranks_print_nothing_but_report_errors(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        console.print("a line")
        console.step(1, 2, {"reward/mean": 1.0})
        with console.progress("work", 4) as advance:
            advance(4)
        console.error("row 7 has no prompt")
        """,
        rank=3,
    )
    assert done.stdout == ""
    assert done.stderr == "[rank 3] error: row 7 has no prompt\n"
    assert "error: row 7 has no prompt" in log_of(tmp_path, 3)


def test_an_uncaught_mistake_is_its_message(tmp_path: Path) -> None:
    done = run_script(tmp_path, "raise DataError('data.jsonl: row 3 has no prompt')")
    assert done.returncode == 1
    assert done.stderr == "error: data.jsonl: row 3 has no prompt\n"
    assert "Traceback" in log_of(tmp_path)


def test_an_uncaught_bug_names_the_log(tmp_path: Path) -> None:
    done = run_script(tmp_path, "{}['missing']")
    assert done.returncode == 1
    assert "KeyError: 'missing'" in done.stderr and "rank_0.log" in done.stderr
    assert "Traceback" not in done.stderr and "Traceback" in log_of(tmp_path)


def test_a_native_crash_is_seen(tmp_path: Path) -> None:
    done = run_script(tmp_path, "import faulthandler; faulthandler._sigsegv()")
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr


def test_ranks_that_report_the_same_error_show_it_once(tmp_path: Path) -> None:
    shown = [
        run_script(tmp_path, "console.error('the same')", rank=rank).stderr
        for rank in range(3)
    ]
    other = run_script(tmp_path, "console.error('another')", rank=1).stderr
    assert shown == ["error: the same\n", "", ""]
    assert other == "[rank 1] error: another\n"
    assert all("error: the same" in log_of(tmp_path, rank) for rank in range(3))


def test_a_step_is_one_line_of_what_is_known() -> None:
    out = io.StringIO()
    console = Console(out=out)
    metrics = {
        "reward/mean": 0.5,
        "reward/accuracy": 0.625,
        "actor/loss": float("nan"),
        "rollout/throughput_tokens_per_sec": 8312.4,
        "train/step_time_ms": 1520.0,
        "something/else": 3.0,
    }
    console.step(7, 100, metrics)
    line = out.getvalue()
    assert line.endswith("\n") and line.count("\n") == 1
    assert (
        " ".join(line.split())
        == "step 7/100 reward 0.500 accuracy 62.5% loss nan 8,312 tok/s 1.52 s"
    )


def test_text_is_printed_as_it_is() -> None:
    out = io.StringIO()
    text = "[bold]not markup[/bold] " + "x" * 300
    Console(out=out).print(text)
    assert out.getvalue() == text + "\n"


SAYS = """
import logging
from megaverl.monitoring.console import Console
{before}
console = Console()
console.print("a [line]")
console.step(1, 9, {{"reward/mean": 0.5}})
console.warn("careful")
console.error("wrong")
with console.progress("work", 1) as advance:
    advance(1)
Console(1).print("of a rank that does not speak")
"""
OWN_HANDLER = """
class Kept(logging.Handler):
    def emit(self, record):
        print("kept", record.levelname, record.getMessage())
logging.getLogger("megaverl").addHandler(Kept())
"""


@pytest.mark.parametrize(
    ("before", "out", "err"),
    [
        (
            "",
            ["a [line]", "step 1/9  reward  0.500", "warning: careful", "work: 1/1"],
            ["error: wrong"],
        ),
        (
            "logging.basicConfig(level=logging.INFO)",
            [],
            [
                "INFO:megaverl:a [line]",
                "INFO:megaverl:step 1/9  reward  0.500",
                "WARNING:megaverl:careful",
                "ERROR:megaverl:wrong",
                "INFO:megaverl:work: 1/1",
            ],
        ),
        (  # as a library might: what the root does not show, the console does
            "logging.basicConfig()",
            ["a [line]", "step 1/9  reward  0.500", "work: 1/1"],
            ["WARNING:megaverl:careful", "ERROR:megaverl:wrong"],
        ),
        (  # a handler of the logger's own gets it besides
            OWN_HANDLER + "logging.getLogger('megaverl').setLevel('INFO')",
            [
                *("kept INFO a [line]", "a [line]"),
                *("kept INFO step 1/9  reward  0.500", "step 1/9  reward  0.500"),
                *(
                    "kept WARNING careful",
                    "warning: careful",
                    "kept ERROR wrong",
                    "kept INFO work: 1/1",
                    "work: 1/1",
                ),
            ],
            ["error: wrong"],
        ),
    ],
)
def test_the_logger_carries_what_is_printed(
    before: str, out: list[str], err: list[str]
) -> None:
    """A program that configures logging sees each line once."""
    script = SAYS.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert (done.stdout.splitlines(), done.stderr.splitlines()) == (out, err)


def test_a_terminal_of_its_own_is_written_to_in_any_case(
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = io.StringIO()
    with caplog.at_level("INFO"):
        Console(out=out).print("a line")
    assert out.getvalue() == "a line\n" and caplog.messages == ["a line"]


def test_progress_without_a_terminal_is_a_line_a_quarter() -> None:
    out = io.StringIO()
    with Console(out=out).progress("generating", 8) as advance:
        for _ in range(8):
            advance(1)
    assert out.getvalue().splitlines() == [f"generating: {n}/8" for n in (2, 4, 6, 8)]


def test_progress_on_a_terminal_is_a_bar_that_goes_away() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        console = Console(out=terminal)
        with console.progress("generating", 3) as advance:
            advance(3)
            console.print("a line above the bar")
        console.print("after")
    seen = read_to_the_end(ours)
    assert "3/3" in seen and "a line above the bar" in seen and "after" in seen
    assert "\x1b[2K" in seen  # the bar's line is erased


@pytest.mark.parametrize("rank", [0, 2])
def test_progress_survives_an_error_inside(rank: int) -> None:
    console = Console(rank, out=io.StringIO())
    with pytest.raises(ValueError, match="inside"), console.progress("work", 2):
        raise ValueError("inside")
    console.print("still usable")
