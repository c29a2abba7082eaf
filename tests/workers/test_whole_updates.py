"""Whole steps, from rewards to the weights after the last epoch, are those of transformers and the papers in float64.

Groups are ragged, mini-batches are of unequal size and of several micro-batches, one
response trains no token, and one has a hole. Tests that compare grids with each other
would not see a rule that is wrong everywhere alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from megaverl.algorithms import aggregations
from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher
from tests.workers.reference_updates import (
    JUDGED,
    Case,
    Pairs,
    bradley_terry,
    judged_update,
    said,
    score_of,
    sums_of,
    whole_update,
)
from tests.workers.update_ranks import PAIR_STEPS, TEMPERATURE, pairs, ragged

TRUNCATED = {"correction": {"kind": "token_truncate", "high": 1.05}}
POLICIES: dict[str, Case] = {
    "ppo": Case(
        "gae",
        "ppo_clip",
        "token_mean",
        options={"entropy_coef": 0.01},
        beside={"entropy": 0.01},
    ),
    "grpo": Case(
        "grpo",
        "ppo_clip",
        "seq_mean_token_mean",
        options={"kl": {"in": "loss"}},
        beside={"kl": True},
    ),
    "dr_grpo": Case("dr_grpo", "ppo_clip", "fixed_length", num_mini_batches=2),
    "rloo": Case("rloo", "ppo_clip", "seq_mean_token_sum", num_mini_batches=2),
    "reinforce++": Case(
        "reinforce_plus_plus",
        "dual_clip",
        "token_sum",
        options={"kl": {"in": "reward"}},
    ),
    "gspo": Case("gae", "gspo", "seq_mean_token_mean"),
    "gspo, top entropy": Case(
        "gae",
        "gspo",
        "token_mean",
        options={"top_entropy": 0.4},
        beside={"top_entropy": 0.4},
    ),
    "gmpo, top entropy": Case(
        "grpo",
        "gmpo",
        "token_mean",
        options={"top_entropy": 0.4},
        beside={"top_entropy": 0.4},
    ),
    "vespo, corrected": Case(
        "grpo", "vespo", "token_mean", options=TRUNCATED, beside={"truncate": 1.05}
    ),
    "cispo, corrected": Case(
        "gae",
        "cispo",
        "seq_mean_token_sum",
        options=TRUNCATED,
        beside={"truncate": 1.05},
    ),
    "dro": Case("dr_grpo", "dro", "seq_mean_token_sum"),
    "dppo": Case("gae", "dppo_tv", "token_mean"),
    "kl_cov": Case(
        "gae",
        "kl_cov",
        "token_mean",
        options={"policy_loss_options": {"fraction": 0.3, "penalty": 0.6}},
        beside={"covariance": 0.3},
    ),
    "positive": Case(
        "grpo",
        "sapo",
        "token_mean",
        options={"positive_coef": 0.1},
        beside={"positive": 0.1},
    ),
}
OF_VALUES = Case(
    "gae",
    "ppo_clip",
    "token_mean",
    options={"value_clip_range": 0.2, "value_loss_coef": 0.5},
)
ROLES = {"critic": OF_VALUES, "shared": OF_VALUES}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of two layers: the one that is trained, and a reference."""
    parent = tmp_path_factory.mktemp("models")
    return [
        make_tiny_folder(
            parent / str(seed), "Qwen3ForCausalLM", seed=seed, num_hidden_layers=2
        )
        for seed in range(2)
    ]


def differs(found: list[Any], right: torch.Tensor, before: torch.Tensor) -> str | None:
    """Return how far the outputs after an update are from the right ones, if too far for float32."""
    moved = float((right - before).abs().max())
    wrong = float((torch.tensor(found).double() - right).abs().max())
    return (
        None
        if moved > 1e-3 and wrong < 1e-3 * moved + 2e-6
        else f"wrong by {wrong:.2g} after moving {moved:.2g}"
    )


def unlike(
    reported: dict[str, float], right: dict[str, float]
) -> dict[str, tuple[float, float]]:
    """Return the metrics that are not the right ones, as (reported, right)."""
    pairs = {name: (reported[name], value) for name, value in right.items()}
    return {
        name: pair
        for name, pair in pairs.items()
        if pair[0] != pytest.approx(pair[1], rel=2e-4, abs=2e-6)
    }


def test_every_aggregation_is_in_a_step_of_several_mini_batches() -> None:
    assert {
        case.aggregation for case in POLICIES.values() if case.num_mini_batches > 1
    } == set(aggregations)


