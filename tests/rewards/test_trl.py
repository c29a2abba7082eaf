"""What TRL gives to reward functions besides values of samples, and the shape in which it gives conversations."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaverl.data.batch import RolloutBatch
from megaverl.errors import RewardError
from megaverl.outside import read_json
from megaverl.rewards import Component, Reward, RewardFunction, RewardSample
from megaverl.rewards.trl import TrainerState
from megaverl.rollout.engine import Generation
from megaverl.trainer.stored_rollouts import StoredRollouts
from megaverl.workers.reward import Scores
from tests.launcher import Launcher
from tests.trainer.conftest import command_arguments, make_inputs

MESSAGES = [{"role": "user", "content": "2+2?"}]
CHAT = RewardSample("<user>2+2?", "4", "4", messages=MESSAGES, is_conversation=True)
TEXT = RewardSample("2+2?", "5", "4", messages=MESSAGES)


def reward_of(function: Any, *, batched: bool = True, **more: Any) -> Reward:
    return Reward([Component("own", RewardFunction("own", function, batched), **more)])


def test_conversations_are_lists_of_messages_for_trls_names_alone() -> None:
    seen: list[Any] = []

    def trl(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        seen.append((prompts, completions))
        return [0.0] * len(prompts)

    def own(prompts: list[Any], responses: list[str], **kwargs: Any) -> list[float]:
        seen.append((prompts, responses))
        return [0.0] * len(prompts)

    def rest(**kwargs: Any) -> list[float]:
        seen.append((kwargs["prompts"], kwargs["completions"]))
        return [0.0] * len(kwargs["prompts"])

    for function in (trl, own, rest):
        reward_of(function).score([CHAT, TEXT])
    conversation = [{"role": "assistant", "content": "4"}]
    assert seen[0] == seen[2] == ([MESSAGES, "2+2?"], [conversation, "5"])
    assert seen[1] == ([MESSAGES, "2+2?"], ["4", "5"])
    texts: list[str] = []
    reward_of(
        lambda completion: float(texts.append(completion) or 0), batched=False
    ).score([CHAT])
    assert texts == ["4"]


def test_the_state_of_training() -> None:
    seen: list[TrainerState] = []

    def score(
        completions: list[Any], trainer_state: TrainerState, **kwargs: Any
    ) -> list[float]:
        seen.append(trainer_state)
        return [float(trainer_state.global_step)] * len(completions)

    reward = reward_of(score)
    assert reward.score([TEXT]).total == [0.0]
    reward.begin(TrainerState(7, 20, 1.5))
    assert reward.score([TEXT, CHAT]).total == [7.0, 7.0]
    assert (seen[-1].max_steps, seen[-1].epoch) == (20, 1.5)


def logs(
    completions: Sequence[Any], log_extra: Any, log_metric: Any, **kwargs: Any
) -> list[float]:
    log_extra("length", np.arange(len(completions)))
    log_extra("verdict", [f"\ud800 {number}" for number, _ in enumerate(completions)])
    log_extra("other", [{1, 2} for _ in completions])
    log_extra("large", [10**400 for _ in completions])
    log_metric("count", len(completions))
    return [1.0] * len(completions)


def test_logged_columns_are_values_of_samples() -> None:
    reward = reward_of(logs)
    reward.score([TEXT, CHAT])
    assert reward.take_logged() == {"count": [2.0]}
    first, second = reward.take_columns(2)
    assert (first["length"], second["length"]) == (0, 1) and json.dumps(
        second["verdict"]
    ).endswith(' 1"')
    assert first["other"] == "set {1, 2}" and reward.take_columns(2) == [{}, {}]
    assert read_json(json.dumps(first))["large"].startswith("int 1000")


def test_logged_columns_of_samples_behind_a_gate() -> None:
    """A function that is asked of some samples alone logs values of those."""
    gate = Component(
        "gate", RewardFunction("gate", lambda response: float(response == "4"))
    )
    own = Component("own", RewardFunction("own", logs, True), only_if="gate")
    reward = Reward([gate, own])
    reward.score([TEXT, CHAT, TEXT, CHAT])
    found = reward.take_columns(4)
    assert [each.get("length") for each in found] == [None, 0, None, 1]


def test_a_wrong_number_of_values_is_refused() -> None:
    def score(completions: list[Any], log_extra: Any, **kwargs: Any) -> list[float]:
        log_extra("length", [1])
        return [0.0] * len(completions)

    with pytest.raises(
        RewardError, match=r"log_extra\('length', ...\) got 1 values for 2 samples"
    ):
        reward_of(score).score([TEXT, CHAT])


@pytest.mark.parametrize("inside_a_loop", [False, True])
def test_a_function_declared_with_async_def(inside_a_loop: bool) -> None:
    """Its responses may wait side by side; the caller may have a loop of its own."""
    waiting: list[str] = []

    async def ask(completion: str) -> float:
        waiting.append(completion)
        while len(waiting) < 2:
            await asyncio.sleep(0)
        return float(len(completion))

    async def both(completions: list[str], **kwargs: Any) -> list[float]:
        return await asyncio.gather(*map(ask, completions))

    async def one(response: str) -> float:
        return float(len(response))

    async def leaves(completions: list[str], **kwargs: Any) -> list[float]:
        raise SystemExit(0)

    def check() -> None:
        assert reward_of(both).score([TEXT, TEXT]).total == [1.0, 1.0]
        assert reward_of(one, batched=False).score([TEXT, TEXT]).total == [1.0, 1.0]
        with pytest.raises(RewardError, match="reward 'own' raised SystemExit: 0"):
            reward_of(leaves).score([TEXT, TEXT])

    async def in_a_loop() -> None:
        check()

    asyncio.run(in_a_loop()) if inside_a_loop else check()


def test_logged_values_stay_with_their_samples(tmp_path: Path) -> None:
    """In batches that are joined, and in those that wait for training in a checkpoint."""
    first = Scores(torch.zeros(2), {}, torch.zeros(2).bool(), {1: {"about": "b"}})
    second = Scores(
        torch.ones(2),
        {},
        torch.ones(2).bool(),
        {0: {"about": "c"}, 1: {"about": math.nan}},
    )
    joined = Scores.concat([first, second])
    chosen = joined.select([3, 2, 0])
    assert chosen.logged.keys() == {0, 1} and chosen.logged[1] == {"about": "c"}
    batch = RolloutBatch.from_generations(
        [[5]] * 3, [Generation([7], [0.0], "stop")] * 3, group_ids=[0] * 3
    )
    stored = StoredRollouts(0, 0, batch, chosen)
    stored.write(tmp_path / "stored.safetensors")
    read = StoredRollouts.read(tmp_path / "stored.safetensors", stored.facts()).scores
    assert read is not None and read.logged[1] == {"about": "c"}
    assert read.logged.keys() == {0, 1} and math.isnan(read.logged[0]["about"])


RUN = """
def score(prompts, completions, trainer_state, log_extra, log_metric, **kwargs):
    for prompt, completion in zip(prompts, completions):
        assert prompt[-1]["role"] == "user" and [each["role"] for each in completion] == ["assistant"], completion
    assert trainer_state.epoch is None or 0 <= trainer_state.epoch <= 1
    assert trainer_state.max_steps == 2
    log_extra("knows_epoch", [trainer_state.epoch is not None for _ in prompts])
    log_metric("at_step", trainer_state.global_step)
    log_extra("about", [f"{prompt[-1]['content']} at {trainer_state.global_step}" for prompt in prompts])
    return [len(completion[0]["content"]) / 10 for completion in completions]
