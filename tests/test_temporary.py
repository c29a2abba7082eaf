"""Temporary files of a command: one folder, which no ended process leaves behind for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megaverl import temporary
from tests.launcher import Launcher

CHILD = """
import os, sys, tempfile
from pathlib import Path
from megaverl.temporary import temporary_folder

with temporary_folder() as folder:
    assert Path(tempfile.mkdtemp(prefix="torchelastic_")).parent == folder
    print(folder, os.environ.get("VLLM_RPC_BASE_PATH", ""), flush=True)
    sys.stdin.readline()
"""


def start(base: Path, **environment: str) -> tuple[subprocess.Popen[str], Path, str]:
    """Start a command; return it, its folder, and the folder of vLLM's sockets if that is another one."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MEGAVERL_TEMPORARY", "TMPDIR")
    }
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**clean, "TMPDIR": str(base), **environment},
    )
    assert child.stdout is not None
    folder, _, sockets = child.stdout.readline().rstrip("\n").partition(" ")
    return child, Path(folder), sockets


def end(child: subprocess.Popen[str]) -> None:
    child.communicate("\n")
    assert child.returncode == 0


def test_a_command_removes_what_its_processes_left(tmp_path: Path) -> None:
    command, folder, _ = start(tmp_path)
    rank, joined, _ = start(folder, MEGAVERL_TEMPORARY=str(folder))
    assert joined == folder
    assert folder.parent == tmp_path
    # A killed rank leaves its files, and the command that started it removes them.
    rank.kill()
    rank.communicate()
    end(command)
    assert list(tmp_path.iterdir()) == []


def test_the_next_command_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    command, folder, _ = start(tmp_path)
    rank, _, _ = start(folder, MEGAVERL_TEMPORARY=str(folder))
    os.kill(command.pid, signal.SIGKILL)
    command.communicate()
    end(start(tmp_path)[0])
    assert folder.is_dir(), "a rank of the killed command still uses it"
    rank.kill()
    rank.communicate()
    end(start(tmp_path)[0])
    assert list(tmp_path.iterdir()) == []


def test_other_folders_stay(tmp_path: Path) -> None:
    (tmp_path / "megaverl_launch_1").mkdir()
    (tmp_path / "megaverl-notes.txt").write_text("mine")
    end(start(tmp_path)[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "megaverl-notes.txt",
        "megaverl_launch_1",
    ]


def test_sockets_have_a_short_path(tmp_path: Path) -> None:
    base = tmp_path / ("long" * 20)
    base.mkdir()
    command, _, sockets = start(base)
    assert len(sockets) <= temporary.MAX_SOCKET_FOLDER and Path(sockets).is_dir()
    end(command)
    assert not Path(sockets).exists()


def test_shared_memory_of_a_killed_process_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temporary, "SHARED_MEMORY", tmp_path)
    marks = [
        temporary.claim_shared_memory(name)
        for name in ("megaverl-dead", "megaverl-alive")
    ]
    for name in ("megaverl-dead_0", "megaverl-alive_0"):
        (tmp_path / name).touch()
    os.close(marks[0] or 0)  # as the kernel does when the process is killed
    temporary.remove_abandoned(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"megaverl-alive.used-by-{os.getpid()}", "megaverl-alive_0"]
    temporary.release_shared_memory("megaverl-alive", marks[1])
    assert [path.name for path in tmp_path.iterdir()] == ["megaverl-alive_0"]


def is_wandb_imported() -> bool:
    import megatron.core.timers  # noqa: F401 - imports wandb if it may

    return "wandb" in sys.modules


def test_megatron_core_does_not_import_wandb(launch: Launcher) -> None:
    assert launch.world(1, "tests.test_temporary:is_wandb_imported") == [False]
