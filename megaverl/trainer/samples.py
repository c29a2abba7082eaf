"""Batches of prompts and responses, and samples of them for a person to read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.rollout.engine import Generation
from megaverl.rollout.environments import View, Views
from megaverl.workers.reward import RewardRole, Scores


def rollout_batch(
    prompts: Sequence[PromptRecord], generations: Sequence[Generation], group_ids: Sequence[int]
) -> RolloutBatch:
    """Prompts and their responses, with the columns that rewards and samples read."""
    return RolloutBatch.from_generations(
        [prompt.token_ids for prompt in prompts],
        generations,
        group_ids=group_ids,
        columns={
            "messages": [prompt.messages for prompt in prompts],
            "prompt": [prompt.text for prompt in prompts],
            "reference": [prompt.reference for prompt in prompts],
            "extra": [prompt.extra for prompt in prompts],
        },
    )


def episode_batch(prompts: Sequence[PromptRecord], views: Sequence[View], group_ids: Sequence[int]) -> RolloutBatch:
    """One agent's views of episodes: its own tokens train, what it was told does not."""
    batch = RolloutBatch.from_generations(
        [view.prompt for view in views],
        [Generation(view.tokens, view.log_probs, view.finish_reason) for view in views],
        group_ids=group_ids,
        columns={
            "prompt": [prompt.text for prompt in prompts],
            "reference": [prompt.reference for prompt in prompts],
            "extra": [prompt.extra for prompt in prompts],
            "turns": [view.spans for view in views],
        },
    )
    own, turns = torch.zeros_like(batch.response_mask), torch.zeros_like(batch.generated_ids)
    rewards = torch.zeros_like(batch.rollout_log_probs)
    for row, view in enumerate(views):
        length = len(view.tokens)
        own[row, :length] = torch.tensor(view.own, dtype=torch.bool)
        turns[row, :length] = torch.tensor(view.turns, dtype=torch.int64)
        for (_, end), reward in zip(view.spans, view.rewards, strict=True):
            rewards[row, end - 1] = reward
    return batch.with_(response_mask=own, turn_ids=turns, turn_rewards=rewards)


def episodes_batch(
    prompts: Sequence[PromptRecord], episodes: Sequence[Views], agents: Sequence[str], group_ids: Sequence[int]
) -> RolloutBatch:
    """The views of all agents, one agent's after the other's; each agent's groups are its own."""
    parts = [
        episode_batch(
            prompts,
            [views[agent] for views in episodes],
            [group * len(agents) + number for group in group_ids],
        )
        for number, agent in enumerate(agents)
    ]
    if len(agents) == 1:
        return parts[0]
    return RolloutBatch.concat(
        [
            part.with_(agent_ids=torch.full((len(part),), number)).with_columns(agent=[agent] * len(part))
            for number, (agent, part) in enumerate(zip(agents, parts, strict=True))
        ]
    )


def sample_records(batch: RolloutBatch, scores: Scores, reward: RewardRole, count: int) -> list[dict[str, Any]]:
    """The first `count` samples as JSON-able records."""
    agents = batch.columns.get("agent")
    return [
        {
            **({"agent": agents[i]} if agents else {}),
            "prompt": batch.columns["prompt"][i],
            "response": reward.transcript(batch, i),
            "reference": batch.columns["reference"][i],
            "reward": round(float(scores.total[i]), 6),
            "finish_reason": batch.columns["finish_reason"][i],
        }
        for i in range(min(count, len(batch)))
    ]


def forget_samples(path: Path, after_step: int) -> None:
    """Drop the records of later steps, which a run that goes on from `after_step` writes again; 0 drops all.

    A last line that a killed run left unfinished goes too.
    """
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines() if after_step else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= after_step]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def append_samples(path: Path, step: int, records: Sequence[Mapping[str, Any]], split: str = "train") -> None:
    """Add one JSON line per record to `path`."""
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps({"step": step, "split": split, **record}, ensure_ascii=False, default=str) + "\n")
