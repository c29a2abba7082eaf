"""Dynamic sampling: rounds of generation until enough groups tell something (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megaverl.algorithms import keep_groups
from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.data.streaming import Prompts
from megaverl.errors import TrainingStopped
from megaverl.workers.responses import Metrics, rollout_metrics, score_metrics
from megaverl.workers.reward import Scores

# (prompts, number of the first of them in the step) -> responses and scores, of all of them, on every rank
Round = Callable[[Sequence[PromptRecord], int], tuple[RolloutBatch, Scores, Metrics]]


def refill(config: Config, stream: Prompts, one_round: Round, step: int) -> tuple[RolloutBatch, Scores, Metrics]:
    """Generate for further prompts until `prompts_per_step` groups differ in `dynamic_sampling.metric`.

    Every rank takes part, and comes to the same decision. The metrics are of all that was generated, not of what is
    kept: what a policy can do shows in all of its responses.

    Raises:
        TrainingStopped: too few groups after `max_rounds`, and `if_short` is stop.
    """
    dynamic, wanted = config.algorithm.dynamic_sampling, config.data.prompts_per_step
    assert dynamic.metric is not None, "without a metric every group is kept"
    parts: list[tuple[RolloutBatch, Scores, Metrics]] = []
    generated, count, number = 0, dynamic.prompts_per_round or wanted, 0
    while True:
        number += 1
        parts.append(one_round(stream.take(count), generated))
        generated += count
        batch = RolloutBatch.concat([part[0] for part in parts])
        scores = Scores.concat([part[1] for part in parts])
        last = number == dynamic.max_rounds
        kept = keep_groups(
            scores.metric(dynamic.metric),
            batch.group_ids,
            prompts_of(batch),
            wanted=wanted,
            last_round=last and dynamic.if_short == "fill",
        )
        if not kept.missing:
            break
        if last:
            raise TrainingStopped(
                f"step {step + 1}: only {wanted - kept.missing} of {generated} groups, generated in {number} rounds, "
                f"differ in {dynamic.metric}; {wanted} are wanted (data.prompts_per_step). Raise "
                "algorithm.dynamic_sampling.max_rounds or algorithm.group_size, choose prompts that are neither too "
                "easy nor too hard, or set algorithm.dynamic_sampling.if_short=fill."
            )
        count = dynamic.prompts_per_round or kept.missing
    chosen, rows = batch.select(kept.rows).trim(), kept.rows.tolist()
    return chosen, scores.select(rows), _metrics(batch, scores, parts, rounds=number, silent=kept.silent)


def prompts_of(batch: RolloutBatch) -> torch.Tensor | None:
    """[B]: the number of each sample's prompt, where several agents have a group each of every prompt's episodes; else
    nothing."""
    if "agent_ids" not in batch:
        return None
    return batch.group_ids // len(set(batch.columns["agent"]))  # as `episodes_batch` numbers them


def _metrics(
    batch: RolloutBatch,
    scores: Scores,
    parts: Sequence[tuple[RolloutBatch, Scores, Metrics]],
    *,
    rounds: int,
    silent: int,
) -> Metrics:
    """What this rank knows: where roles have ranks of their own, one that only scores has measured no generation, and
    one that only generates not how long scoring took."""
    prompts, last, found = prompts_of(batch), parts[-1][2], Metrics()
    groups = len(torch.unique(batch.group_ids if prompts is None else prompts))
    if "rollout/seconds" in last:
        seconds = sum(part[2]["rollout/seconds"] for part in parts)
        found |= rollout_metrics(batch, seconds, int(last["rollout/weight_version"]))
        found |= {"rollout/rounds": float(rounds), "rollout/generated_groups": float(groups)}
        found["rollout/kept_share"] = (groups - silent) / groups
    seconds = sum(part[2].get("reward/latency_ms", 0.0) for part in parts) / 1e3
    scored = score_metrics(scores, seconds)  # on all, as the engines' ranks keep it with samples that wait
    return found | {name: value for name, value in scored.items() if name != "reward/latency_ms" or name in last}
