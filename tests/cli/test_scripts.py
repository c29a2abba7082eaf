"""The launch scripts: they run the real command, alone and as two agents of one job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = sorted(LAUNCH.glob("train_*.sh"))
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "MEGAVERL_PYTHON": sys.executable,
}
DRY = ["--dry-run", "--no-file-checks", "model.path=m", "data.train=t.jsonl", "reward=gsm8k"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_right_bash_and_can_be_run(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert os.access(script, os.X_OK)


def test_one_node(tmp_path):
    done = subprocess.run(
        [LAUNCH / "train_one_node.sh", *DRY], capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("run:")


def test_two_nodes(tmp_path):
    """Two agents on this machine: both end well, and only rank 0 of the four prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = [
        subprocess.Popen(
            [LAUNCH / "train_multi_node.sh", *DRY, "actor.tp=4"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={
                **ENVIRONMENT,
                "NNODES": "2",
                "NODE_RANK": str(node),
                "NPROC": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for node in range(2)
    ]
    outputs = [agent.communicate(timeout=300) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert [out.count("run:") for out, _ in outputs] == [1, 0]


@pytest.mark.parametrize("missing", ["NNODES", "NODE_RANK", "MASTER_ADDR"])
def test_what_several_nodes_must_be_told(missing, tmp_path):
    given = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "host0"}
    del given[missing]
    done = subprocess.run(
        [LAUNCH / "train_multi_node.sh"], capture_output=True, text=True, cwd=tmp_path, env={**ENVIRONMENT, **given}
    )
    assert done.returncode == 2
    assert f"set {missing}." in done.stderr
