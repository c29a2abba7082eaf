"""What an estimator of one's own reads, of samples that other ranks work on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megaverl.algorithms import Advantages
from megaverl.config import load_config
from megaverl.data.prefix_packing import SequenceLengths
from megaverl.trainer.executor import SampleRouting

OUTLINE = SequenceLengths([2, 2, 2], [1, 1, 1], [0, 1, 2])


def by_temperature(rewards: Tensor, response_mask: Tensor, temperatures: Tensor | None = None) -> Advantages:
    """Reads of every sample how it was drawn, where that is known."""
    scale = torch.ones_like(rewards) if temperatures is None else temperatures
    return Advantages((rewards / scale).unsqueeze(1) * response_mask)


def by_first_token(rewards: Tensor, response_mask: Tensor, generated_ids: Tensor | None = None) -> Advantages:
    """Looks at tokens, of all samples."""
    assert generated_ids is not None
    return Advantages((rewards * (generated_ids[:, 0] > 5)).unsqueeze(1) * response_mask)


def readers(estimator: str) -> SampleRouting:
    algorithm = f"algorithm={{name: grpo, group_size: 2, advantage: '{__name__}:{estimator}'}}"
    given = ["model.path=m", "data.train=t", "reward=exact_match", algorithm]
    steps: Any = SimpleNamespace(config=load_config(None, given, check_paths=False), roles=None)
    fabric: Any = SimpleNamespace(placement=SimpleNamespace(ranks={"actor": (1, 2)}))
    return SampleRouting(steps, fabric, reporter=1)


def test_what_it_may_leave_out_comes_of_all_samples() -> None:
    assert "temperatures" in readers("by_temperature").of_operators()["advantages"].of_all


def test_who_scores_or_credits_an_episode_knows_all_of_its_conversations() -> None:
    reads = readers("by_temperature").of_operators()
    for operator in ("reward", "advantages"):
        assert {"episode_ids", "agent_ids"} <= reads[operator].of_all, operator


def test_who_looks_at_tokens_gets_those_of_all_samples() -> None:
    reads = readers("by_first_token").of_operators()["advantages"]
    assert {rank: list(rows) for rank, rows in reads.rows(OUTLINE).items()} == {1: [0, 1, 2], 2: [0, 1, 2]}
