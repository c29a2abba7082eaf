"""Algorithms that are a recipe of parts: what the recipe makes is the objective of its paper, in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from torch import Tensor

from megaverl.algorithms import advantage_estimators, count_denominators, policy_losses
from megaverl.config import Config, load_config
from megaverl.config.yaml_source import recipe
from megaverl.trainer.step import RLStep
from megaverl.workers.micro_batches import Weighting
from megaverl.workers.policy import policy_loss_options
from megaverl.workers.reward import Scores
from tests.algorithms.references import Inputs, inputs_of
from tests.algorithms.strategies import Case, cases
from tests.algorithms.test_losses import assert_same
from tests.algorithms.test_policy_losses import QUICK
from tests.workers.ranks import experience


def config_of(name: str) -> Config:
    return load_config(recipe(f"gsm8k_smollm2/{name}"), check_paths=False)


def policy_loss_of(config: Config, x: Inputs) -> Tensor:
    """As a policy's update computes it."""
    algorithm, entry = (
        config.algorithm,
        policy_losses.get(config.algorithm.policy_loss_name),
    )
    weighting = Weighting(algorithm.aggregation_name, max_tokens=algorithm.loss_length)
    weights = weighting.weights(x.mask, count_denominators(x.mask)).double()
    inputs = {
        "log_probs": x.new,
        "old_log_probs": x.old,
        "advantages": x.advantages,
        "weights": weights,
    }
    return entry(inputs, **policy_loss_options(entry, algorithm)).loss


@QUICK
@given(cases(holes=True))
def test_luspo_is_gspo_with_each_response_times_its_length(case: Case):
    """LUSPO, arXiv 2602.05261: the mean over responses of |y| min(s A, clip(s, 1 - low, 1 + high) A), s = (pi / pi_old)
    ^(1 / |y|) of the whole response, A the group's normalised reward, low and high 2e-3 and 2.5e-3.
    """
    config = config_of("luspo")
    assert (
        config.algorithm.advantage_name == "grpo" and config.algorithm.normalize_by_std
    )
    x = inputs_of(case, per_response=True)
    # Some ratios are inside the clip.
    x = x._replace(old=x.new.detach() + 0.01 * (x.old - x.new.detach()))
    terms = []
    for i in range(len(x.mask)):
        if length := len(x.tokens(i)):
            s = torch.exp(sum(x.new[i, t] - x.old[i, t] for t in x.tokens(i)) / length)
            a = x.advantages[i, 0]
            terms.append(
                length * torch.minimum(s * a, s.clamp(1 - 2e-3, 1 + 2.5e-3) * a)
            )
    expected = -sum(terms) / len(terms) if terms else torch.zeros(()).double()
    assert_same(policy_loss_of(config, x), x.new, expected, x.new)


def test_pf_ppo_is_ppo_on_the_best_and_one_other_of_each_group():
    """PF-PPO, arXiv 2409.06957: rewards are filtered by rank before PPO, whose loss is the mean over what is left."""
    config, group = config_of("pf_ppo"), 4
    assert config.algorithm.group_size == group and config.uses_critic
    batch, total = (
        experience(8, same_prompts=group),
        torch.tensor([0.1, 0.9, 0.4, 0.2, 0.3, 0.0, 0.8, 0.5]),
    )
    batch = batch.with_(group_ids=torch.arange(8) // group)
    scores = Scores(total, {"gsm8k": total}, total > 0.5)
    roles: Any = SimpleNamespace(
        reward=SimpleNamespace(weights=lambda _: {"gsm8k": 1.0}),
        kl=SimpleNamespace(coef=0.0, update=lambda _: None),
    )
    step = RLStep(config, roles)
    names = ("old_log_probs", "ref_log_probs", "values")
    signals = {name: batch[name] for name in names}
    made = step.advantages(batch, scores, **signals, last_values=torch.zeros(8))
    kept = [row for row in range(8) if made.response_mask[row].any()]
    assert (
        len(kept) == 4
        and {1, 6} < set(kept)
        and len({row // group for row in kept}) == 2
    )
    assert step.metrics["rollout/filtered_fraction"] == 0.5

    new = (
        batch.old_log_probs
        + 0.3 * torch.randn(8, 9, generator=torch.Generator().manual_seed(0))
    ).double()
    x = Inputs(
        new.requires_grad_(),
        batch.old_log_probs.double(),
        made.advantages.double(),
        None,
        made.response_mask,
    )
    terms = []
    for row in kept:
        for t in range(int(batch.response_lengths[row])):
            ratio, a = torch.exp(x.new[row, t] - x.old[row, t]), x.advantages[row, t]
            terms.append(torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a))
    assert_same(policy_loss_of(config, x), x.new, -sum(terms) / len(terms), x.new)


def test_of_online_dpo_the_pairs_alone_train():
    """The rest of it, arXiv 2402.04792, is in tests/workers/test_algorithms.py: its pairs and their loss."""
    config = config_of("online_dpo")
    estimator = advantage_estimators.get(config.algorithm.advantage_name)
    mask = torch.ones(3, 4).bool()
    x = inputs_of(Case(mask, torch.Generator().manual_seed(0)))
    x = x._replace(
        advantages=estimator(
            {"response_mask": mask, "rewards": torch.tensor([1.0, 0.0, 1.0])}
        ).advantages
    )
    assert config.algorithm.kl.place == "none" and config.algorithm.entropy_coef == 0.0
    assert_same(policy_loss_of(config, x), x.new, torch.zeros(()), x.new)
