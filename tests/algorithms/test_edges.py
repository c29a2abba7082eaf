"""Every advantage estimator where a batch runs out: no samples, no tokens, one of each, groups that say nothing."""

from __future__ import annotations

import math

import pytest
import torch

from megaverl.algorithms import advantage_estimators
from megaverl.errors import DataError

OPTIONS = {"pass_at_k": {"k": 1}}
# (responses' lengths, their groups): nothing at all, no width, none with a token, one,
# holes between, groups of one
BATCHES: dict[str, tuple[list[list[int]], list[int]]] = {
    "no samples": ([], []),
    "no width": ([[], [], []], [0, 0, 1]),
    "no tokens": ([[0, 0], [0, 0], [0, 0]], [0, 0, 1]),
    "one token": ([[1]], [5]),
    "one response without a token": ([[1, 1, 0], [0, 0, 0], [1, 0, 1]], [0, 0, 0]),
    "groups of one": ([[1, 1], [1, 0], [1, 1]], [0, 1, 2]),
}


def inputs_of(
    rows: list[list[int]], groups: list[int], scale: float
) -> dict[str, torch.Tensor]:
    """Everything that an estimator may read, with NaN wherever the mask says that nobody may look."""
    mask = torch.tensor(rows, dtype=torch.bool).reshape(
        len(rows), len(rows[0]) if rows else 4
    )
    generator = torch.Generator().manual_seed(0)

    def per_token() -> torch.Tensor:
        return torch.where(
            mask, torch.randn(mask.shape, generator=generator) * scale, torch.nan
        )

    given = {
        name: per_token()
        for name in ("token_rewards", "values", "score_norms", "implicit_rewards")
    }
    given |= {
        name: -per_token().abs() for name in ("rollout_log_probs", "ref_log_probs")
    }
    given |= {
        name: torch.full((len(rows),), scale) for name in ("rewards", "greedy_rewards")
    }
    return given | {
        "component_rewards": torch.full((len(rows), 2), scale),
        "group_ids": torch.tensor(groups, dtype=torch.int64),
        "turn_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "response_mask": mask,
    }


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", advantage_estimators)
def test_advantages_are_finite_and_nothing_outside_the_mask(
    name: str, batch: str, scale: float
) -> None:
    inputs = inputs_of(*BATCHES[batch], scale)
    result = advantage_estimators.get(name)(inputs, **OPTIONS.get(name, {}))
    mask = inputs["response_mask"]
    for tensor in (result.advantages, result.returns):
        if tensor is not None:
            assert (
                tensor.shape == mask.shape
                and torch.isfinite(tensor).all()
                and not tensor[~mask].any()
            )


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("name", advantage_estimators)
def test_a_score_that_is_not_finite_is_named(name: str, wrong: float) -> None:
    entry = advantage_estimators.get(name)
    inputs = inputs_of([[1, 1], [1, 0], [1, 1]], [0, 0, 0], 1.0)
    for scores in {"rewards", "greedy_rewards", "component_rewards"} & set(
        entry.inputs
    ):
        spoilt = inputs[scores].clone()
        spoilt[1] = wrong
        with pytest.raises(DataError, match=f"{scores} of sample 1 is"):
            entry({**inputs, scores: spoilt}, **OPTIONS.get(name, {}))
