"""A program as a user writes it, run by test_own_loop.py: `python own_loop.py FOLDER [how rank 1 ends]`."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megaverl import DataFlow, Operator, RolloutBatch, TrainerConfig
from megaverl.errors import ConfigError
from megaverl.trainer import PPOTrainer, RLTrainer, init_distributed
from megaverl.utils.config import get_ppo_config


def letters(sampled_response: str, reference_answer: str) -> float:
    return sum(ord(letter) % 7 for letter in sampled_response) / 40


def once(generate: Any, prompts: Any, sampling: Any, seeds: Any) -> Any:
    return generate(prompts, sampling, seeds)


def all_but_the_first(batch: RolloutBatch, scores: Any) -> list[bool]:
    return [False] + [True] * (len(batch) - 1)


def add_operators(flow: DataFlow) -> None:
    """Into the built-in step: one that changes what flows from there on, and one that looks at it."""
    flow.add_operator(
        Operator(
            "double",
            lambda scores: replace(scores, total=2 * scores.total),
            outputs=("scores",),
        )
    )
    flow.add_operator(Operator("look", look, outputs=()), after="double")


def look(scores: Any, step: int) -> None:
    print(f"step {step}: {float(scores.total.mean()):.4f}")


def lengths(rollout: RolloutBatch) -> torch.Tensor:
    return rollout.response_lengths.float()


def own_flow(trainer: PPOTrainer) -> DataFlow:
    """A whole step as operators of one's own, and one put in between."""

    def update_policy(rollout: RolloutBatch, rewards: torch.Tensor) -> dict[str, float]:
        return trainer.update(rollout.with_(rewards=rewards))

    def generate_responses() -> RolloutBatch:
        return trainer.rollout()

    flow = DataFlow()
    flow.add_operator(Operator(name="rollout", func=generate_responses))
    flow.add_operator(Operator(name="rewards", func=lengths))
    flow.add_operator(Operator(name="update", func=update_policy))
    flow.add_operator(
        Operator("fewer", lambda rollout: rollout[:2], outputs=("rollout",)),
        before="rewards",
    )
    return flow.compile()


def settings(folder: Path) -> TrainerConfig:
    return get_ppo_config(
        actor_model=str(folder / "model"),
        train_data=str(folder / "train.jsonl"),
        reward_function=letters,
        total_steps=2,
        prompts_per_step=4,
        max_prompt_tokens=16,
        max_response_tokens=6,
        learning_rate=1e-3,
        use_vllm=False,
        output_dir=str(folder / "runs"),
        options={
            "checkpoint.export_hf": False,
            "trainer.operators": [f"{__file__}:add_operators"],
            "rollout.function": f"{__file__}:once",
            "algorithm.rollout_filter": f"{__file__}:all_but_the_first",
        },
    )


def two_ranks(folder: Path, end: str) -> None:
    """Two steps on two ranks, between which the second one ends."""
    config = settings(folder)
    config.tensor_parallel_size, config.run_name = 2, end
    config.options = {**config.options, "run.timeout_minutes": 0.05}
    trainer = PPOTrainer(config)
    trainer.update(trainer.rollout())
    if os.environ["RANK"] == "1":
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "failed":
            raise ValueError("a mistake of the user's")
        sys.exit(0)
    trainer.update(trainer.rollout())


def placed_flow(folder: Path, end: str) -> None:
    """Operators on ranks of their own, and nothing said of how batches come from one to the other; twice."""

    def generate(prompts: list[int]) -> RolloutBatch:
        ids = torch.tensor([[number] for number in prompts])
        return RolloutBatch(
            input_ids=ids, generated_ids=ids + 1, logprobs=torch.zeros(ids.shape)
        )

    flow = DataFlow()
    flow.add_operator(Operator("rollout", generate, role="rollout"))
    flow.add_operator(
        Operator(
            "rewards",
            lambda rollout: rollout.generated_ids.sum(1).float(),
            role="reward",
        )
    )
    flow.add_operator(
        Operator(
            "update",
            lambda rollout, rewards: float((rollout.input_ids[:, 0] * rewards).sum()),
            role="actor",
        )
    )  # noqa: E501
    flow.compile(
        given=["prompts"], places={"rollout": [0], "reward": [1], "actor": [0]}
    )
    done = [flow.run(prompts=[number, 2]) for number in (1, 3)]
    print(
        json.dumps(
            [
                [one.get("update"), [span.operator for span in one.timeline]]
                for one in done
            ]
        )
    )


