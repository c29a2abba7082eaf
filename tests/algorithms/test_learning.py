"""Every estimator and every policy loss makes a small policy better: signs, scales and masks, put together.

The policy writes 4 tokens out of 6, each by a softmax of its own, and may stop early,
at a 0 in the last two places. Its reward is the share of places where it wrote what was
wanted.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megaverl.algorithms import (
    advantage_estimators,
    aggregations,
    count_denominators,
    policy_losses,
    token_rewards,
    token_selectors,
)

LENGTH, VOCABULARY, GROUPS, GROUP_SIZE = 4, 6, 8, 8
WANTED = torch.tensor([1, 5, 2, 3])
OPTIONS = {"pass_at_k": {"k": 2, "right_from": 0.5}}


def rewards_of(tokens: Tensor) -> Tensor:
    return (tokens == WANTED).double().mean(dim=-1)


def experience(logits: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch of samples, with whatever an estimator may read."""
    policy = logits.detach().log_softmax(-1)
    count = GROUPS * GROUP_SIZE
    tokens = torch.multinomial(
        policy.exp(), count, replacement=True, generator=generator
    ).T
    stopped = (tokens == 0) & (torch.arange(LENGTH) >= 2)
    mask = stopped.cumsum(1) - stopped.long() == 0
    tokens = torch.where(mask, tokens, -1)
    taken = policy.expand(count, -1, -1).gather(2, tokens.clamp(min=0)[..., None])[
        ..., 0
    ]
    teacher = (
        torch.nn.functional.one_hot(WANTED, VOCABULARY).double().mul(3).log_softmax(-1)
    )
    hits = (tokens == WANTED).double() / LENGTH
    rewards = hits.sum(1)
    expected = (policy.exp() * (torch.arange(VOCABULARY) == WANTED[:, None])).sum(
        1
    ) / LENGTH
    return {
        "tokens": tokens,
        "response_mask": mask,
        "group_ids": torch.arange(count) // GROUP_SIZE,
        "rewards": rewards,
        "token_rewards": token_rewards(rewards, mask),
        "component_rewards": torch.stack([rewards, hits[:, 0]], dim=1),
        "greedy_rewards": rewards_of(policy.argmax(-1)).expand(count),
        "values": expected.flip(0).cumsum(0).flip(0).expand(count, -1),
        "score_norms": 1 - 2 * taken.exp() + policy.exp().square().sum(-1),
        "old_log_probs": taken,
        "rollout_log_probs": taken,
        "ref_log_probs": teacher.expand(count, -1, -1).gather(
            2, tokens.clamp(min=0)[..., None]
        )[..., 0],
        "implicit_rewards": hits,
        "turn_ids": torch.arange(LENGTH).expand(count, -1),
        "draws": torch.rand(count, LENGTH, generator=generator),
    }


def train(
    estimator: str, loss: str, mode: str = "token_mean", steps: int = 40
) -> tuple[float, float]:
    """The expected reward before and after: one batch a step, two updates on it."""
    logits = torch.zeros(LENGTH, VOCABULARY, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    generator = torch.Generator().manual_seed(0)
    entry = policy_losses.get(loss)
    for _ in range(steps):
        batch = experience(logits, generator)
        if estimator == "nash_md":  # every other response is an opponent
            batch["response_mask"] = batch["response_mask"] & (
                torch.arange(GROUPS * GROUP_SIZE) % 2 == 0
            ).unsqueeze(1)
        advantages = advantage_estimators.get(estimator)(
            batch, **OPTIONS.get(estimator, {})
        ).advantages
        mask = batch["response_mask"]
        weights = aggregations.get(mode).function(
            mask, count_denominators(mask), dtype=torch.float64
        )
        given = {**batch, "advantages": advantages, "weights": weights}
        if "selected" in entry.inputs:
            given["selected"] = token_selectors.get(loss)(
                {**given, "log_probs": batch["old_log_probs"]}
            )
        for _ in range(2):
            log_probs = logits.log_softmax(-1).expand(len(mask), -1, -1)
            given["log_probs"] = log_probs.gather(
                2, batch["tokens"].clamp(min=0)[..., None]
            )[..., 0]
            optimizer.zero_grad()
            entry(given).loss.backward()
            optimizer.step()
    final = logits.detach().softmax(-1)[torch.arange(LENGTH), WANTED].mean()
    return 1 / VOCABULARY, float(final)


@pytest.mark.parametrize("estimator", advantage_estimators)
def test_every_estimator_learns(estimator: str):
    before, after = train(estimator, "ppo_clip")
    if estimator == "none":  # no reward trains
        assert after == pytest.approx(before)
    else:
        assert after > before + 0.3


@pytest.mark.parametrize("loss", policy_losses)
def test_every_policy_loss_learns(loss: str):
    before, after = train("grpo", loss, "seq_mean_token_mean")
    assert after > before + 0.3
