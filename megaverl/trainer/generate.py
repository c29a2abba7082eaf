"""A step's rollout: prompts in, a batch of responses out, and what was measured of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.roles.reward import RewardRole, Scores
from megaverl.roles.rollout import Rollout, sampling_options
from megaverl.rollout.seeds import sample_seed
from megaverl.trainer.samples import rollout_batch

Metrics = dict[str, float]


def generate(
    config: Config, rollout: Rollout, prompts: Sequence[PromptRecord], step: int
) -> tuple[RolloutBatch, Metrics]:
    """`group_size` responses to every prompt; every rank takes part."""
    start = time.perf_counter()
    size = config.algorithm.group_size
    repeated = [prompt for prompt in prompts for _ in range(size)]
    generations = rollout.generate(
        [prompt.token_ids for prompt in repeated],
        sampling_options(config.rollout.sampling),
        [sample_seed(config.run.seed, step, sample) for sample in range(len(repeated))],
        group_size=size,
    )
    batch = rollout_batch(repeated, generations, [i // size for i in range(len(repeated))])
    seconds = time.perf_counter() - start
    lengths = batch.response_lengths.double()
    finished = [reason == "stop" for reason in batch.columns["finish_reason"]]
    return batch, {
        "rollout/throughput_tokens_per_sec": float(lengths.sum()) / seconds,
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/finished_fraction": sum(finished) / len(finished),
        "rollout/weight_version": float(rollout.weight_version),
    }


def greedy_scores(
    config: Config, rollout: Rollout, reward: RewardRole, prompts: Sequence[PromptRecord], step: int
) -> Scores:
    """Rewards of the likeliest response to every prompt; every rank takes part."""
    generations = rollout.generate(
        [prompt.token_ids for prompt in prompts],
        sampling_options(config.rollout.sampling, temperature=0.0),
        [sample_seed(config.run.seed, step, number, "greedy") for number in range(len(prompts))],
    )
    return reward.score(rollout_batch(prompts, generations, range(len(prompts))))


def score(reward: RewardRole, rollouts: RolloutBatch) -> tuple[Scores, Metrics]:
    """Rewards of all responses; every rank takes part."""
    start = time.perf_counter()
    scores = reward.score(rollouts)
    return scores, {
        "reward/latency_ms": (time.perf_counter() - start) * 1e3,
        "reward/mean": float(scores.total.mean()),
        "reward/std": float(scores.total.std(unbiased=False)),
        "reward/max": float(scores.total.max()),
        "reward/min": float(scores.total.min()),
        "reward/accuracy": float(scores.correct.float().mean()),
        **{f"reward/{name}": float(values.mean()) for name, values in scores.components.items()},
    }
