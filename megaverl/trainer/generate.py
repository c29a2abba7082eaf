"""A step's rollout: prompts in, a batch of responses out, and what was measured of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.environments import ALONE, Request, Start, Views
from megaverl.roles.agent_rollouts import AgentRollouts
from megaverl.roles.own_functions import generate_by
from megaverl.roles.player import Player
from megaverl.roles.reward import RewardRole, Scores
from megaverl.roles.rollout import Rollout, sampling_options
from megaverl.rollout.engine import Generation, SamplingOptions
from megaverl.rollout.seeds import sample_seed, turn_seed
from megaverl.trainer.samples import episodes_batch, rollout_batch

Metrics = dict[str, float]


def generate(
    config: Config,
    rollout: Rollout,
    prompts: Sequence[PromptRecord],
    step: int,
    *,
    first_group: int = 0,
    player: Player | None = None,
) -> tuple[RolloutBatch, Metrics]:
    """`group_size` responses to every prompt, or episodes from it; every rank takes part.

    Args:
        first_group: number of the first prompt among all that the step generates for: groups are named, and
            samples drawn, by it.
        player: of a run with an environment.
    """
    start = time.perf_counter()
    draws = Draws(config.run.seed, step, config.algorithm.group_size, first_group)
    sampling = sampling_options(config.rollout.sampling)
    batch = responses(rollout, prompts, sampling, draws, player, config.rollout.function)
    return batch, rollout_metrics(batch, time.perf_counter() - start, rollout.weight_version)


@dataclass(frozen=True)
class Draws:
    """What the seeds of a step's samples are made of, `group_size` for each prompt."""

    run_seed: int
    step: int
    group_size: int
    first_group: int = 0

    def seed(self, sample: int, turn: int = 0, agent: str = "") -> int:
        """Of one turn of one sample."""
        return turn_seed(self.run_seed, self.step, self.first_group * self.group_size + sample, turn, agent)

    def environment_seed(self, sample: int) -> int:
        """The same for a whole group: its episodes begin alike."""
        return sample_seed(self.run_seed, self.step, self.first_group + sample // self.group_size, "environment")


def responses(
    rollout: Rollout,
    prompts: Sequence[PromptRecord],
    sampling: SamplingOptions,
    draws: Draws,
    player: Player | None = None,
    function: str | None = None,
) -> RolloutBatch:
    """A batch of `draws.group_size` responses, or episodes, for every prompt.

    Args:
        function: `rollout.function`, which generates instead of the engine alone.
    """
    size = draws.group_size
    repeated = [prompt for prompt in prompts for _ in range(size)]
    group_ids = [draws.first_group + i // size for i in range(len(repeated))]
    if player is not None:
        played = episodes(rollout, repeated, sampling, draws, player)
        return episodes_batch(repeated, played, player.agents, group_ids)
    token_ids = [prompt.token_ids for prompt in repeated]
    seeds = [draws.seed(sample) for sample in range(len(repeated))]
    if function is not None:
        generations = generate_by(function, rollout.generate, token_ids, sampling, seeds)
    else:
        generations = rollout.generate(token_ids, sampling, seeds, group_size=size)
    return rollout_batch(repeated, generations, group_ids)


def episodes(
    rollout: Rollout | AgentRollouts,
    prompts: Sequence[PromptRecord],
    sampling: SamplingOptions,
    draws: Draws,
    player: Player,
) -> list[Views]:
    """One episode from each prompt; all that are running write their next turns in one request to the engine."""
    starts = [
        Start(prompt.token_ids, prompt.text, prompt.reference, prompt.extra, draws.environment_seed(number))
        for number, prompt in enumerate(prompts)
    ]
    a_turn = sampling.with_max_tokens(player.limits.turn_tokens)

    def write(requests: Sequence[Request]) -> Sequence[Generation]:
        seeds = [draws.seed(r.episode, r.turn, "" if r.agent == ALONE else r.agent) for r in requests]
        groups = [r.episode // draws.group_size for r in requests]  # one group's episodes begin alike
        prompts = [r.token_ids for r in requests]
        if isinstance(rollout, AgentRollouts):
            return rollout.generate_as([r.agent for r in requests], prompts, a_turn, seeds, groups)
        return rollout.generate(prompts, a_turn, seeds, conversations=groups)

    with rollout.awake():
        return player.play(starts, write)


def rollout_metrics(batch: RolloutBatch, seconds: float, weight_version: int) -> Metrics:
    """What is worth knowing of responses that took so long to generate."""
    own = batch.response_mask.sum(dim=1).double()
    finished = [reason == "stop" for reason in batch.columns["finish_reason"]]
    return {
        "rollout/seconds": seconds,
        "rollout/throughput_tokens_per_sec": float(own.sum()) / seconds,
        "rollout/response_length_mean": float(own.mean()),
        "rollout/response_length_max": float(own.max()),
        "rollout/finished_fraction": sum(finished) / len(finished),
        **_turn_metrics(batch),
        "rollout/weight_version": float(weight_version),
    }


def _turn_metrics(batch: RolloutBatch) -> Metrics:
    """Of episodes."""
    if "turns" not in batch.columns:
        return {}
    turns = [len(spans) for spans in batch.columns["turns"]]
    told = (batch.response_lengths - batch.response_mask.sum(dim=1)).double()
    return {
        "rollout/turns_mean": sum(turns) / len(turns),
        "rollout/turns_max": float(max(turns)),
        "rollout/environment_tokens_mean": float(told.mean()),
    }


def greedy_scores(config: Config, rollout: Rollout, reward: RewardRole, rollouts: RolloutBatch, step: int) -> Scores:
    """[B]: scores of the likeliest response to each sample's prompt, generated once a group; every rank takes part."""
    groups = list(dict.fromkeys(rollouts.group_ids.tolist()))
    place = {group: number for number, group in enumerate(groups)}
    of_sample = [place[group] for group in rollouts.group_ids.tolist()]
    firsts = rollouts.select([of_sample.index(number) for number in range(len(groups))])
    prompts = [
        row[:length].tolist() for row, length in zip(firsts.input_ids, firsts.prompt_lengths.tolist(), strict=True)
    ]
    generations = rollout.generate(
        prompts,
        sampling_options(config.rollout.sampling, temperature=0.0),
        [sample_seed(config.run.seed, step, number, "greedy") for number in range(len(groups))],
    )
    columns = {name: firsts.columns[name] for name in ("prompt", "reference", "extra")}
    batch = RolloutBatch.from_generations(prompts, generations, columns=columns)
    return reward.score(batch).select(of_sample)


def score(reward: RewardRole, rollouts: RolloutBatch) -> tuple[Scores, Metrics]:
    """Rewards of all responses; every rank takes part."""
    start = time.perf_counter()
    scores = reward.score(rollouts)
    return scores, score_metrics(scores, time.perf_counter() - start)


def score_metrics(scores: Scores, seconds: float) -> Metrics:
    """What is worth knowing of rewards that took so long to compute."""
    return {
        "reward/latency_ms": seconds * 1e3,
        "reward/mean": float(scores.total.mean()),
        "reward/std": float(scores.total.std(unbiased=False)),
        "reward/max": float(scores.total.max()),
        "reward/min": float(scores.total.min()),
        "reward/accuracy": float(scores.correct.float().mean()),
        **{f"reward/{name}": float(values.mean()) for name, values in scores.components.items()},
    }
