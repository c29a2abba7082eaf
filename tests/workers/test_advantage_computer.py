"""From rewards to advantages, as `algorithm` says."""

from __future__ import annotations

import pytest
import torch

from megaverl.algorithms import (
    gae,
    grpo,
    policy_losses,
    remax,
    rloo,
    token_rewards,
    whiten,
)
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.errors import ConfigError, DataError
from megaverl.workers.advantage_computer import AdvantageComputer
from megaverl.workers.policy import policy_loss_options


def batch(**tensors: torch.Tensor) -> RolloutBatch:
    """Two prompts, two responses each, of 3, 1, 0 and 2 tokens."""
    lengths = torch.tensor([3, 1, 0, 2])
    generator = torch.Generator().manual_seed(0)
    given = {
        "input_ids": torch.ones(4, 2).long(),
        "prompt_lengths": torch.full((4,), 2),
        "generated_ids": torch.ones(4, 3).long(),
        "response_mask": torch.arange(3) < lengths[:, None],
        "rollout_log_probs": -torch.rand(4, 3, generator=generator),
        "rewards": torch.tensor([1.0, 0.0, 0.25, 0.5]),
        "group_ids": torch.tensor([0, 0, 1, 1]),
    }
    return RolloutBatch({**given, **tensors})


def config(**options: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(options)


def test_ppo_is_gae_whitened() -> None:
    values = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
    given = batch(values=values)
    found, metrics = AdvantageComputer(config(name="ppo", gamma=0.9, lam=0.8)).assign(
        given, kl_coef=0.0
    )
    mask = given.response_mask
    expected = gae(token_rewards(given.rewards, mask), values, mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close(found.advantages, whiten(expected.advantages, mask))
    torch.testing.assert_close(found.returns, expected.returns)
    assert metrics == {
        "advantage_mean": pytest.approx(float(expected.advantages[mask].mean()))
    }
    plain, _ = AdvantageComputer(
        config(name="ppo", gamma=0.9, lam=0.8, normalize_advantages=False)
    ).assign(given, kl_coef=0.0)
    torch.testing.assert_close(plain.advantages, expected.advantages)


def test_a_response_that_was_cut_off_goes_on_with_its_last_value() -> None:
    """By hand, gamma 0.5 and lambda 1, two tokens; the values before them are 0.4 and 0.8, and 0.6 after them."""
    given = batch(
        values=torch.tensor([[0.0] * 3] * 3 + [[0.4, 0.8, 9.0]]),
        last_values=torch.tensor([0, 0, 0, 0.6]),
    )
    ppo = AdvantageComputer(
        config(name="ppo", gamma=0.5, lam=1.0, normalize_advantages=False)
    )
    found, _ = ppo.assign(given, kl_coef=0.0)
    # the second's return is 0.5 + 0.5 * 0.6 = 0.8, the first's half of it
    torch.testing.assert_close(found.returns[3], torch.tensor([0.4, 0.8, 0.0]))
    torch.testing.assert_close(found.advantages[3], torch.tensor([0.0, 0.0, 0.0]))
    ended, _ = ppo.assign(given.with_(last_values=torch.zeros(4)), kl_coef=0.0)
    torch.testing.assert_close(ended.returns[3], torch.tensor([0.25, 0.5, 0.0]))
    turns = AdvantageComputer(
        config(name="turn_ppo", gamma=0.5, lam=1.0, normalize_advantages=False)
    )
    found, _ = turns.assign(
        given.with_(turn_ids=torch.arange(3).expand(4, 3)), kl_coef=0.0
    )
    torch.testing.assert_close(found.returns[3], torch.tensor([0.4, 0.8, 0.0]))


def test_a_kl_penalty_in_the_reward_of_tokens_and_of_responses() -> None:
    ref = -torch.rand(4, 3, generator=torch.Generator().manual_seed(2))
    given = batch(ref_log_probs=ref)
    kl = (given.rollout_log_probs - ref) * given.response_mask
    kl_config = {"in": "reward", "coef": 0.5}  # of k1
    found, metrics = AdvantageComputer(
        config(name="grpo", group_size=2, kl=kl_config)
    ).assign(given, kl_coef=0.5)
    expected = grpo(
        given.rewards - 0.5 * kl.sum(1), given.group_ids, given.response_mask
    )
    torch.testing.assert_close(found.advantages, expected.advantages)
    assert metrics["kl"] == pytest.approx(float(kl.sum() / given.response_mask.sum()))
    extra = {"greedy_rewards": torch.full((4,), 0.5)}
    found, _ = AdvantageComputer(config(name="remax", kl=kl_config)).assign(
        given, kl_coef=0.5, extra=extra
    )
    rewards = token_rewards(given.rewards, given.response_mask, kl, kl_coef=0.5)
    torch.testing.assert_close(
        found.advantages,
        remax(rewards, extra["greedy_rewards"], given.response_mask).advantages,
    )
    # a KL in the loss leaves rewards alone, and is measured all the same
    found, metrics = AdvantageComputer(
        config(name="rloo", group_size=2, kl={**kl_config, "in": "loss"})
    ).assign(given, kl_coef=0.5)
    torch.testing.assert_close(
        found.advantages,
        rloo(given.rewards, given.group_ids, given.response_mask).advantages,
    )
    assert "kl" in metrics


def test_options_reach_the_estimator() -> None:
    given = batch()
    for options in (
        {"normalize_by_std": False},
        {"advantage_options": {"normalize_std": False}},
    ):
        found, _ = AdvantageComputer(
            config(name="grpo", group_size=2, **options)
        ).assign(given, kl_coef=0.0)
        expected = grpo(
            given.rewards, given.group_ids, given.response_mask, normalize_std=False
        )
        torch.testing.assert_close(found.advantages, expected.advantages)
    with pytest.raises(ConfigError, match="has no option 'sharpness'"):
        AdvantageComputer(
            config(name="grpo", group_size=2, advantage_options={"sharpness": 1})
        )


def test_options_of_a_policy_loss() -> None:
    def options(name: str, **given: object) -> dict[str, object]:
        algorithm = config(name=name, group_size=2, **given)
        return policy_loss_options(
            policy_losses.get(algorithm.policy_loss_name), algorithm
        )

    assert options("grpo") == {}  # the function's own
    assert options("grpo", clip_range=0.1) == {"clip_low": 0.1, "clip_high": 0.1}
    assert options("grpo", clip_range_high=0.3) == {"clip_high": 0.3}
    assert options("dapo") == {"clip_low": 0.2, "clip_high": 0.28}
    assert options("dapo", clip_range=0.1) == {"clip_low": 0.1, "clip_high": 0.1}
    assert options(
        "dapo", policy_loss="sapo", policy_loss_options={"tau_negative": 2.0}
    ) == {"tau_negative": 2.0}
    # what only the selector of tokens has is not given to the loss
    assert options("kl_cov", policy_loss_options={"penalty": 2.0, "fraction": 0.1}) == {
        "penalty": 2.0
    }


def test_every_reward_by_itself() -> None:
    given = batch()
    extra = {"component_rewards": torch.tensor([[1.0, 0], [0, 1], [0, 0], [1, 1]])}
    extra["component_weights"] = torch.tensor([1.0, 0.0])
    found, _ = AdvantageComputer(config(name="gdpo", group_size=2)).assign(
        given, kl_coef=0.0, extra=extra
    )
    assert found.advantages[0, 0] > 0 > found.advantages[1, 0]


def test_an_environment_s_rewards_stand_where_their_turns_end() -> None:
    """Two turns with the environment's word in between; what a function scored comes on top, at the end."""
    mask = torch.tensor([[True, False, True]] * 2)
    given = RolloutBatch(
        {
            "input_ids": torch.ones(2, 2).long(),
            "prompt_lengths": torch.full((2,), 2),
            "generated_ids": torch.ones(2, 3).long(),
            "response_mask": mask,
            "rollout_log_probs": torch.zeros(2, 3),
            "turn_ids": torch.tensor([[0, 0, 1]] * 2),
            "turn_rewards": torch.tensor([[0.5, 0.0, 1.0], [-0.5, 0.0, 0.0]]),
            "rewards": torch.tensor([1.75, -0.5]),
            "group_ids": torch.tensor([0, 0]),
            "values": torch.zeros(2, 3),
        }
    )
    found, _ = AdvantageComputer(
        config(name="turn_ppo", normalize_advantages=False)
    ).assign(given, kl_coef=0.0)
    torch.testing.assert_close(
        found.token_rewards, torch.tensor([[0.5, 0.0, 1.25], [-0.5, 0.0, 0.0]])
    )
    assert (found.advantages[~mask] == 0).all(), (
        "what the environment said is nobody's doing"
    )
    found, _ = AdvantageComputer(config(name="turn_grpo", group_size=2)).assign(
        given, kl_coef=0.0
    )
    assert (
        found.advantages[0, 0] > 0 > found.advantages[1, 0]
        and found.advantages[0, 2] > 0
    )


def test_every_agent_is_credited_by_itself() -> None:
    agents = torch.tensor([0, 1, 0, 1])
    given = batch(agent_ids=agents, values=torch.zeros(4, 3))
    credit = AdvantageComputer(config(name="ppo"))
    found, metrics = credit.assign_each(
        given, kl_coef=0.0, extra={"greedy_rewards": None}
    )
    for agent in (0, 1):
        rows = (agents == agent).nonzero()[:, 0]
        alone, own = credit.assign(given.select(rows), kl_coef=0.0)
        torch.testing.assert_close(found.advantages[rows], alone.advantages)
        torch.testing.assert_close(found.returns[rows], alone.returns)
    assert set(metrics) == set(own)


@pytest.mark.parametrize("name", ["grpo", "opo", "turn_grpo", "turn_ppo", "gdpo"])
def test_an_episode_of_several_conversations_is_one_sample(name: str) -> None:
    """Its rows, with the tokens of its turns, against one row with the same in the
    order of turns; and twice as many conversations do not count it twice.
    """
    turns = torch.tensor([[0, 1, 1, 3], [2, 2, 4, 4], [0, 0, 1, 1], [0, 1, 2, 2]])
    episodes, columns = torch.tensor([7, 7, 8, 9]), torch.arange(4)
    mask = torch.tensor(
        [
            [True, False, True, True],
            [True, True, False, True],
            [True] * 4,
            [True, True, False, False],
        ]
    )
    fields = {
        "input_ids": torch.ones(4, 2).long(),
        "prompt_lengths": torch.full((4,), 2),
        "generated_ids": torch.ones(4, 4).long(),
        "response_mask": mask,
        "turn_ids": turns,
        "rollout_log_probs": torch.rand(4, 4) - 1,
        "ref_log_probs": torch.rand(4, 4) - 1,
        "turn_rewards": torch.rand(4, 4) * mask,
        "values": torch.rand(4, 4),
        "rewards": torch.tensor([2.0, 2.0, 0.5, 0.0]),
        "last_values": torch.tensor([9.0, 0.3, 0.2, 0.0]),
        "group_ids": torch.zeros(4).long(),
    }
    rewards = torch.tensor([[2.0, 1.0], [2.0, 1.0], [0.5, 0.0], [0.0, 1.0]])
    apart = RolloutBatch(fields | {"episode_ids": episodes})
    # Of the first episode's own tokens, by turns.
    places = [(0, 0), (0, 2), (1, 0), (1, 1), (0, 3), (1, 3)]
    one = torch.zeros(3, 6, 2).long()
    one[0] = torch.tensor(places)
    one[1:, :4] = torch.stack(
        [torch.tensor([[2], [3]]).expand(2, 4), columns.expand(2, 4)], dim=2
    )
    wide = {
        k: v[one[..., 0], one[..., 1]] if v.shape == (4, 4) else v[1:]
        for k, v in fields.items()
    }
    wide["response_mask"][1:, 4:] = False
    wide["turn_rewards"][1:, 4:] = 0
    options = {"kl": {"in": "reward", "coef": 0.1}, "group_size": 3}
    credit = AdvantageComputer(config(name=name, **options))
    extra = {
        "component_rewards": rewards,
        "component_weights": torch.tensor([1.0, 0.5]),
    }
    found, metrics = credit.assign(apart, kl_coef=0.1, extra=extra)
    extra["component_rewards"] = rewards[1:]
    whole, expected = credit.assign(RolloutBatch(wide), kl_coef=0.1, extra=extra)
    assert metrics == pytest.approx(expected)
    assert (found.advantages[~mask] == 0).all() and found.advantages.any()
    torch.testing.assert_close(found.rewards[1:], whole.rewards)
    for field in [
        field for field in ("advantages", "returns", "token_rewards") if field in whole
    ]:
        torch.testing.assert_close(
            found[field][one[0, :, 0], one[0, :, 1]], whole[field][0]
        )
        torch.testing.assert_close(
            found[field][2:] * mask[2:], (whole[field] * wide["response_mask"])[1:, :4]
        )


def test_weights_of_rewards_are_nobodys_rows() -> None:
    """As many rewards as there are samples, of two agents."""
    agents = torch.tensor([0, 1, 0, 1])
    weights, rewards = torch.tensor([1.0, 0.0, 0.0, 2.0]), torch.rand(4, 4)
    given, credit = (
        batch(agent_ids=agents, group_ids=agents),
        AdvantageComputer(config(name="gdpo", group_size=2)),
    )
    extra = {"component_rewards": rewards, "component_weights": weights}
    found, _ = credit.assign_each(given, kl_coef=0.0, extra=extra)
    for agent in (0, 1):
        rows = (agents == agent).nonzero()[:, 0]
        own = {"component_rewards": rewards[rows], "component_weights": weights}
        alone, _ = credit.assign(given.select(rows), kl_coef=0.0, extra=own)
        torch.testing.assert_close(found.advantages[rows], alone.advantages)


@pytest.mark.parametrize(
    "name",
    ["grpo", "rloo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"],
)
def test_a_sample_that_could_not_be_scored_is_as_if_it_were_not_there(
    name: str,
) -> None:
    """Its group's mean and deviation, and the batch's, are those of the others: the same as without it."""
    rewards = torch.tensor([1.0, 0.0, torch.nan, 3.0, 0.5, torch.nan, 2.0, 2.5])
    mask = torch.ones(8, 3, dtype=torch.bool)
    batch = RolloutBatch(
        {
            "input_ids": torch.zeros(8, 2, dtype=torch.int64),
            "prompt_lengths": torch.full((8,), 2),
            "generated_ids": torch.zeros(8, 3, dtype=torch.int64),
            "rewards": rewards,
            "response_mask": mask,
            "group_ids": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
            "rollout_log_probs": torch.zeros(8, 3),
        }
    )
    computer = AdvantageComputer(AlgorithmConfig(name="grpo", advantage=name))
    found, metrics = computer.assign_each(batch, kl_coef=0.0, extra={})
    kept = [0, 1, 3, 4, 6, 7]
    alone, expected = computer.assign_each(batch.select(kept), kl_coef=0.0, extra={})
    assert torch.equal(found.advantages[kept], alone.advantages) and metrics == expected
    assert not found.advantages[[2, 5]].any() and not found.response_mask[[2, 5]].any()
    assert found.response_mask[kept].all() and found.rewards.isfinite().all()


def test_tokens_that_a_teacher_could_not_read_do_not_train() -> None:
    """NaN of a token, and of all of a response: its mask is gone, and the others are as without it."""
    unread = torch.tensor(
        [[False, True, False], [True, True, True], [False] * 3, [False] * 3]
    )
    given, computer = (
        batch(ref_log_probs=torch.full((4, 3), -0.5)),
        AdvantageComputer(config(name="distillation")),
    )
    found, metrics = computer.assign_each(
        given.with_(ref_log_probs=given.ref_log_probs.masked_fill(unread, torch.nan)),
        kl_coef=0.0,
        extra={},
    )
    mask = given.response_mask & ~unread
    assert torch.equal(found.response_mask, mask) and bool(
        found.ref_log_probs.isfinite().all()
    )
    torch.testing.assert_close(
        found.advantages, torch.where(mask, -0.5 - given.rollout_log_probs, 0.0)
    )
    expected = computer.assign(given.with_(response_mask=mask), kl_coef=0.0)[1]
    assert metrics == pytest.approx(expected) and metrics["kl"] > 0


def test_a_reference_that_is_not_finite_is_named() -> None:
    """A teacher of other tokens alone may leave some out; any other reference has failed."""
    log_probs = torch.full((4, 3), -0.5)
    log_probs[2] = torch.nan  # an empty response
    given = batch(ref_log_probs=log_probs)
    computer = AdvantageComputer(config(name="grpo", group_size=2))
    computer.assign_each(given, kl_coef=0.0, extra={})
    given.ref_log_probs[3, 1] = torch.nan
    with pytest.raises(
        DataError, match="ref_log_probs of sample 3 is nan at response token 1"
    ):
        computer.assign_each(given, kl_coef=0.0, extra={})