"""


SHARED = ["actor={engine: fsdp, tp: 1}"]
APART = [*SHARED, "run.nproc=3", "placement={rollout: 0, reward: 1, actor: 2}"]
# Samples are chosen from several rounds, after they are scored.
ROUNDS = [
    "algorithm.dynamic_sampling={metric: reward, max_rounds: 2, prompts_per_round: 2, if_short: fill}"
]


@pytest.mark.parametrize(
    "more", [SHARED, APART, [*APART, *ROUNDS]], ids=["shared", "apart", "rounds"]
)
def test_a_run_with_a_function_of_trl(
    launch: Launcher, tmp_path: Path, more: list[str]
) -> None:
    """Its columns stand in the samples, of training and of validation; its metric in the metrics."""
    inputs = make_inputs(tmp_path / "inputs")
    rows = [
        json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()
    ]
    for row in rows:
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    (inputs / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (inputs / "model" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    (tmp_path / "trl.py").write_text(RUN)
    ended = launch.command(
        [
            "train",
            *command_arguments(inputs, tmp_path / "runs"),
            f"data.train={inputs / 'chats.jsonl'}",
            f"data.validation={inputs / 'chats.jsonl'}",
            f"reward={json.dumps({'function': str(tmp_path / 'trl.py') + ':score', 'batched': True})}",
            "rollout.engine=hf",
            "algorithm={name: grpo, group_size: 2}",
            "data.prompts_per_step=2",
            "trainer={steps: 2, validate_every: 1, validation_prompts: 2, save_samples: 3}",
            *more,
        ],
        logs=tmp_path / "logs",
        ranks=3 if "run.nproc=3" in more else 2,
    )
    assert set(ended.codes) == {0}, ended.text
    run = tmp_path / "runs" / "run"
    measured = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    at_step = {
        each["step"]: each["reward/at_step"]
        for each in measured
        if "reward/at_step" in each
    }
    assert at_step == {1: 0.0, 2: 1.0}
    records = [
        json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()
    ]
    trained = [record for record in records if record["split"] == "train"]
    assert len(trained) == 6 and all(
        record["about"].endswith(f" at {record['step'] - 1}") for record in trained
    )
    assert all(
        record["about"].split(" at ")[0] in record["prompt"] for record in records
    )
    assert all(record["knows_epoch"] for record in trained) == (more is SHARED)
    assert {record["split"] for record in records} >= {"train", "validation"}
