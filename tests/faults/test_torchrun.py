"""`torchrun --max-restarts` starts the ranks again, and they go on by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megaverl.processes import ending_with_parent
from tests.faults.injector import Fault
from tests.faults.runs import Remains, arguments, differences, remains
from tests.launcher import free_port
from tests.trainer.conftest import ROOT, environment


def test_a_restart_by_torchrun(inputs: Path, expected: Remains, tmp_path: Path) -> None:
    """`resume=never` is what the run was started with; its own checkpoints come before that when it is restarted."""
    fault = Fault("kill", 1, "critic_update", 3, mark=str(tmp_path / "struck"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        ending_with_parent(
            [*torchrun, f"--master-port={free_port()}", "-m", "tests.faults.rank"]
            + arguments(inputs, tmp_path, "--resume", "never")
        ),
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env=environment(**fault.environment(), OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "struck").exists()
    assert "resumed from" in done.stdout and "of 4 steps are done" in done.stdout
    assert differences(remains(tmp_path / "run"), expected) == []
