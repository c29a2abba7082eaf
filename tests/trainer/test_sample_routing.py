"""What an estimator of one's own reads, of samples that other ranks work on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import Tensor

from megaverl.algorithms import Advantages
from megaverl.config import load_config
from megaverl.data.batch import RolloutBatch
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.trainer.sample_routing import SampleRouting
from megaverl.trainer.sample_rows import SampleFacts

OUTLINE = SequenceLengths([2, 2, 2], [1, 1, 1], [0, 1, 2])


def by_first_token(
    rewards: Tensor, response_mask: Tensor, generated_ids: Tensor | None = None
) -> Advantages:
    """Looks at tokens, of all samples."""
    assert generated_ids is not None
    return Advantages(
        (rewards * (generated_ids[:, 0] > 5)).unsqueeze(1) * response_mask
    )


def readers(estimator: str) -> SampleRouting:
    algorithm = (
        f"algorithm={{name: grpo, group_size: 2, advantage: '{__name__}:{estimator}'}}"
    )
    given = ["model.path=m", "data.train=t", "reward=exact_match", algorithm]
    steps: Any = SimpleNamespace(
        config=load_config(None, given, check_paths=False), roles=None
    )
    context: Any = SimpleNamespace(placement=SimpleNamespace(ranks={"actor": (1, 2)}))
    return SampleRouting(steps, context, reporting_rank=1)


def test_who_looks_at_tokens_gets_those_of_all_samples() -> None:
    rows_read = readers("by_first_token").rows_read()["advantages"]
    assert {rank: list(rows) for rank, rows in rows_read(OUTLINE).items()} == {
        1: [0, 1, 2],
        2: [0, 1, 2],
    }


def test_facts_of_conversations_say_what_they_share() -> None:
    """As JSON to the ranks that assign rows, which then plan like a rank with all tokens."""
    conversations = RolloutBatch(
        input_ids=torch.tensor([[1, 2, 0, 0], [1, 2, 3, 4], [1, 2, 0, 0]]),
        prompt_lengths=torch.tensor([2, 4, 2]),
        generated_ids=torch.tensor([[3, 4, 9], [5, 0, 0], [3, 4, 0]]),
        response_mask=torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool(),
    )
    assert SampleFacts.of(conversations).tree_order == [], "they share prompts alone"
    batch = conversations.with_(
        episode_ids=torch.tensor([0, 0, 1]), group_ids=torch.tensor([7, 7, 7])
    )
    sent = msgspec.json.encode(SampleFacts.of(batch))
    received = msgspec.json.decode(sent, type=SampleFacts).lengths
    assert received == sequence_lengths(batch)
    assert received.tree.order == [2, 0, 1] and received.tree.shared == [0, 1, 3]
