"""Plug-ins that keep to their contracts, and for every promise one that breaks it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from megaverl.algorithms.advantages import Advantages
from megaverl.algorithms.loss import LossOutput
from megaverl.rollout.environments import Environment, Outcome


def reward(prompt: str, response: str, reference: str, extra: dict[str, Any]) -> float:
    return float(reference in response)


def reward_nan(
    prompt: str, response: str, reference: str, extra: dict[str, Any]
) -> float:
    return 1.0 / len(response) if response else float("nan")


def reward_random(
    prompt: str, response: str, reference: str, extra: dict[str, Any]
) -> float:
    return random.random()


def reward_batch(
    prompts: list[str], responses: list[str], references: list[str], extras: list[Any]
) -> list[float]:
    return [float(len(response) == max(map(len, responses))) for response in responses]


def loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    scale: float = 1.0,
) -> Any:
    active = weights != 0
    ratio = torch.where(active, log_probs - old_log_probs, 0.0).exp()
    return LossOutput(
        -(scale * weights * ratio * torch.where(active, advantages, 0.0)).sum(), {}
    )


def loss_mean(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, weights: Tensor
) -> Any:
    active = weights != 0
    return LossOutput(
        -(torch.where(active, log_probs * advantages, 0.0)).sum() / active.sum(), {}
    )


def loss_poisoned(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, weights: Tensor
) -> Any:
    return LossOutput(
        -(weights * (log_probs - old_log_probs).exp() * advantages).sum(), {}
    )


def loss_unmasked(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, weights: Tensor
) -> Any:
    return LossOutput(-(log_probs * 0.1).sum(), {})


def pairs(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    weights: Tensor,
    *,
    beta: float = 0.1,
) -> Any:
    margins = torch.where(
        weights != 0, beta * (chosen_log_ratios - rejected_log_ratios), 0.0
    )
    return LossOutput((weights * torch.nn.functional.softplus(-margins)).sum(), {})


def pairs_reversed(
    chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, weights: Tensor
) -> Any:
    return pairs(rejected_log_ratios, chosen_log_ratios, weights)


def pairs_poisoned(
    chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, weights: Tensor
) -> Any:
    return LossOutput(-(weights * (chosen_log_ratios - rejected_log_ratios)).sum(), {})


def advantage(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Advantages:
    means = torch.stack([rewards[group_ids == group].mean() for group in group_ids])
    return Advantages((rewards - means).unsqueeze(1) * response_mask, None)


def advantage_unmasked(rewards: Tensor, response_mask: Tensor) -> Advantages:
    return Advantages(rewards.unsqueeze(1).expand(response_mask.shape), None)


def advantage_bare(rewards: Tensor) -> Tensor:
    return rewards


def advantage_ordered(rewards: Tensor, response_mask: Tensor) -> Advantages:
    return Advantages((rewards - rewards.roll(1)).unsqueeze(1) * response_mask, None)


def keep(batch: Any, scores: Any) -> Tensor:
    return scores.total > scores.total.min()


def keep_nothing(batch: Any, scores: Any) -> Tensor:
    return torch.zeros(len(batch), dtype=torch.bool)


def keep_floats(batch: Any, scores: Any) -> Tensor:
    return scores.total


def best_of_two(generate: Any, prompts: Any, sampling: Any, seeds: Any) -> Any:
    first = generate(prompts, sampling, seeds)
    second = generate(prompts, sampling, [seed + 1 for seed in seeds])
    return [
        max(pair, key=lambda each: sum(each.log_probs))
        for pair in zip(first, second, strict=True)
    ]


def only_one(generate: Any, prompts: Any, sampling: Any, seeds: Any) -> Any:
    return generate(prompts[:1], sampling, seeds[:1])


class Echo(Environment):
    """Says back what was written, three times."""

    turns = 0

    def step(self, token_ids: Any) -> Outcome:
        self.turns += 1
        return Outcome(
            self.codec.encode("again"), float(len(token_ids)), done=self.turns == 3
        )


class Moody(Environment):
    def step(self, token_ids: Any) -> Outcome:
        return Outcome((), random.random(), done=random.random() < 0.5)


class Mute(Environment):
    def step(self, token_ids: Any) -> Outcome:
        return Outcome("text", 0.0, done=True)  # type: ignore[arg-type]


def rows() -> list[dict[str, Any]]:
    return [{"prompt": f"{n}?", "answer": str(n)} for n in range(5)]


def rows_without_answers() -> list[dict[str, Any]]:
    return [{"prompt": "?"}]


def rows_random() -> list[dict[str, Any]]:
    return [{"prompt": str(random.random()), "answer": ""} for _ in range(3)]


class Tracker:
    def __init__(self, info: Any) -> None:
        self.path = info.run_dir / "mine.txt"

    def write(self, step: int, seconds: float, metrics: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{step} {dict(metrics)}\n")

    def close(self) -> None: ...


class Picky(Tracker):
    def write(self, step: int, seconds: float, metrics: Any) -> None:
        for value in metrics.values():
            int(value)
