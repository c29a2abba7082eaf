"""NCCL's messages have no names, and a sender may have to stay until its receiver is
there: the moves of a program can bear that, with operators of one's own, islands, and
engines ahead of training.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.runs import metrics
from tests.launcher import Launcher
from tests.trainer.conftest import command_arguments

RUN = [
    "rollout.engine=hf",
    "algorithm={name: ppo, num_mini_batches: 2, kl: {in: reward, kind: k1, coef: 0.01}}",
    "algorithm.bootstrap_truncated=true",
    "actor={tp: 1, optimizer: {lr: 1.0e-3}}",
    "trainer={steps: 2, validate_every: 0}",
    "checkpoint={save_interval: 0}",
    "run={name: run, log_with: jsonl, timeout_minutes: 0.4}",
]


FOUR = "placement={rollout: 0, actor: 1, critic: 2, reference: 3}"
BY_ACTOR = {"ref_log_probs", "values", "last_values"}
CASES: dict[str, tuple[int, set[str], list[str]]] = {
    "apart": (4, BY_ACTOR | {"advantages", "returns"}, [FOUR]),
    "together": (2, {"scores", "advantages"}, []),
    "ahead": (
        4,
        BY_ACTOR | {"advantages", "returns"},
        [
            FOUR,
            "rollout={async_rollout: true, max_staleness: 2}",
            "trainer.steps=4",
            "checkpoint.save_interval=3",
        ],
    ),
    "islands": (
        5,
        {"value", "joining the islands' gradients"},  # values of operators of one's own
        [
            "placement={rollout: 0, actor: 1-2, reference: 3, coordinator: 4, actor_islands: 2}",
            f"trainer.operators=['{Path(__file__).with_name('devices_program.py')}:add_operators']",
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_to_the_bit_either_way(
    launch: Launcher, inputs: Path, tmp_path: Path, case: str
) -> None:
    """Between devices go values, log-probs and what is made of them, by NCCL's rules
    between worlds: roles on ranks of their own, all on two, with critic and reference
    ahead, and beside islands with operators of one's own.
    """
    ranks, expected, given = CASES[case]
    program = str(Path(__file__).with_name("devices_program.py"))
    moved: dict[str, set[str]] = {}
    for way, first in (("hosts", []), ("devices", [program])):
        arguments = [
            *first,
            "train",
            *command_arguments(inputs, tmp_path / way),
            *RUN,
            *given,
        ]
        ended = launch.command(arguments, logs=tmp_path / f"logs {way}", ranks=ranks)
        assert ended.codes == [0] * ranks, ended.text
        logs = "".join(
            path.read_text() for path in (tmp_path / way / "run" / "logs").iterdir()
        )
        names = ", ".join(re.findall(r"between devices: (.*)", logs)).split(", ")
        moved[way] = {re.sub(r"^value \d+$", "value", name) for name in names}
    assert moved["hosts"] == {""} and moved["devices"] >= expected
    before, after = (metrics(tmp_path / way / "run") for way in ("hosts", "devices"))
    assert len(after) == 4 if case == "ahead" else 2
    assert {"critic/loss", "actor/loss", "train/kl"} <= after[
        0
    ].keys() and after == before
