"""Starting ranks without torchrun: real processes, exit codes, and nothing on the terminal but what they say."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import SOCK_DGRAM
from typing import Any

import psutil
import pytest

from megaverl.config import Config
from megaverl.errors import GridError
from megaverl.gpus import count_gpus
from megaverl.processes import MOST_FILES, ending_with_parent
from megaverl.trainer.elastic_agent import check_world, default_nproc, threads_per_rank
from tests.trainer.conftest import command_arguments, environment, inputs  # noqa: F401  (a fixture)

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("rank_script.py")


def command(how: str, folder: Path, nproc: int = 2) -> dict[str, Any]:
    """What starts ranks, as arguments of subprocess."""
    code = (
        "import sys; from megaverl.trainer.elastic_agent import start_ranks; "
        f"sys.exit(start_ranks([{str(SCRIPT)!r}, {str(folder)!r}, {how!r}], {nproc}, 'the-logs'))"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")}
    return {"args": ending_with_parent([sys.executable, "-c", code]), "text": True, "cwd": ROOT, "env": environment}


def start(how: str, folder: Path, nproc: int = 2) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**command(how, folder, nproc), capture_output=True, timeout=300)


def test_ranks_that_end_well(tmp_path):
    done = start("well", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank in range(2):
        report = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert report == {"sum": 3, "world": 2, "threads": threads}


def test_threads_are_a_share_of_the_cores_and_few_beside_a_gpu():
    assert [threads_per_rank(8, 208, gpus) for gpus in (0, 8)] == [26, 8]
    assert [threads_per_rank(2, 2, gpus) for gpus in (0, 2)] == [1, 1] and threads_per_rank(8, 32, 8) == 4


KILLED = "rank 1 was ended by SIGKILL. Out of memory is the usual cause (see dmesg). Its log: the-logs/rank_1.log"


def test_a_rank_that_fails_ends_the_others_and_tells_alone(tmp_path):
    expected = {
        "exit2": (2, ["rank 1 says why"]),
        "exit17": (17, ["rank 1 says why", "rank 1 ended with exit code 17."]),
        "killed": (1, [KILLED]),
        "lost": (1, None),
    }
    with ThreadPoolExecutor() as together:
        ended = dict(zip(expected, together.map(lambda how: start(how, tmp_path), expected), strict=True))
    for how, (code, said) in expected.items():
        lines = [line for line in ended[how].stderr.splitlines() if line]
        assert (ended[how].returncode, ended[how].stdout) == (code, ""), how
        if said is None:  # named beside those that missed it
            assert lines[-1].startswith("rank 1 was ended by SIGKILL."), lines
        else:
            assert lines == said, how


def test_ranks_are_told_to_leave_and_given_time(tmp_path):
    """Signals go on to the ranks, and what they say of it (75: saved and left) is the command's exit code."""
    running = subprocess.Popen(**command("leave", tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout is not None
    for number in (signal.SIGUSR1, signal.SIGTERM):
        assert [running.stdout.readline().strip() for _ in range(2)] == ["ready", "ready"]
        running.send_signal(number)
    _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (75, "")


def most_files() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if hard == resource.RLIM_INFINITY else hard


def test_a_real_run_from_outside(
    inputs: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """It listens on the loopback alone, as whoever reaches its store can change it; it may open as many files as the
    machine lets it; and Ctrl-C, which the launcher and its ranks get, leaves one line."""
    more = ["rollout.engine=hf", "trainer.steps=100000", "checkpoint={save_interval: 0, export_hf: false}"]
    command = [sys.executable, "-m", "megaverl.cli.train", *command_arguments(inputs, tmp_path), *more]
    running = subprocess.Popen(
        ending_with_parent(["bash", "-c", 'ulimit -S -n 256; exec "$@"', "bash", *command]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    )
    assert running.stdout is not None
    assert any(line.startswith("step ") for line in running.stdout)
    launcher = psutil.Process(running.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    assert len(processes) == 3
    assert {process.rlimit(psutil.RLIMIT_NOFILE)[0] for process in processes} == {min(most_files(), MOST_FILES)}
    connections = [each for process in processes for each in process.net_connections("inet")]
    listening = [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN or each.type == SOCK_DGRAM]
    assert len(listening) >= 3 and set(listening) == {"127.0.0.1"}  # the store, and each rank's gloo
    os.killpg(running.pid, signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (
        130,
        "interrupted by SIGINT and ended without saving; SIGTERM lets a training run save first.\n",
    )


def test_gpus_are_counted_without_torch(monkeypatch):
    for visible, number in (("", 0), ("-1", 0), ("0", 1), ("0,3,5", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_gpus() == number


def test_how_many_processes(monkeypatch):
    config = Config(actor={"tp": 2, "pp": 2}, rollout={"tp": 3})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert default_nproc(config, "train") == 12
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert default_nproc(config, "train") == 4


def test_a_world_that_grids_do_not_fill():
    config = Config(actor={"tp": 2}, critic={"tp": 4}, rollout={"tp": 3})
    with pytest.raises(GridError) as caught:
        check_world(config, "train", 2)
    assert "critic: tp=4" in str(caught.value) and "rollout.tp: found 3" in str(caught.value)
    check_world(config, "train", 12)
