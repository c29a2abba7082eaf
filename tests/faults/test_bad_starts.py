"""Nodes that do not fit together: one message on every rank, a non-zero exit, and nobody waits longer than allowed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.launcher import Ended, Launcher
from tests.trainer.conftest import command_arguments

SHORT = [
    "run={name: run, timeout_minutes: 0.05}",
    "rollout.engine=hf",
    "actor={tp: 1, optimizer: {lr: 1.0e-3}}",
]


def start(
    launch: Launcher,
    inputs: Path,
    tmp_path: Path,
    roles: list[str],
    *more: str,
    also: dict[int, list[str]] | None = None,
    **environment: str,
) -> Ended:
    """A node for each of `roles`, of one rank each; each says what it is, unless that is empty."""
    nodes = {
        rank: {"GROUP_RANK": str(rank), **({"MEGAVERL_ROLE": role} if role else {})}
        for rank, role in enumerate(roles)
    }
    ended = launch.command(
        ["train", *command_arguments(inputs, tmp_path), *SHORT, *more],
        logs=tmp_path / "output",
        ranks=len(roles),
        environment=environment,
        on_rank=nodes,
        more=also or {},
    )
    assert max(ended.seconds) < 30
    return ended


def unlike(ended: Ended, tmp_path: Path, code: int, *words: str) -> list[str]:
    """Where a job differs from one whose every rank ended with `code` and wrote why to
    its log, where it got so far, and which told the terminal once.
    """
    logs = [
        path.read_text()
        for path in sorted((tmp_path / "run" / "logs").glob("rank_*.log"))
    ]
    wrong = (
        [f"exit codes {ended.codes}"]
        if ended.codes != [code] * len(ended.codes)
        else []
    )
    wrong += (
        []
        if len(logs) in (0, len(ended.codes))
        else [f"{len(logs)} logs of {len(ended.codes)} ranks"]
    )
    wrong += [
        f"{word!r} is not in: {text}"
        for text in (*logs, ended.text)
        for word in words
        if word not in text
    ]
    times = ended.text.count(words[0])
    return wrong + ([] if times == 1 else [f"told {times} times: {ended.text}"])


@pytest.mark.parametrize(
    ("roles", "more", "words"),
    [
        (
            ["train", "rollout", "coordinator", "coordinator"],
            [],
            ["placement.coordinator: nodes", "all claim it"],
        ),
        (
            ["train", "reward"],
            [],
            ["placement.rollout: no node took it. Start one with --role rollout"],
        ),
        (["train", "rollout", ""], [], ["took no role"]),
        (
            ["train", "rollout"],
            ["placement={rollout: 0}"],
            ["claims it with --role", "gives it rank 0"],
        ),
        (
            ["", "", ""],
            ["placement={rollout: 1, critic: 2}"],
            ["is placed, and the run has no such role"],
        ),
    ],
    ids=[
        "two-coordinators",
        "nobody",
        "no-role",
        "against-the-configuration",
        "no-such-role",
    ],
)
def test_roles_that_do_not_fit(
    launch: Launcher,
    inputs: Path,
    tmp_path: Path,
    roles: list[str],
    more: list[str],
    words: list[str],
) -> None:
    ended = start(
        launch, inputs, tmp_path, roles, *more, "algorithm={name: grpo, group_size: 2}"
    )
    assert unlike(ended, tmp_path, 2, *words) == []


def test_a_late_node(launch: Launcher, inputs: Path, tmp_path: Path) -> None:
    ended = start(launch, inputs, tmp_path, ["train", "rollout"], WORLD_SIZE="3")
    assert (
        unlike(
            ended,
            tmp_path,
            1,
            "rank 2 of 3 did not come within 3 s (run.timeout_minutes)",
        )
        == []
    )


def test_two_jobs_at_one_rendezvous(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """Ranks 0 and 1 of three, twice, at a store as torchrun's agent has it: both jobs end, and all say the same."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ended = launch.command(
        [
            "train",
            *command_arguments(inputs, tmp_path),
            *SHORT,
            "run.timeout_minutes=2",
        ],
        logs=tmp_path / "output",
        ranks=4,
        environment=given,
        on_rank={2: {"RANK": "0"}, 3: {"RANK": "1"}},
    )
    assert ended.codes == [1] * 4 and max(ended.seconds) < 30, ended.text
    told = {
        line.partition("error: ")[2]
        for line in ended.text.splitlines()
        if "error: " in line
    }
    assert (
        len(told) == 1
        and "Two jobs use this rendezvous: end the other one" in told.pop()
    ), ended.text
    logs = sorted((tmp_path / "run" / "logs").glob("rank_*.log"))
    assert len(logs) == 2 and all(
        "Two jobs use this rendezvous" in log.read_text() for log in logs
    )


def test_another_configuration(launch: Launcher, inputs: Path, tmp_path: Path) -> None:
    ended = start(
        launch,
        inputs,
        tmp_path,
        ["train", "rollout"],
        also={1: ["algorithm.gamma=0.9"]},
    )
    assert (
        unlike(
            ended,
            tmp_path,
            2,
            "algorithm.gamma differs: 0.9 on rank 1 (",
            ", 1.0 on rank 0",
            "All nodes need the same",
        )
        == []
    )


def test_a_port_in_use(launch: Launcher, inputs: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = start(
            launch, inputs, tmp_path, ["train"], MASTER_PORT=port, WORLD_SIZE="1"
        )
    assert (
        unlike(
            ended,
            tmp_path,
            1,
            f"port {port} of this node is taken: another job or program uses it. Choose another",
        )
        == []
    )
