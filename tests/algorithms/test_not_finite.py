"""A number that is not finite reaches the loss or an error, whatever masks, limits and selections stand between."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megaverl.algorithms import (
    advantage_estimators,
    corrections,
    highest_entropies,
    keep_groups,
    kl_estimators,
    non_finite_token,
    policy_losses,
    preference_losses,
    reward_model_losses,
    token_selectors,
    value_losses,
)
from megaverl.errors import DataError, TrainingStopped
from megaverl.workers.micro_batches import naming_what_is_not_finite

ROWS, LENGTH, BAD = 3, 4, (1, 2)
# The rollout's log-probs are read by DPPO alone, which has no other.
TOKENS = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages")


def tokens(sign: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    old = -1.0 - torch.rand(ROWS, LENGTH, generator=generator)
    return {
        "log_probs": (old + 0.3).clamp(max=-0.1),
        "old_log_probs": old,
        "rollout_log_probs": old.clone(),
        "advantages": torch.full((ROWS, LENGTH), sign),
        "weights": torch.full((ROWS, LENGTH), 1 / 12),
    }


@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", list(policy_losses))
def test_nan_at_one_token_makes_a_policy_loss_nan(
    name: str, sign: float, selected: bool
) -> None:
    loss = policy_losses.get(name)
    for field in [each for each in TOKENS if each in loss.inputs]:
        batch = {**tokens(sign), "selected": torch.full((ROWS, LENGTH), selected)}
        batch[field][BAD] = math.nan
        assert math.isnan(float(loss(batch).loss)), field
    batch = {**tokens(sign), "selected": torch.full((ROWS, LENGTH), selected)}
    batch["advantages"][BAD] = math.inf
    assert not math.isfinite(float(loss(batch).loss)), "an infinite advantage"
    for optional in ("correction_factors", "importance_weights"):
        if optional in loss.optional_inputs:
            factors = torch.ones(ROWS, LENGTH)
            factors[BAD] = math.nan
            assert math.isnan(float(loss({**tokens(sign), optional: factors}).loss)), (
                optional
            )


@pytest.mark.parametrize("field", ["values", "old_values", "returns"])
def test_nan_makes_a_value_loss_nan(field: str) -> None:
    batch = {
        name: torch.zeros(ROWS, LENGTH) for name in ("values", "old_values", "returns")
    }
    batch[field][BAD] = math.nan
    loss = value_losses.get("clipped")(
        {**batch, "weights": torch.full((ROWS, LENGTH), 1 / 12)}
    )
    assert math.isnan(float(loss.loss))


def test_nan_makes_estimates_and_corrections_nan() -> None:
    for name in kl_estimators:
        for field in ("log_probs", "ref_log_probs"):
            batch = {"log_probs": torch.zeros(2), "ref_log_probs": torch.zeros(2)}
            batch[field][0] = math.nan
            assert math.isnan(float(kl_estimators.get(name)(batch)[0])), (name, field)
    mask = torch.ones(ROWS, LENGTH).bool()
    for name in corrections:
        entry = corrections.get(name)
        options: dict[str, Any] = {"high": 2.0} if name == "reject" else {}
        for field in [each for each in TOKENS[:3] if each in entry.inputs]:
            for sign in (1.0, -1.0):
                batch = {**tokens(sign), "response_mask": mask}
                batch[field][BAD] = math.nan
                assert math.isnan(float(entry(batch, **options).factors[BAD])), (
                    name,
                    field,
                    sign,
                )


def of_pairs(name: str) -> dict[str, torch.Tensor]:
    entry = preference_losses.get(name)
    batch = {
        each: torch.full((3,), -2.0) for each in (*entry.inputs, *entry.optional_inputs)
    }
    batch |= {
        "weights": torch.full((3,), 1 / 3),
        "desirable": torch.tensor([True, False, True]),
    }
    batch |= {
        side: torch.full((3,), 5) for side in ("chosen_lengths", "rejected_lengths")
    }
    batch |= {
        each: torch.tensor(0.5)
        for each in ("reference_kl", "reward_shift", "mean_chosen_length")
    }
    return {
        each: value
        for each, value in batch.items()
        if each in (*entry.inputs, *entry.optional_inputs)
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", list(preference_losses))
def test_what_is_not_finite_shows_in_a_preference_loss(name: str, bad: float) -> None:
    """A sigmoid of infinity is 0 or 1, and a limit of it the limit."""
    options: dict[str, Any] = {"sft_over": "token"} if name == "cpo" else {}
    for field, value in of_pairs(name).items():
        if (
            field in ("weights", "desirable", "mean_chosen_length")
            or not value.is_floating_point()
        ):
            continue
        batch = of_pairs(name)
        batch[field][1 if value.dim() else ()] = bad
        assert not math.isfinite(
            float(preference_losses.get(name)(batch, **options).loss)
        ), field


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_a_reward_model_loss(bad: float) -> None:
    for field in ("chosen_rewards", "rejected_rewards", "margins"):
        batch = {
            each: torch.zeros(3)
            for each in ("chosen_rewards", "rejected_rewards", "margins")
        }
        batch[field][1] = bad
        loss = reward_model_losses.get("bradley_terry")(
            {**batch, "weights": torch.full((3,), 1 / 3)}
        )
        assert not math.isfinite(float(loss.loss)), field


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_selection_names_what_is_not_finite(bad: float) -> None:
    mask = torch.ones(ROWS, LENGTH).bool()
    entropies = torch.rand(ROWS, LENGTH)
    entropies[BAD] = bad
    with pytest.raises(
        DataError, match=r"entropies of sample 1 is (nan|inf|-inf) at response token 2"
    ):
        highest_entropies(entropies, mask, fraction=0.5)
    mask_without = mask.clone()
    mask_without[BAD] = False
    assert int(highest_entropies(entropies, mask_without, fraction=0.5).sum()) == 5, (
        "outside the mask it may be"
    )
    for name in token_selectors:
        for field in ("log_probs", "advantages"):
            batch = {
                **tokens(),
                "response_mask": mask,
                "draws": torch.rand(ROWS, LENGTH),
            }
            batch[field][BAD] = bad
            with pytest.raises(DataError, match=f"{field} of sample 1"):
                token_selectors.get(name)(batch)
    scores = torch.tensor([0.0, 1.0, math.inf, 1.0])
    with pytest.raises(DataError, match="scores of sample 2 is inf"):
        keep_groups(scores, torch.tensor([0, 0, 1, 1]), wanted=2)


@pytest.mark.parametrize(
    "name",
    [
        "gae",
        "turn_gae",
        "reinforce_plus_plus",
        "optimal_token_baseline",
        "distillation",
    ],
)
def test_nan_shows_in_advantages_of_tokens(name: str) -> None:
    entry = advantage_estimators.get(name)
    fields = [
        each
        for each in entry.inputs
        if each not in ("response_mask", "group_ids", "turn_ids")
    ]
    for field in fields:
        batch: dict[str, Any] = {each: torch.rand(ROWS, LENGTH) for each in fields}
        batch[field][BAD] = math.nan
        # the second sample is a group of its own, and no other could show it
        batch |= {
            "response_mask": torch.ones(ROWS, LENGTH).bool(),
            "group_ids": torch.tensor([0, 1, 0]),
        }
        batch["turn_ids"] = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        if field == "score_norms":
            batch["group_ids"] = torch.zeros(ROWS, dtype=torch.int64)
        if field == "values" and name == "turn_gae":
            batch[field][1, 0] = math.nan  # of a turn the first token's value counts
        assert bool(entry(batch).advantages[1].isnan().any()), field


def test_a_stopped_update_names_its_input() -> None:
    fields = {name: tensor for name, tensor in tokens().items() if name != "weights"}
    mask = torch.ones(ROWS, LENGTH).bool()
    fields["advantages"][BAD] = math.nan
    with (
        pytest.raises(
            TrainingStopped,
            match="not finite.*advantages of sample 1 is nan at response token 2",
        ),
        naming_what_is_not_finite(fields, mask),
    ):
        raise TrainingStopped("actor: the update is not finite.")
    mask[BAD] = False
    assert non_finite_token("advantages", fields["advantages"], mask) is None
    with (
        pytest.raises(TrainingStopped, match="^a rank is lost$"),
        naming_what_is_not_finite(fields, mask),
    ):
        raise TrainingStopped("a rank is lost")
