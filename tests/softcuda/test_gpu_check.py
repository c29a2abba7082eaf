"""`tools/gpu_check.py` on software devices: its checks pass there, fail when what they
are about is broken, and never say ok for work on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher import ROOT
from tests.softcuda.broken_checks import BREAKS, VARIABLE
from tests.softcuda.install import Options, environment
from tools import gpu_check
from tools.gpu_check_models import REHEARSAL
from tools.gpu_check_parts import CHECKS

OPTIONS = Options(devices=2, memory=24 << 30)
# The others take minutes.
IS_WHOLE = bool(os.environ.get("MEGAVERL_TEST_SOFTCUDA"))
QUICK = ("engine", "ipc")
CHOSEN = (
    BREAKS.keys()
    if IS_WHOLE
    else ("the work is done on the CPU", "IPC falls back to messages")
)
# Nothing of Transformer Engine, graphs and TRL is there.
NOT_CHECKED = {"transformer_engine", "graphs", "beside_trl"}


def test_the_checks_pass_where_nothing_is_broken(
    libraries: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "tools/gpu_check.py",
        "--rehearsal",
        "--json",
        str(report),
    ]
    command += [] if IS_WHOLE else ["--only", *QUICK]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment(libraries, OPTIONS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads(report.read_text())["sections"]
    status = {
        each["name"]: each["status"]
        for each in sections["one GPU"] + sections["two GPUs or more"]
    }
    expected = {
        name: "note" if name in NOT_CHECKED else "ok"
        for name in (CHECKS if IS_WHOLE else QUICK)
    }
    assert status == expected, done.stdout
    assert [each["status"] for each in sections["machine"]] == ["ok", "note"]


def test_every_check_that_passes_is_broken_once() -> None:
    assert {each.check for each in BREAKS.values()} == CHECKS.keys() - NOT_CHECKED


@pytest.mark.parametrize("name", CHOSEN)
def test_a_check_fails_where_what_it_is_about_is_broken(
    libraries: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    broken = BREAKS[name]
    for variable, value in (
        environment(libraries, OPTIONS) | {REHEARSAL: "1", VARIABLE: name}
    ).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(gpu_check, "MODULE", "tests.softcuda.broken_checks")
    found = gpu_check.run(broken.check, CHECKS[broken.check], "cuda", 2, 300.0)
    assert found.status == "fail" and broken.says in found.found, found.found


def test_a_process_without_a_gpu_checks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where NVML names GPUs and CUDA does not start."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = gpu_check.run(
        "local_transport", CHECKS["local_transport"], "cuda", 1, 120.0
    )
    assert found.status == "fail"
    assert (
        "nothing was checked: this process computes on cpu, not on cuda" in found.found
    )


def test_gpus_on_which_cuda_does_not_start_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "count_gpus", lambda: 8)
    monkeypatch.setattr(gpu_check, "driver_older_than_torch", lambda: None)
    monkeypatch.setattr(gpu_check, "cpu_torch_beside_gpus", lambda: None)
    assert gpu_check.main(["--only", "training"]) == 1
    said = capsys.readouterr().out
    assert (
        "8 GPUs are listed, but CUDA does not start" in said and "training" not in said
    )
    monkeypatch.setattr(
        gpu_check,
        "driver_older_than_torch",
        lambda: "The NVIDIA driver serves CUDA up to 12.4",
    )
    assert gpu_check.main([]) == 1
    assert "serves CUDA up to 12.4" in capsys.readouterr().out
