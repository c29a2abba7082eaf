"""A program as a user writes it, run by test_own_loop.py: `python own_loop.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megaverl import RolloutBatch, TrainerConfig
from megaverl.trainer import PPOTrainer, RLTrainer, init_distributed
from megaverl.utils.config import get_ppo_config


def letters(prompt: str, response: str, reference: str, extra: dict[str, object]) -> float:
    return sum(ord(letter) % 7 for letter in response) / 40


def once(generate: Any, prompts: Any, sampling: Any, seeds: Any) -> Any:
    return generate(prompts, sampling, seeds)


def all_but_the_first(batch: RolloutBatch, scores: Any) -> list[bool]:
    return [False] + [True] * (len(batch) - 1)


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
            "rollout.function": f"{__file__}:once",
            "algorithm.rollout_filter": f"{__file__}:all_but_the_first",
        },
    )


def main(folder: Path) -> None:
    config = settings(folder)
    init_distributed(config)
    trainer = PPOTrainer(config)
    seen = []
    for _ in range(2):
        rollouts = trainer.rollout()
        assert isinstance(rollouts, RolloutBatch)
        metrics = trainer.update(rollouts)
        seen.append({"reward": metrics["reward/mean"], "version": metrics["rollout/weight_version"]})
    whole = RLTrainer(config, run_name="whole").train()
    print(json.dumps({"steps": seen, "whole": whole}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
