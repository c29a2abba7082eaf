"""The checks of a first hour on GPUs: what of them a CPU can do, in the processes that a GPU's machine would start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tools import gpu_check
from tools.gpu_check_models import read_steps
from tools.gpu_check_parts import CHECKS


def test_what_a_cpu_can_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of their own for each; one that breaks hides no other; what needs a GPU says so; a table, and JSON."""
    # Unknown to its process.
    monkeypatch.setitem(CHECKS, "broken", replace(CHECKS["collectives"], world="one"))
    report = tmp_path / "report.json"
    names = ["broken", "packing", "graphs"]
    assert (
        gpu_check.main(["--device", "cpu", "--only", *names, "--json", str(report)])
        == 1
    )
    found = json.loads(report.read_text())
    checks = found["sections"]["one GPU"]
    assert [(each["name"], each["status"]) for each in checks] == list(
        zip(names, ["fail", "ok", "note"], strict=True)
    )
    assert (
        "KeyError: 'broken'" in checks[0]["found"]
        and "largest difference" in checks[1]["found"]
    )
    assert checks[2]["found"] == "not checked: it needs a GPU"
    assert not found["healthy"] and found["gpus"] == 0 and found["versions"]["torch"]
    assert "FAIL  broken" in capsys.readouterr().out


def test_what_cannot_be_checked_says_why() -> None:
    assert CHECKS["saving_memory"].why_not("cpu", 0) == "it needs a GPU"
    assert CHECKS["ipc"].why_not("cuda", 1) == "it needs two GPUs"
    assert (
        CHECKS["point_to_point"].ranks("cuda", 8) == 8
        and CHECKS["engine"].ranks("cuda", 8) == 1
    )
    assert gpu_check.main([]) == 2, "no GPU here"


def test_the_budget_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """What it leaves out is named, and is no success of the checks."""
    assert (
        gpu_check.main(
            ["--device", "cpu", "--only", "packing", "training", "--budget", "0"]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert said.count("not checked: the budget of 0 minutes is spent") == 2


def test_the_engine_comes_first_and_two_gpus_last() -> None:
    assert next(iter(CHECKS)) == "engine"
    sections = [check.section for check in CHECKS.values()]
    assert sections == sorted(sections), "one GPU, then two or more"


def test_steps_that_were_validated_count(tmp_path: Path) -> None:
    """Their second record has no reward: it adds to the first, and does not take its place."""
    rows = [
        {"step": 1, "reward/mean": 0.5, "actor/loss": 1.0},
        {"step": 2, "reward/mean": 0.25},
    ]
    rows.append({"step": 2, "validation/reward": 0.75})
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    steps = read_steps(tmp_path / "metrics.jsonl")
    assert steps[1] == {"step": 1, "reward/mean": 0.5, "actor/loss": 1.0}
    assert steps[2] == {"step": 2, "reward/mean": 0.25, "validation/reward": 0.75}
