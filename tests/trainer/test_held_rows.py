"""Each rank has its own samples of a step: numbers as where each has all, and bytes that do not grow with ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launcher import Launcher
from tests.trainer.conftest import command_arguments

PPO = [
    "algorithm={name: ppo, num_mini_batches: 2, num_epochs: 2}",
    "critic={tp: 1, optimizer: {lr: 1.0e-3}}",
]
GRPO = [
    "algorithm={name: grpo, group_size: 4, num_mini_batches: 2, kl: {in: loss, kind: k3, coef: 0.01}}"
]
COSTS = ("time/", "_ms", "_sec", "seconds", "_mb", "busy/", "comm/")
NUMBERS = 48  # bytes that a rank hears of each sample in a step, whoever has it


def train(
    launch: Launcher,
    inputs: Path,
    runs: Path,
    ranks: int,
    *given: str,
    whole: bool = False,
) -> list[Any]:
    arguments = [
        *command_arguments(inputs, runs),
        f"run.nproc={ranks}",
        "actor.tp=1",
        "rollout.engine=hf",
        *given,
    ]
    arguments += ["trainer={steps: 2, validate_every: 0}", "checkpoint.export_hf=false"]
    return launch.world(
        ranks, "tests.trainer.ranks:train_counted", arguments=arguments, whole=whole
    )


@pytest.mark.parametrize("algorithm", [PPO, GRPO], ids=["ppo", "grpo"])
def test_the_same_numbers_as_with_all_samples_on_every_rank(
    launch: Launcher, inputs: Path, tmp_path: Path, algorithm: list[str]
) -> None:
    own = train(launch, inputs, tmp_path / "own", 2, *algorithm)
    everything = train(launch, inputs, tmp_path / "all", 2, *algorithm, whole=True)
    assert own[0]["held"] < everything[0]["held"]
    for mine, other in zip(own, everything, strict=True):
        assert mine["weights"] == pytest.approx(other["weights"], rel=1e-9)
        for step, expected in zip(mine["metrics"], other["metrics"], strict=True):
            compared = {
                name: value
                for name, value in expected.items()
                if not any(part in name for part in COSTS)
            }
            assert {name: step[name] for name in compared} == pytest.approx(
                compared, rel=1e-9, abs=1e-12
            )


def test_what_comes_to_a_rank_does_not_grow_with_their_number(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """As many samples for each of two ranks or four: as many bytes of rows, and a few numbers of each sample."""
    found = {
        n: train(
            launch,
            inputs,
            tmp_path / f"{n}",
            n,
            *GRPO,
            f"data.prompts_per_step={8 * n}",
        )
        for n in (2, 4)
    }
    # of what it works on a rank has one in n from the start
    rows = {
        n: max(each["rows"] for each in of_all) / (1 - 1 / n)
        for n, of_all in found.items()
    }
    assert rows[4] == pytest.approx(rows[2], rel=0.3) and rows[2] > 0
    # its share of what is scored, of what is trained, and the groups that it speaks
    # for, where these differ
    assert max(each["held"] for each in found[4]) < 3 * 32
    for n, of_all in found.items():
        assert of_all[0]["numbers"] / (2 * 32 * n) < NUMBERS
        assert n not in of_all[0]["groups"], (
            "a group joins every rank with every other: that of the world will do"
        )


@pytest.mark.parametrize(("count", "group_size"), [(12, 4), (4, 4), (7, 1)])
def test_samples_and_what_is_made_of_them_come_where_they_are_read(
    launch: Launcher, count: int, group_size: int
) -> None:
    found = launch.world(
        2, "tests.trainer.ranks:hold_and_give_back", count=count, group_size=group_size
    )
    assert sum(rank["groups"] for rank in found) == count
    assert min(rank["held"] for rank in found) < count