def placed(folder: Path, end: str) -> None:
    """Two steps with the engine on a rank of its own, the second one on rewards of one's own."""
    config = settings(folder)
    config.run_name = end
    (
        config.actor_device_mapping,
        config.rollout_device_mapping,
        config.reward_device_mapping,
    ) = [0], [1], [1]
    config.options = {
        name: value
        for name, value in config.options.items()
        if name != "trainer.operators"
    }
    trainer = PPOTrainer(config)
    first = trainer.update(trainer.rollout())
    rollouts = trainer.rollout()
    second = trainer.update(
        rollouts[1:].with_(rewards=rollouts.response_lengths[1:].float())
    )
    trainer.close()
    print(json.dumps([len(rollouts), first, second]))


def ahead_of_training(folder: Path, run_name: str) -> None:
    """Four steps whose responses are generated during the update before, by `train` or by a loop, which may leave."""
    config = settings(folder)
    config.run_name, config.total_steps = run_name, 4
    config.actor_device_mapping, config.rollout_device_mapping = [0], [1]
    config.reward_device_mapping = [1]
    config.async_rollout = True
    leave_out = ("trainer.operators", "algorithm.rollout_filter")
    kept = {
        name: value for name, value in config.options.items() if name not in leave_out
    }
    config.options = {**kept, "rollout.max_staleness": 1, "trainer.validate_every": 0}
    if run_name == "ahead_whole":
        RLTrainer(config).train()
        return
    config.options["rollout.max_staleness"] = 2
    try:
        PPOTrainer(config)._make_loop()
    except ConfigError as error:
        assert str(error).startswith("rollout.max_staleness: found 2."), error
    config.options["rollout.max_staleness"] = 1
    leaves = (
        run_name == "ahead_left"
        and not (folder / "runs" / run_name / "checkpoints").is_dir()
    )
    trainer = PPOTrainer(config)
    while trainer.num_steps < 4:
        rollouts = trainer.rollout()
        if leaves and trainer.num_steps == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        trainer.update(rollouts)
    trainer.close()


def told_to_leave(folder: Path, where: str) -> None:
    """A loop as in the documents, which hears SIGTERM in its second step: `in_rollout`, or `between` the calls."""
    logging.basicConfig(level=logging.INFO)
    config = settings(folder)
    config.run_name, config.total_steps = where, 3
    trainer = PPOTrainer(config)
    signals = not (folder / "runs" / where / "checkpoints").is_dir()
    while trainer.num_steps < 3:
        if signals and trainer.num_steps and where == "in_rollout":
            os.kill(os.getpid(), signal.SIGTERM)
        rollouts = trainer.rollout()
        if signals and trainer.num_steps and where == "between":
            os.kill(os.getpid(), signal.SIGTERM)
        trainer.update(rollouts[1:])
    trainer.close()


PROGRAMS = {
    "ahead_whole": ahead_of_training,
    "ahead": ahead_of_training,
    "ahead_left": ahead_of_training,
    "flow": placed_flow,
    "placed": placed,
    "in_rollout": told_to_leave,
    "between": told_to_leave,
}


def main(folder: Path) -> None:
    config = settings(folder)
    init_distributed(config)
    trainer = PPOTrainer(config)
    seen = []
    for _ in range(2):
        rollouts = trainer.rollout()
        assert isinstance(rollouts, RolloutBatch)
        metrics = trainer.update(rollouts)
        seen.append(
            {
                "reward": metrics["reward/mean"],
                "version": metrics["rollout/weight_version"],
            }
        )
    done = own_flow(trainer).run()
    own = done["update"] | {
        "lengths": done["rewards"].tolist(),
        "timeline": [span.operator for span in done.timeline],
    }
    assert trainer.num_steps == 3
    trainer.close()
    whole = RLTrainer(config, run_name="whole").train()
    elsewhere = RLTrainer(
        config, options={**config.options, "placement.actor_devices": [0]}
    )
    try:
        init_distributed(elsewhere.config)
    except ConfigError as error:
        refused = str(error)
    print(json.dumps({"steps": seen, "own": own, "whole": whole, "refused": refused}))


if __name__ == "__main__":
    arguments: list[Any] = [Path(sys.argv[1]), *sys.argv[2:]]
    PROGRAMS.get(arguments[1], two_ranks)(*arguments) if arguments[1:] else main(
        *arguments
    )
