"""Every update is decided on by the age of its samples, as `max_staleness` says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaverl.config import load_config
from megaverl.data.batch import RolloutBatch
from megaverl.trainer.step import RLStep, oldest_version
from megaverl.workers.decisions import GradientReport, Rules, UpdateCounts, decide


def batch(versions: list[int]) -> RolloutBatch:
    ones = torch.ones(len(versions), 1, dtype=torch.int64)
    mask = torch.tensor([[version >= 0] for version in versions])
    return RolloutBatch(
        input_ids=ones + 1, prompt_lengths=ones[:, 0], generated_ids=ones, response_mask=mask,
        response_lengths=ones[:, 0], weight_versions=torch.tensor(versions)[:, None],
    )  # fmt: skip


@pytest.mark.parametrize(("oldest", "applied"), [(3, True), (2, False)])
def test_what_is_too_old_is_not_trained_on(oldest: int, applied: bool) -> None:
    """Of the engines' versions the newest is the fifth, and two are allowed between."""
    given = [
        "model.path=m",
        "rollout={async_rollout: true, max_staleness: 2}",
        "placement={rollout: 0, actor: 1}",
    ]
    config = load_config(
        None, [*given, "data.train=t", "reward=exact_match"], check_paths=False
    )
    trainable = SimpleNamespace(staleness=0)

    def update(experience: RolloutBatch, **options: Any) -> dict[str, float]:
        report = GradientReport(
            "actor",
            0,
            UpdateCounts(),
            tokens=8.0,
            norm=1.0,
            staleness=trainable.staleness,
        )
        return {"applied": float(decide([report], Rules.from_config(config)).applies)}

    actor = SimpleNamespace(trainable=trainable, update=update)
    roles: Any = SimpleNamespace(actor=actor, sync=None, kl=SimpleNamespace(coef=0.0))
    step = RLStep(config, roles, newest_version=5)
    assert step.update_actor(batch([4, oldest, -1]), step=7)
    assert step.metrics["actor/applied"] == applied


def test_the_oldest_of_a_batch() -> None:
    assert oldest_version(batch([4, 2, -1]), 5) == 2
    assert oldest_version(batch([-1]), 5) == 5
