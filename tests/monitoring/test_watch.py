"""A run that goes on, in the terminal: read as it grows, and shown with its curves, stages and ranks."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megaverl.cli.main import main
from megaverl.distributed.heartbeat import Heartbeat
from megaverl.monitoring.report import MOST_RANKS, RunView
from megaverl.monitoring.tracker import Tracker
from megaverl.processes import ending_with_parent
from megaverl.trainer.job import RanksFile
from tests.terminals import read_to_the_end


def shown(view: RunView) -> str:
    view.update()
    console = Console(width=100, file=io.StringIO())
    console.print(view.render(100))
    return console.file.getvalue()  # type: ignore[attr-defined]


def beat(doing: str, waits_for: str = "", waited: float = 0.0) -> Heartbeat:
    return Heartbeat(doing, 3.0, waits_for, waited, "loop.py:1", "host", 1)  # type: ignore[arg-type]


def record(tracker: Tracker, step: int) -> None:
    times = {"time/step_ms": 1000.0, "time/rollout_ms": 750.0, "time/other_ms": 250.0}
    tracker.log(step, {"reward/mean": step / 10, "actor/loss": float("nan"), **times})


def test_it_grows_with_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("trainer: {steps: 9}\n")
    view = RunView(tmp_path)
    assert "step 0 of 9; no rank is running" in shown(view)
    with Tracker(tmp_path, []) as tracker:
        for step in (1, 2, 3):
            record(tracker, step)
        text = shown(view)
        assert "step 3 of 9" in text and "0.1 to 0.3" in text and "▁" in text
        assert "rollout" in text and "75%" in text and "other" not in text
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "rew')  # half a line, as a run writes it
            file.flush()
            assert "step 3 of 9" in shown(view)
            file.write('ard/mean": 2.5}\n')
        assert "step 4 of 9" in shown(view) and view.values["reward/mean"] == [
            0.1,
            0.2,
            0.3,
            2.5,
        ]
    with Tracker(tmp_path, [], resume_step=2) as tracker:
        record(tracker, 3)
        assert "step 3 of 9" in shown(view) and view.values["reward/mean"] == [
            0.1,
            0.2,
            0.3,
        ]


def test_it_says_who_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time": 1.0, "reward/mean": 1.0}\n'
    )
    waits = beat("step 2: rollout", "ranks", 40.0)
    write = RanksFile(tmp_path)
    write({0: replace(waits, collective="all_reduce"), 1: beat("step 2: reward")})
    lines = [" ".join(line.split()) for line in shown(RunView(tmp_path)).splitlines()]
    assert "rank 0 step 2: rollout waits for others 40 s all_reduce" in lines
    assert "rank 1 step 2: reward works 3 s" in lines
    write({0: beat("step 3: rollout")})  # too soon to be written again
    assert "step 3: rollout" not in shown(RunView(tmp_path))
    RanksFile(tmp_path)(
        dict.fromkeys(range(MOST_RANKS), waits) | {MOST_RANKS: beat("step 2: reward")}
    )
    lines = [" ".join(line.split()) for line in shown(RunView(tmp_path)).splitlines()]
    assert (
        f"{MOST_RANKS} ranks step 2: rollout waits for others 0, 1, 2, 3, 4, 5, 6, 7, ..."
        in lines
    )
    assert f"1 ranks step 2: reward works {MOST_RANKS}" in lines
    RanksFile(tmp_path)({0: replace(waits, left=True)})
    assert "no rank is running" in shown(RunView(tmp_path))
    found = json.loads((tmp_path / "ranks.json").read_text())
    (tmp_path / "ranks.json").write_text(json.dumps(found | {"time": time.time() - 60}))
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert "no rank is running" in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "nowhere")]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_a_key_ends_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time": 1.0, "reward/mean": 1.0}\n'
    )
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "megaverl",
        "watch",
        str(tmp_path),
        "--every",
        "600",
    ]
    watching = subprocess.Popen(
        ending_with_parent(command), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    while b"reward" not in shown:
        shown += os.read(ours, 65536)
    os.write(ours, b"xq")
    read_to_the_end(ours)
    assert watching.wait() == 0


def test_labels_are_whole_and_times_have_a_unit(tmp_path: Path) -> None:
    record = {
        "step": 1,
        "time": 1.0,
        "train/step_time_ms": 27900.0,
        "rollout/logprob_diff_max": 0.25,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    view = RunView(tmp_path)
    lines = [" ".join(line.split()) for line in shown(view).splitlines()]
    assert "time per step 27.9 s ▅ 27.9 s to 27.9 s" in lines
    assert any(
        line.startswith("engine and trainer: largest log-prob difference 0.25")
        for line in lines
    )
    narrow = Console(width=60, file=io.StringIO())
    narrow.print(view.render(60))
    words = narrow.file.getvalue().split()  # type: ignore[attr-defined]
    assert "difference" in words, "a label that is too long goes on in the next line"
