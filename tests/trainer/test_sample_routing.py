"""What an estimator of one's own reads, of samples that other ranks work on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from megaverl.algorithms import Advantages
from megaverl.config import load_config
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.trainer.sample_routing import SampleRouting

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
