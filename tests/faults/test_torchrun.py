"""`--max-restarts` of torchrun and of nvidia-resiliency-ext's ft_launcher: the ranks
are started again, and go on by themselves; and what our agent of torchrun does not
start again.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megaverl.errors import FAILED, SAVED_AND_LEFT
from megaverl.processes import ending_with_parent
from tests.faults.injector import Fault
from tests.faults.runs import Remains, arguments, differences, remains
from tests.launcher import free_port
from tests.trainer.conftest import ROOT, environment

TORCHRUN = "torch.distributed.run"
FT_LAUNCHER = "nvidia_resiliency_ext.fault_tolerance.launcher"
# A rank that notes which start of it this is, and ends as it is told to: by each of its
# starts, then well.
RANK = """
import os, sys
with open(sys.argv[1] + "/started", "a") as file:
    file.write(os.environ["TORCHELASTIC_RESTART_COUNT"] + " ")
codes = [int(code) for code in sys.argv[2].split(",")]
turn = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
sys.exit(codes[turn] if turn < len(codes) else 0)
"""


@pytest.mark.parametrize("launcher", [TORCHRUN, FT_LAUNCHER])
def test_a_restart_in_the_job(
    launcher: str, inputs: Path, expected: Remains, tmp_path: Path
) -> None:
    """`resume=never` is what the run was started with; its own checkpoints come before that when it is restarted."""
    pytest.importorskip(
        launcher.split(".")[0], reason="pip install 'megaverl[resiliency]'"
    )
    fault = Fault("kill", 1, "critic_update", 3, mark=str(tmp_path / "struck"))
    agent = [sys.executable, "-m", launcher, "--nproc-per-node=2", "--max-restarts=1"]
    if launcher == FT_LAUNCHER:
        agent += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{free_port()}",
            "--ft-log-level=INFO",
        ]
    else:
        agent.append(f"--master-port={free_port()}")
    done = subprocess.run(
        ending_with_parent(
            [
                *agent,
                "-m",
                "tests.faults.rank",
                *arguments(inputs, tmp_path, "--resume", "never"),
            ]
        ),
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env=environment(
            **fault.environment(), OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)
        ),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "struck").exists()
    assert "resumed from" in done.stdout and "of 4 steps are done" in done.stdout
    assert differences(remains(tmp_path / "run"), expected) == []


def test_ranks_end_when_torchrun_is_killed(inputs: Path, tmp_path: Path) -> None:
    """Nobody would end them if they hung, and their node's launcher is named."""
    command = [sys.executable, "-m", TORCHRUN, "--nproc-per-node=2"]
    command += [f"--master-port={free_port()}", "-m", "tests.faults.rank"]
    # It must not be over before the launcher is gone.
    slow = Fault("stall", 1, "values", 2)
    with (tmp_path / "output").open("w") as output:
        agent = subprocess.Popen(
            [*command, *arguments(inputs, tmp_path)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(**slow.environment(), PYTHONPATH=str(ROOT)),
        )
        try:
            metrics = tmp_path / "run" / "metrics.jsonl"
            end = time.monotonic() + 120
            while not metrics.exists() and time.monotonic() < end:
                time.sleep(0.1)
            ranks = psutil.Process(agent.pid).children()
        finally:
            agent.kill()
            agent.wait()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    for rank in alive:
        rank.kill()
    text = (tmp_path / "output").read_text()
    assert len(ranks) == 2 and alive == [], text
    assert f"its launcher (process {agent.pid}) is gone" in text


@pytest.mark.parametrize(
    ("codes", "ends", "turns"),
    [([SAVED_AND_LEFT], SAVED_AND_LEFT, 1), ([FAILED, FAILED], FAILED, 2)],
)
def test_only_failures_are_counted(
    codes: list[int], ends: int, turns: int, tmp_path: Path
) -> None:
    """A run that saved because it must leave is not started again."""
    (tmp_path / "rank.py").write_text(RANK)
    command = [
        *(sys.executable, "-m", "megaverl.trainer.elastic_agent"),
        *("--max-restarts=1", "--nproc-per-node=1", "--standalone"),
        *(str(tmp_path / "rank.py"), str(tmp_path)),
        ",".join(map(str, codes)),
    ]
    done = subprocess.run(
        ending_with_parent(command),
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
        check=False,
    )
    assert done.returncode == ends, done.stdout + done.stderr
    assert (tmp_path / "started").read_text().split() == [
        str(turn) for turn in range(turns)
    ]