def test_a_step_is_that_of_transformers_and_the_papers(
    launch: Launcher, folders: list[Path]
) -> None:
    cases = {name: {"algorithm": case.algorithm} for name, case in POLICIES.items()}
    cases |= {
        role: {"algorithm": case.algorithm, "role": role}
        for role, case in ROLES.items()
    }
    batch = ragged()
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float64)
        log_probs = said(model, batch, range(len(batch)), TEMPERATURE).log_probs
    expected = {
        name: whole_update(folders[0], batch, case) for name, case in POLICIES.items()
    }
    expected |= {
        role: whole_update(folders[0], batch, case, role)
        for role, case in ROLES.items()
    }
    shape = {"dp": 2}
    [found, *_] = launch.world(
        2,
        "tests.workers.update_ranks:whole_updates",
        folder=folders[0],
        shape=shape,
        cases=cases,
    )
    wrong: dict[str, Any] = {}
    for name, (metrics, after) in expected.items():
        before = (
            torch.zeros_like(log_probs)
            if name == "critic"
            else torch.where(batch.response_mask, log_probs, 0.0)
        )
        wrong[name] = (
            unlike(found[name]["metrics"], metrics),
            differs(found[name]["after"], after, before),
        )
    assert {name: each for name, each in wrong.items() if any(each)} == {}


def test_updates_on_judged_responses_are_those_of_transformers(
    launch: Launcher, folders: list[Path]
) -> None:
    """Preferences, a reward model, answers and supervised fine-tuning, in several micro-batches and steps."""
    batch, answers = pairs(), ragged()
    mask = batch.response_mask
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for folder in folders
    )
    lengths = mask.sum(1)
    with torch.no_grad():
        frozen, tempered = (
            sums_of(reference, batch),
            sums_of(reference, batch, TEMPERATURE),
        )
        before = torch.where(mask, said(policy, batch, range(6), 1.0).log_probs, 0.0)

    def pair_loss(equation: Any) -> Any:
        def loss(model: torch.nn.Module) -> torch.Tensor:
            sums = sums_of(model, batch)
            numbers = (sums, frozen, lengths)
            return equation(
                Pairs(*(each[side::2] for each in numbers for side in (0, 1)))
            )

        return loss

    def of_answers(share: float, own: torch.Tensor, temperature: float = 1.0) -> Any:
        def loss(model: torch.nn.Module) -> torch.Tensor:
            return (
                -share
                * said(model, answers, range(len(answers)), temperature)
                .log_probs[own]
                .mean()
            )

        return loss

    wholes = torch.arange(9) < answers.response_lengths[:, None]
    losses = {name: pair_loss(equation) for name, (_, _, equation) in JUDGED.items()}
    losses |= {
        "answers": of_answers(0.5, answers.response_mask),
        "sft": of_answers(1.0, wholes),
    }

    def outcome(model: torch.nn.Module) -> torch.Tensor:
        """PRIME's cross-entropy of sigmoid(r), r = beta x the log-ratio to the reference, beta = 0.5."""
        rewards = 0.5 * (sums_of(model, batch, TEMPERATURE) - tempered)
        return -logsigmoid(torch.where(batch.desirable, rewards, -rewards)).mean()

    losses["prime"] = outcome
    given = {
        name: {"loss": loss, "options": options}
        for name, (loss, options, _) in JUDGED.items()
    }
    paths = {"folder": folders[0], "other": folders[1]}
    [found, *_] = launch.world(
        2,
        "tests.workers.update_ranks:judged_updates",
        shape={"dp": 2},
        losses=given,
        **paths,
    )
    wrong: dict[str, Any] = {}
    for name, loss in losses.items():
        steps, model = judged_update(folders[0], loss, PAIR_STEPS)
        with torch.no_grad():
            after = torch.where(mask, said(model, batch, range(6), 1.0).log_probs, 0.0)
        each = [unlike(*both) for both in zip(found[name]["steps"], steps, strict=True)]
        wrong[name] = *each, differs(found[name]["after"], after, before)
    steps, model = judged_update(
        folders[0],
        lambda model: bradley_terry(score_of(model, batch)),
        3,
        value_head=True,
    )
    with torch.no_grad():
        after = score_of(model, batch)
    each = [
        unlike(*both)
        for both in zip(found["reward_model"]["steps"], steps, strict=True)
    ]
    wrong["reward model"] = (
        *each,
        differs(found["reward_model"]["after"], after, torch.zeros(6)),
    )
    assert {name: each for name, each in wrong.items() if any(each)} == {}
