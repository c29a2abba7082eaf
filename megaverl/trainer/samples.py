"""Batches of prompts and responses, and samples of them for a person to read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.roles.reward import RewardRole, Scores
from megaverl.rollout.engine import Generation


def rollout_batch(
    prompts: Sequence[PromptRecord], generations: Sequence[Generation], group_ids: Sequence[int]
) -> RolloutBatch:
    """Prompts and their responses, with the columns that rewards and samples read."""
    return RolloutBatch.from_generations(
        [prompt.token_ids for prompt in prompts],
        generations,
        group_ids=group_ids,
        columns={
            "prompt": [prompt.text for prompt in prompts],
            "reference": [prompt.reference for prompt in prompts],
            "extra": [prompt.extra for prompt in prompts],
        },
    )


def sample_records(batch: RolloutBatch, scores: Scores, reward: RewardRole, count: int) -> list[dict[str, Any]]:
    """The first `count` samples as JSON-able records."""
    return [
        {
            "prompt": batch.columns["prompt"][i],
            "response": reward.text(batch, i),
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
