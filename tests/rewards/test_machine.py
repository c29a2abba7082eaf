"""A machine of its own for shell commands, in real namespaces."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megaverl.rewards.sandbox import machine

START = [sys.executable, "-sSP", machine.__file__]
SETTING = {"size_mb": 16, "network": False, "read_only": []}


class Machine:
    """The other side of its protocol."""

    def __init__(self, **setting: Any) -> None:
        self.process = subprocess.Popen(
            START, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.send({**SETTING, **setting})
        self.ready = self.receive()

    def send(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline())
        for name in {"output", "errors"} & answer.keys():
            answer[name] = base64.b64decode(answer[name]).decode()
        return dict(answer)

    def run(self, command: str, **request: Any) -> dict[str, Any]:
        self.send({"id": 1, "command": command, **request})
        return self.receive()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def refused_namespaces() -> str:
    """Return why this machine refuses namespaces; "" if it does not."""
    made = Machine()
    made.end()
    return str(made.ready.get("error", ""))


@pytest.fixture(scope="module")
def own() -> Iterator[Machine]:
    if refused := refused_namespaces():
        pytest.skip(f"this machine refuses namespaces: {refused}")
    made = Machine()
    yield made
    made.end()


def test_a_command_gets_its_input_and_returns_its_output(own: Machine) -> None:
    given = base64.b64encode(b"three\n").decode()
    answer = own.run(
        "cat; echo $A >&2; pwd; exit 3", input=given, env={"A": "1"}, cwd="/tmp"
    )
    assert answer == {
        "id": 1,
        "code": 3,
        "output": "three\n/tmp\n",
        "errors": "1\n",
        "timed_out": False,
    }
    assert own.run("true", cwd="/none")["code"] == 127


def test_it_sees_this_machines_programs_and_nothing_else(
    own: Machine, tmp_path: Path
) -> None:
    listed = own.run("ls / /etc; env")["output"]
    assert "usr" in listed and "shadow" not in listed and "PYTEST" not in listed
    for command in (
        f"test -e {tmp_path}",
        "touch /usr/bin/there",
        "mount -t tmpfs none /srv",
        "mknod /disk b 8 0",
        f"kill -0 {os.getpid()}",
        "test -n \"$(ls /proc | grep -E '^[0-9]{4}')\"",
    ):
        assert own.run(command)["code"] != 0, command
    assert own.run("grep -c : /proc/net/dev")["output"] == "1\n", "the loopback alone"
    own.run("echo kept > ~/file")
    assert own.run("cat ~/file")["output"] == "kept\n"
    assert "No space" in own.run("head -c 32M /dev/zero > ~/big")["errors"]
    own.run("rm ~/big")


def test_a_program_in_the_background_goes_on_and_holds_nothing_up(own: Machine) -> None:
    answer = own.run("sleep 987 & echo started", seconds=60.0)
    assert answer["output"] == "started\n"
    assert own.run("pgrep -f 'sleep 987'")["code"] == 0


def test_commands_that_take_too_long_and_commands_that_are_cancelled(
    own: Machine,
) -> None:
    answer = own.run("echo begun; sleep 600", seconds=0.2)
    assert answer["timed_out"] and answer["code"] == -9
    own.send({"id": 7, "command": "sleep 601"})
    own.send({"id": 8, "command": "echo beside"})
    assert own.receive()["output"] == "beside\n", "they run side by side"
    own.send({"id": 7, "cancel": True})
    assert own.receive()["code"] == -9
    assert own.run("pgrep -f 'sleep 60[01]'")["code"] != 0


def test_no_command_can_end_the_machine_or_outlive_it(own: Machine) -> None:
    other = Machine()
    other.run("kill -9 1; kill -9 -1")
    assert other.run("echo here")["output"] == "here\n"
    other.run("setsid sleep 986 > /dev/null 2>&1 &")
    outside = ["pgrep", "-f", "sleep 986"]
    assert subprocess.run(outside, capture_output=True, check=False).returncode == 0
    other.end()
    # The kernel ends the namespace before the process that holds it is gone.
    assert subprocess.run(outside, capture_output=True, check=False).returncode == 1


def test_further_folders(own: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    other = Machine(read_only=[str(tmp_path)])
    assert other.run(f"cat {tmp_path}/file; touch {tmp_path}/x")["output"] == "text"
    other.end()
    assert not (tmp_path / "x").exists()
    assert "error" in Machine(read_only=["/none/there"]).ready
