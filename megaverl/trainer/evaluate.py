"""Validation: mean reward, accuracy and pass@k on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megaverl.algorithms import mean_pass_at_k
from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.rollout.sampling_rules import sampling_options
from megaverl.trainer.generate import Draws, responses
from megaverl.trainer.samples import sample_records
from megaverl.workers.player import Player
from megaverl.workers.reward import RewardRole, Scores
from megaverl.workers.rollout import Rollout

# Steps of validation draws lie apart from those of training, so that no seed is used twice.
VALIDATION_STEP = 1 << 40


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name, and the first samples as records."""

    metrics: dict[str, float]
    samples: list[dict[str, Any]]


def evaluate(
    config: Config,
    rollout: Rollout,
    reward: RewardRole,
    prompts: Sequence[PromptRecord],
    player: Player | None = None,
    *,
    prefix: str = "validation",
) -> Evaluation:
    """Generate `trainer.validation_samples` responses to (or episodes from) every prompt and score them.

    Every rank takes part.

    The draws are the same at every call, so that two validations differ by the weights alone.
    """
    sampling = sampling_options(config.rollout.sampling, **config.trainer.validation_sampling)
    draws = Draws(config.run.seed, VALIDATION_STEP, config.trainer.validation_samples)
    batch = responses(rollout, prompts, sampling, draws, player, config.rollout.function)
    scores = reward.score(batch)
    metrics = validation_metrics(batch, scores, config.trainer.pass_at)
    return Evaluation(
        {f"{prefix}/{name}": value for name, value in metrics.items()},
        sample_records(batch, scores, reward, config.trainer.save_samples),
    )


def validation_metrics(batch: RolloutBatch, scores: Scores, ks: Sequence[int]) -> dict[str, float]:
    """`reward`, `accuracy`, `pass@k` and the mean response length of a scored batch."""
    return {
        "reward": float(scores.total.mean()),
        "accuracy": float(scores.correct.float().mean()),
        **{f"pass@{k}": mean_pass_at_k(scores.correct, batch.group_ids, k) for k in ks},
        "response_length": float(batch.response_mask.sum(dim=1).float().mean()),
    }
