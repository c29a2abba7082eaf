"""Harbor's tasks as rows, and its trials as episodes: the real package in a process of its own, without containers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megaverl.config.files_and_packages import source_problem
from megaverl.data.sources import kind_of, open_source
from megaverl.errors import ConfigError, DataError, EnvironmentFault
from megaverl.rollout.environments import Limits, check_options
from megaverl.rollout.environments.harbor import COLUMN, TrialRunner
from tests.launcher import Launcher
from tests.rewards.test_machine import refused_namespaces
from tests.rollout.environments.grpo_step import take_grpo_step
from tests.rollout.environments.harness_python import harness_python
from tests.rollout.environments.test_gateway import Says, played, written

PYTHON = harness_python("harbor")
REFUSED = refused_namespaces()
pytestmark = pytest.mark.skipif(
    bool(REFUSED), reason=f"this machine refuses namespaces: {REFUSED}"
)

OPTIONS = {
    "agent": "tests.rollout.environments.harbor_agent:Asker",
    "environment": "namespaces",
    "environment_options": {"size_mb": 64},
    "python": PYTHON,
}
LIMITS = Limits(max_turns=6, turn_tokens=600, total_tokens=9000)
COUNTS = "wc -m < answer.txt > /logs/verifier/reward.txt"


@pytest.fixture(scope="module", autouse=True)
def harbor_ends() -> Iterator[None]:
    yield
    for runner in TrialRunner._shared.values():
        runner.process.kill()


def write_task(
    folder: Path,
    test: str,
    dockerfile: str = "FROM debian:12\nWORKDIR /app\nENV UNIT=letters\n",
    toml: str = "",
) -> Path:
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(f'schema_version = "1.3"\n{toml}\n')
    (folder / "instruction.md").write_text(f"do {folder.name}\n")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}\n")
    return folder


def row_of(folder: Path) -> dict[str, Any]:
    return open_source(f"harbor:{folder}")[0]


def play_task(task: Path, *texts: str, **more: Any) -> Any:
    return played(
        Says(*texts), {**OPTIONS, **more}, row_of(task), name="harbor", limits=LIMITS
    )[0]


def test_tasks_are_rows(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_task(tmp_path / "set" / name, COUNTS)
    source = f"harbor:{tmp_path / 'set'}"
    assert kind_of(source) == "harbor" and source_problem(source) == ""
    rows = open_source(source)
    assert len(rows) == 2 and rows.where(0) == str(tmp_path / "set" / "a")
    path = str(tmp_path / "set" / "b")
    assert rows[1] == {"prompt": "do b", "answer": "", COLUMN: {"path": path}}
    assert json.loads(json.dumps(rows[1])) == rows[1], "it can travel"
    was = rows.fingerprint
    (tmp_path / "set" / "a" / "instruction.md").write_text("do more")
    assert open_source(source).fingerprint != was
    assert "there is no folder" in source_problem("harbor:none")
    with pytest.raises(DataError, match="no task of Harbor is there"):
        open_source("harbor:none")
    (tmp_path / "set" / "a" / "task.toml").write_text("x = ")
    with pytest.raises(DataError, match="a is no task .* that can be read: Invalid"):
        open_source(source)
    (tmp_path / "set" / "a" / "task.toml").write_text("")
    shutil.rmtree(tmp_path / "set" / "a" / "environment")
    with pytest.raises(DataError, match="has no folder environment"):
        open_source(source)


def test_the_tests_of_a_task_reward_what_the_policy_did(tmp_path: Path) -> None:
    task = write_task(tmp_path / "count", f'test "$UNIT" = letters && {COUNTS}')
    view = play_task(task, "hello$")
    assert view.prompt == written("<user>do count\n$\n<assistant>")
    assert view.tokens == written("hello$")
    assert view.rewards == [6.0], "the letters and the end of the line"
    named = write_task(
        tmp_path / "named",
        """echo '{"speed": 2, "style": 0.5}' > /logs/verifier/reward.json""",
    )
    assert play_task(named, "x$", reward="style").rewards == [0.5]
    with pytest.raises(ConfigError, match="no reward 'reward' among speed, style"):
        play_task(named, "x$")


def test_a_machine_of_its_own(tmp_path: Path) -> None:
    """The files of a task are there, and nothing of the run."""
    (tmp_path / "secret.txt").write_text("secret")
    test = f"""
    grep -q seven data/seven.txt && test "$(cat /made)" = made || exit 1
    test -e {tmp_path} || test -e ~/.bashrc || test -e /etc/shadow && exit 1
    touch /usr/there 2> /dev/null && exit 1
    test "$(grep -c : /proc/net/dev)" = 1 || exit 1
    test "$(id -u)" = 0 && test "$(ps ax | grep -c harbor_worker.py)" = 1 || exit 1
    ln -s {tmp_path}/secret.txt /logs/verifier/leads_out
    echo 1 > /logs/verifier/reward.txt
    """
    task = write_task(
        tmp_path / "task",
        test,
        "FROM x\nWORKDIR /app\nCOPY data data\nRUN echo made \\\n  > /made\n",
        '[environment]\nnetwork_mode = "no-network"',
    )
    (task / "environment" / "data").mkdir()
    (task / "environment" / "data" / "seven.txt").write_text("seven")
    logs = tmp_path / "logs"
    assert play_task(task, "x$", folder=str(logs)).rewards == [1.0]
    [kept] = logs.glob("*/verifier/reward.txt")
    assert kept.read_text() == "1\n"
    assert not [file for file in logs.rglob("*") if file.name == "leads_out"]


def test_whose_fault_a_failure_is(tmp_path: Path) -> None:
    silent = write_task(tmp_path / "silent", "true")
    with pytest.raises(EnvironmentFault, match="RewardFileNotFoundError"):
        play_task(silent, "x$")
    assert play_task(silent, "x$", error_reward=-1.0).rewards == [-1.0]
    words = write_task(tmp_path / "words", "echo well > /logs/verifier/reward.txt")
    with pytest.raises(EnvironmentFault, match="VerifierOutputParseError"):
        play_task(words, "x$")
    # The machine ends while the agent works.
    with pytest.raises(EnvironmentFault, match="the machine has ended"):
        play_task(write_task(tmp_path / "left", COUNTS), "leave$")
    broken = write_task(tmp_path / "broken", COUNTS, "FROM x\nRUN false\n")
    with pytest.raises(EnvironmentFault, match="RUN false ended with 1"):
        play_task(broken, "x$")
    # Time that the policy has used up is its own doing: the tests are run.
    late = write_task(
        tmp_path / "late",
        "echo 0.25 > /logs/verifier/reward.txt",
        toml="[agent]\ntimeout_sec = 1.0",
    )
    slow = {"command": "sleep 30"}
    assert play_task(late, "x$", agent_options=slow).rewards == [0.25]


def test_mistakes_end_the_run(tmp_path: Path) -> None:
    for number, (more, said) in enumerate(
        (
            ({"dockerfile": "FROM x\nADD a b\n"}, "ADD a b needs an image"),
            ({"toml": "[agent]\ntimeout_sec = 'x'"}, "timeout_sec"),
            ({"toml": "[agent]\nuser = 'agent'"}, "has only root"),
        )
    ):
        task = write_task(tmp_path / f"task{number}", COUNTS, **more)
        with pytest.raises(ConfigError, match=f"(?s)task{number}: .*{said}"):
            play_task(task, "x$")
    task = write_task(tmp_path / "task", COUNTS)
    with pytest.raises(ConfigError, match="namspaces"):
        play_task(task, "x$", environment="namspaces")
    with pytest.raises(ConfigError, match="no_such_module"):
        play_task(task, "x$", agent="no_such_module:Agent")
    with pytest.raises(ConfigError, match="the row is no task of Harbor"):
        played(Says(), OPTIONS, {}, name="harbor")
    for wrong, said in (
        ({"python": "/no/python"}, "has no package harbor"),
        ({"trial": {"task": {}}}, "trial sets task"),
        ({"agent_options": 3}, "agent_options=3 is no mapping"),
        ({"command": ["a"]}, "are of the environment 'gateway'"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_options("harbor", {**OPTIONS, **wrong})


@pytest.mark.skipif(shutil.which("tmux") is None, reason="terminus-2 needs tmux")
def test_an_agent_of_the_package(tmp_path: Path) -> None:
    """Terminus 2, which runs beside the environment, and types the policy's keys into a terminal there."""

    def turn(done: bool, *keys: str) -> str:
        commands = [{"keystrokes": f"{each}\n", "duration": 0.2} for each in keys]
        fields = {"analysis": "a", "plan": "p", "commands": commands}
        return json.dumps({**fields, "task_complete": done}) + "$"

    task = write_task(tmp_path / "count", COUNTS)
    texts = (turn(False, "printf 12345 > /app/answer.txt"), turn(True), turn(True))
    options = {"record_terminal_session": False}
    view = play_task(task, *texts, agent="terminus-2", agent_options=options)
    assert len(view.spans) == 3 and sum(view.rewards) == 5.0


def test_a_step_of_grpo_on_two_ranks(launch: Launcher, tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "count", COUNTS)
    write_task(tmp_path / "tasks" / "half", "echo 0.5 > /logs/verifier/reward.txt")
    record, taken = take_grpo_step(
        launch,
        tmp_path,
        "harbor",
        f"data.train=['harbor:{tmp_path / 'tasks'}']",
        f"environment.options={json.dumps(OPTIONS)}",
    )
    found = [(sample["response"], sample["reward"]) for sample in taken]
    counted = [(text, reward) for text, reward in found if reward != 0.5]
    assert len(found) == 8 and len(counted) == 4
    assert all(reward == len(text) + 1 for text, reward in counted)
    assert record["environment/faults"] == 0 and record["actor/grad_norm"] > 0
