"""Starting ranks without torchrun: real processes, exit codes, and nothing on the terminal but what they say."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from socket import SOCK_DGRAM
from threading import Thread
from typing import NoReturn

import psutil
import pytest

from megaverl.config import Config
from megaverl.errors import GridError
from megaverl.gpus import count_gpus
from megaverl.processes import MOST_FILES, ending_with_parent
from megaverl.rank_environment import threads_per_rank
from megaverl.trainer.elastic_agent import check_world, default_nproc, start_ranks
from tests.launcher import Ended, Launcher
from tests.trainer.conftest import command_arguments, environment, inputs  # noqa: F401  (a fixture)

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("rank_script.py")


def start(launch: Launcher, how: str, folder: Path) -> Ended:
    """`start_ranks` with two ranks that end so, in a copy of a process that has imported torch."""
    target = "tests.cli.test_launch:start_in_a_copy"
    return launch.ranks(1, target, how=how, folder=folder)


def start_in_a_copy(how: str, folder: str) -> NoReturn:
    for name in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE"):
        del os.environ[name]
    if how == "leave":
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        Thread(target=signal_when_ready, args=(reading,), daemon=True).start()
    sys.exit(start_ranks([str(SCRIPT), folder, how], 2, "the-logs"))


def signal_when_ready(ranks: int) -> None:
    """To the launcher, which is this process, once both of its ranks wait for it."""
    with open(ranks) as said:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            if [said.readline(), said.readline()] == ["ready\n", "ready\n"]:
                os.kill(os.getpid(), number)


def test_ranks_that_end_well(launch: Launcher, tmp_path: Path) -> None:
    ended = start(launch, "well", tmp_path)
    assert (ended.codes, ended.text) == ([0], "")
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank in range(2):
        report = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert report == {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": threads,
        }


def test_threads_are_a_share_of_the_cores_and_few_beside_a_gpu():
    assert [threads_per_rank(8, 208, gpus) for gpus in (0, 8)] == [26, 8]
    assert [threads_per_rank(2, 2, gpus) for gpus in (0, 2)] == [
        1,
        1,
    ] and threads_per_rank(8, 32, 8) == 4


KILLED = "rank 1 was ended by SIGKILL. Out of memory is the usual cause (see dmesg). Its log: the-logs/rank_1.log"


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("exit2", 2, ["rank 1 says why"]),
        ("exit17", 17, ["rank 1 says why", "rank 1 ended with exit code 17."]),
        ("killed", 1, [KILLED]),
        ("lost", 1, [KILLED]),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_tells_alone(
    launch: Launcher, tmp_path: Path, how: str, code: int, said: list[str]
) -> None:
    ended = start(launch, how, tmp_path)
    assert ended.codes == [code]
    lines = ended.text.splitlines()
    assert lines[-len(said) :] == said and (how == "lost" or len(lines) == len(said)), (
        "those that missed it may say so"
    )


def test_ranks_are_told_to_leave_and_given_time(
    launch: Launcher, tmp_path: Path
) -> None:
    """Signals go on to the ranks, and what they say of it (75: saved and left) is the command's exit code."""
    ended = start(launch, "leave", tmp_path)
    assert (ended.codes, ended.text) == ([75], "")


def most_files() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if hard == resource.RLIM_INFINITY else hard


def test_a_real_run_from_outside(
    inputs: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """It listens on the loopback alone, as whoever reaches its store can change it; it
    may open as many files as the machine lets it; no library says anything; and Ctrl-C,
    which the launcher and its rank get, leaves one line.
    """
    more = [
        "run.nproc=1",
        "actor.tp=1",
        "trainer.steps=100000",
        "checkpoint={save_interval: 0, export_hf: false}",
    ]
    command = [
        sys.executable,
        "-m",
        "megaverl.cli.train",
        *command_arguments(inputs, tmp_path),
        *more,
    ]
    running = subprocess.Popen(
        ending_with_parent(
            ["bash", "-c", 'ulimit -S -n 256; exec "$@"', "bash", *command]
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline().startswith("accuracy counts responses")
    assert running.stdout.readline().startswith("step  ")
    launcher = psutil.Process(running.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    assert len(processes) >= 2
    assert {process.rlimit(psutil.RLIMIT_NOFILE)[0] for process in processes} == {
        min(most_files(), MOST_FILES)
    }
    connections = [
        each for process in processes for each in process.net_connections("inet")
    ]
    listening = [
        each.laddr.ip
        for each in connections
        if each.status == psutil.CONN_LISTEN or each.type == SOCK_DGRAM
    ]
    # The store, and gloo.
    assert len(listening) >= 2 and set(listening) == {"127.0.0.1"}
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=300)
    assert all(line.startswith("step ") for line in out.splitlines()), out
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
    assert "critic: tp=4" in str(caught.value) and "rollout.tp: found 3" in str(
        caught.value
    )
    check_world(config, "train", 12)
