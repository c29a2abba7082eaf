"""Dynamic sampling: rounds of generation until enough groups tell something, or the bound is met."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.errors import TrainingStopped
from megaverl.rollout.engine import Generation
from megaverl.trainer.dynamic_sampling import SamplingRounds
from megaverl.workers.reward import Scores
from tests.faults.injector import Fault
from tests.faults.points import finish, hit
from tests.faults.runs import arguments, metrics, remains
from tests.launcher import Launcher
from tests.trainer.conftest import make_inputs

SIZE = 2


def configured(**dynamic: Any) -> Any:
    algorithm = AlgorithmConfig(
        group_size=SIZE, dynamic_sampling={"metric": "accuracy", **dynamic}
    )  # type: ignore[arg-type]
    return SimpleNamespace(
        algorithm=algorithm, data=SimpleNamespace(prompts_per_step=3)
    )


class Numbers:
    """A stream of numbers, and rounds in which a prompt tells something if its number says so."""

    def __init__(self, telling: Sequence[int]) -> None:
        self.position, self.telling = 0, telling
        self.counts: list[int] = []

    def take(self, count: int) -> list[Any]:
        self.position += count
        return list(range(self.position - count, self.position))

    def one_round(
        self, prompts: Sequence[Any], first_group: int
    ) -> tuple[RolloutBatch, Scores, dict[str, float]]:
        self.counts.append(len(prompts))
        numbers = [n for n in prompts for _ in range(SIZE)]
        generations = [
            Generation([n + 1] * (1 + n), [0.0] * (1 + n), "stop") for n in numbers
        ]
        groups = [first_group + i // SIZE for i in range(len(numbers))]
        batch = RolloutBatch.from_generations(
            [[7]] * len(numbers), generations, group_ids=groups
        )
        right = torch.tensor(
            [float(n in self.telling and i % SIZE == 0) for i, n in enumerate(numbers)]
        )
        scores = Scores(right - 0.5, {"exact": right}, right.bool())
        return (
            batch,
            scores,
            {
                "rollout/seconds": 2.0,
                "reward/latency_ms": 5.0,
                "rollout/weight_version": 4.0,
            },
        )

    def refill(self, **dynamic: Any) -> tuple[RolloutBatch, Scores, dict[str, float]]:
        rounds = SamplingRounds(configured(**dynamic), 0)
        while not rounds.is_complete:
            rounds.add(
                *self.one_round(self.take(rounds.num_prompts), rounds.num_generated)
            )
        return rounds.rollouts, rounds.scores, rounds.metrics


def kept(batch: RolloutBatch) -> list[int]:
    """The numbers of the prompts that are trained on."""
    return [int(row[0]) - 1 for row in batch.generated_ids][::SIZE]


def test_rounds_go_on_until_the_step_is_full() -> None:
    stream = Numbers(telling=(1, 3, 5))
    batch, scores, found = stream.refill()
    assert kept(batch) == [1, 3, 5] and stream.counts == [3, 2, 1]
    assert stream.position == 6, "what a resumed run must go on from"
    assert scores.correct.tolist() == [True, False] * 3
    assert batch.group_ids.tolist() == [1, 1, 3, 3, 5, 5]
    assert batch.generated_ids.shape[1] == 6, "no wider than its longest response"
    assert (
        found["rollout/rounds"],
        found["rollout/kept_share"],
        found["rollout/generated_groups"],
    ) == (3, 0.5, 6)
    assert found["reward/accuracy"] == pytest.approx(0.25), "of all that was generated"
    assert found["rollout/seconds"] == 6.0 and found[
        "reward/latency_ms"
    ] == pytest.approx(15.0)


def test_what_is_left_over_of_a_round_is_dropped() -> None:
    stream = Numbers(telling=range(100))
    batch, _, found = stream.refill(prompts_per_round=5)
    assert kept(batch) == [0, 1, 2] and found["rollout/rounds"] == 1


def test_the_bound_is_met() -> None:
    batch, scores, found = Numbers(telling=(4,)).refill(max_rounds=2)
    assert kept(batch) == [0, 1, 4] and found["rollout/kept_share"] == pytest.approx(
        1 / 6
    )
    assert len(scores.total) == 6
    with pytest.raises(
        TrainingStopped,
        match="step 1: only 1 of 6 groups, generated in 2 rounds, differ in accuracy",
    ):
        Numbers(telling=(4,)).refill(max_rounds=2, if_short="stop")


def test_any_metric() -> None:
    for metric in ("reward", "exact"):
        assert kept(Numbers(telling=(1, 3, 5)).refill(metric=metric)[0]) == [1, 3, 5]


GRPO = [
    "algorithm={name: dapo, group_size: 2, kl: {in: none, coef: 0, target: null}}",
    "algorithm.dynamic_sampling={metric: accuracy, max_rounds: 3}",
    "trainer={steps: 3, validate_every: 0}",
    "data.validation=[]",
    "data.prompts_per_step=4",
    "checkpoint={save_interval: 1, export_hf: true}",
]


def test_a_run_that_is_killed_and_told_to_leave_takes_the_same_prompts(
    launch: Launcher, tmp_path: Path
) -> None:
    """Refills move the place in the data, which a checkpoint keeps; also one that was made inside a step."""
    inputs = make_inputs(tmp_path / "inputs")
    (inputs / "reward.py").write_text(
        "def letters(prompt, response, reference, extra):\n    return len(response) % 2\n"
    )
    ended = launch.command(
        arguments(inputs, tmp_path / "whole", *GRPO), logs=tmp_path / "logs"
    )
    assert ended.codes == [0, 0], ended.output
    expected = remains(tmp_path / "whole" / "run")
    rounds = [
        record["rollout/rounds"] for record in metrics(tmp_path / "whole" / "run")
    ]
    assert max(rounds) > 1 and expected["trainer"]["sampler"]["position"] > 3 * 4
    for fault in (Fault("kill", 1, "actor_update", 2), Fault("term", 0, "rollout", 3)):
        found = hit(launch, inputs, tmp_path / "hit", fault, *GRPO)
        assert found.happened and found.wrong == [], found
    assert "inside step 3" in found.ended.text
    ended, wrong = finish(launch, inputs, tmp_path / "hit", expected, *GRPO)
    assert wrong == [], ended
    on_split_ranks(launch, inputs, tmp_path)


def on_split_ranks(launch: Launcher, inputs: Path, tmp_path: Path) -> None:
    """Engines, rewards and actor apart: the rounds are those of shared ranks; and so is a replay of what they gave."""
    apart = ["run.nproc=4", "placement={rollout: 0, reward: 1, actor: 2-3}"]
    numbers = metrics(tmp_path / "whole" / "run")
    stored = tmp_path / "split" / "run" / "rollouts"
    replay = [
        *GRPO,
        *apart,
        "algorithm.dynamic_sampling.metric=null",
        "algorithm.dynamic_sampling.max_rounds=4",
    ]
    for name, more in (
        ("split", [*GRPO, *apart, "trainer.store_rollouts=true"]),
        ("replay", [*replay, "--replay-rollouts", str(stored)]),
    ):
        ended = launch.command(
            arguments(inputs, tmp_path / name, *more), logs=tmp_path / "logs", ranks=4
        )
        assert ended.codes == [0] * 4, ended.output
        for before, after in zip(
            numbers, metrics(tmp_path / name / "run"), strict=True
        ):
            others = ("reshard/", "train/epoch")  # a replay takes no prompts for rounds
            same = {
                key: value
                for key, value in before.items()
                if not key.startswith(others)
            }
            assert {key: after.get(key) for key in same} == pytest.approx(
                same, abs=1e-5, rel=1e-5
            ), name
