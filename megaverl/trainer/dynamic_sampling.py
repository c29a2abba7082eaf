"""Dynamic sampling: rounds of generation until enough groups have differing rewards.

Source: DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megaverl.algorithms import keep_groups
from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.errors import TrainingStopped
from megaverl.workers.responses import Metrics, once, rollout_metrics, score_metrics
from megaverl.workers.reward import Scores


class SampledRound(NamedTuple):
    """Responses of one round with their rewards and metrics."""

    rollouts: RolloutBatch
    scores: Scores
    metrics: Metrics


class SamplingRounds:
    """Rounds of one step, repeated until `prompts_per_step` groups differ in `dynamic_sampling.metric`.

    Every rank adds the same rounds and makes the same decision.

    Attributes:
        num_prompts: number of prompts of the next round, or 0 if there are enough groups.
        num_generated: number of groups of all rounds so far. Numbering of the next round's groups continues there.
        metrics: metrics of all generated samples, including those of dropped groups. Metrics of the kept groups alone
            would misrepresent what the policy can do.
        rollouts, scores: samples of the groups that are kept. They are set when `num_prompts` is 0.

    Example:
        rounds = SamplingRounds(config, step)
        while not rounds.is_complete:
            rounds.add(*generate_and_score(prompts.take(rounds.num_prompts), rounds.num_generated))
        train_on(rounds.rollouts, rounds.scores)
    """

    rollouts: RolloutBatch
    scores: Scores

    def __init__(self, config: Config, step: int) -> None:
        self._settings = config.algorithm.dynamic_sampling
        assert self._settings.metric is not None, "without a metric every group is kept"
        self._metric = self._settings.metric
        self._wanted = config.data.prompts_per_step
        self._step = step
        self._rounds: list[SampledRound] = []
        self.metrics = Metrics()
        self.num_generated = 0
        self.num_prompts = self._settings.prompts_per_round or self._wanted

    @property
    def is_complete(self) -> bool:
        """Return whether there are enough groups."""
        return self.num_prompts == 0

    def add(self, rollouts: RolloutBatch, scores: Scores, metrics: Metrics) -> None:
        """Add a round. Decide which groups are kept and how many prompts the next round has.

        Raises:
            TrainingStopped: there are too few groups after `max_rounds`, and `if_short` is stop.
        """
        self._rounds.append(SampledRound(rollouts, scores, metrics))
        self.num_generated += self.num_prompts
        batch = RolloutBatch.concat([round.rollouts for round in self._rounds])
        all_scores = Scores.concat([round.scores for round in self._rounds])
        is_last = len(self._rounds) == self._settings.max_rounds
        kept = keep_groups(
            all_scores.metric(self._metric),
            batch.group_ids,
            prompts_of(batch),
            wanted=self._wanted,
            last_round=is_last and self._settings.if_short == "fill",
        )
        if kept.missing and is_last:
            raise TrainingStopped(
                f"step {self._step + 1}: only {self._wanted - kept.missing} of {self.num_generated} groups, generated "
                f"in {len(self._rounds)} rounds, differ in {self._metric}; {self._wanted} are wanted "
                "(data.prompts_per_step). Raise algorithm.dynamic_sampling.max_rounds or algorithm.group_size, choose "
                "prompts that are neither too easy nor too hard, or set algorithm.dynamic_sampling.if_short=fill."
            )
        if kept.missing:
            self.num_prompts = self._settings.prompts_per_round or kept.missing
            return
        self.num_prompts = 0
        # Every rank keeps the same groups, so the rows need no communication.
        rows = kept.rows.tolist()
        self.rollouts, self.scores = batch.select(rows).trim(), all_scores.select(rows)
        self.metrics = _measure(batch, all_scores, self._rounds, num_silent=kept.silent)


def prompts_of(batch: RolloutBatch) -> torch.Tensor | None:
    """Return the number of each sample's prompt, [B].

    None if each group has its own prompt. Several agents of a game have one group each
    for every prompt.
    """
    if "agent_ids" not in batch:
        return None
    # `episodes_batch` numbers groups this way.
    return batch.group_ids // len(set(batch.columns["agent"]))


def _measure(
    batch: RolloutBatch,
    scores: Scores,
    rounds: Sequence[SampledRound],
    *,
    num_silent: int,
) -> Metrics:
    """Return the metrics of all rounds that this rank has measured.

    With roles on separate ranks, a rank that only scores has not measured generation,
    and a rank that only generates has not measured the duration of scoring.
    """
    prompts, last, metrics = prompts_of(batch), rounds[-1].metrics, Metrics()
    groups = len(torch.unique(batch.group_ids if prompts is None else prompts))
    if "rollout/seconds" in last:
        seconds = sum(round.metrics["rollout/seconds"] for round in rounds)
        metrics |= rollout_metrics(batch, seconds, int(last["rollout/weight_version"]))
        metrics |= {
            "rollout/rounds": float(len(rounds)),
            "rollout/generated_groups": float(groups),
        }
        metrics["rollout/kept_share"] = (groups - num_silent) / groups
    seconds = sum(round.metrics.get("reward/latency_ms", 0.0) for round in rounds) / 1e3
    # The metrics cover all samples, like those that the engines' ranks keep with
    # samples that wait for training.
    scored = score_metrics(once(batch, scores), seconds)
    return metrics | {
        name: value
        for name, value in scored.items()
        if name != "reward/latency_ms" or name in last
    }
