"""`placement` in a configuration: what it settles, and what is wrong with it, told before anything starts."""

from __future__ import annotations

import pytest

from megaverl.config import Config, InvalidConfig, load_config, smallest_world
from megaverl.config.loader import Command

NEEDED = ["model.path=absent", "data.train=absent.jsonl", "reward=exact_match"]


def load(
    *overrides: str, command: Command = "train", world: int | None = None
) -> Config:
    return load_config(
        None,
        [*NEEDED, *overrides],
        command=command,
        check_paths=False,
        world_size=world,
    )


def test_the_smallest_world_holds_every_role() -> None:
    assert smallest_world(load()) == 1
    assert (
        smallest_world(load("placement={rollout: 0, actor: rest}", "actor.tp=4")) == 5
    )
    short = load(
        "placement={actor_devices: [0, 1], critic_devices: [2]}", "algorithm.name=ppo"
    )
    assert smallest_world(short) == 3


def test_grids_are_judged_on_their_own_ranks() -> None:
    load("placement={rollout: 0, actor: rest}", "actor.tp=2", world=5)
    with pytest.raises(
        InvalidConfig,
        match=r"placement.actor .*: tp=2 x cp=1 x pp=1 = 2 does not divide its 3 ranks",
    ):
        load("placement={rollout: 0, actor: rest}", "actor.tp=2", world=4)
    # Known when the nodes have met.
    load("placement={rollout: {nodes: gen-1}, actor: rest}", world=4)


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (
            ["placement={rollout: 0-1, actor: 1-2}"],
            "placement.rollout",
            "share all of their ranks or none",
        ),
        (
            ["rollout.async_rollout=true"],
            "rollout.async_rollout",
            "Give them ranks of their own",
        ),
        (
            ["placement={actor_islands: 2, coordinator: 2}"],
            "placement.rollout",
            "and the actor has 2 islands",
        ),
        (
            [
                "placement={rollout: 0, actor_islands: 2, coordinator: 0}",
                "coordinator.islands_every=2",
            ]
            + ["actor.optimizer={lr: 1.0e-6, optimizer_cpu_offload: true}"],
            "actor.optimizer.optimizer_cpu_offload",
            "has its float32 weights elsewhere",
        ),
        (
            ["placement={rollout: 0}", "environment.agents=own"],
            "environment.agents",
            "all roles on the same",
        ),
        (
            ["placement={rollout: gen-1}"],
            "placement.rollout",
            "A node is named as {nodes: gen-1}",
        ),
        (["placement={rolout: 0}"], "placement.rolout", "unknown key"),
        (
            ["critic.share_backbone=true", "algorithm={name: grpo, group_size: 2}"],
            "critic.share_backbone",
            "no critic",
        ),
        (
            ["mix=[{update: sft}]", "placement={critic: 0, actor: rest}"],
            "placement.critic",
            "is decided on together",
        ),
        (
            ["mix=[{update: reward_model}]", "placement={rollout: 0}"],
            "placement.reward",
            "trains the reward model",
        ),
        (
            ["critic={share_backbone: true, path: x}"],
            "critic.path",
            "the critic uses the actor's backbone",
        ),
        (
            ["critic={share_backbone: true, tp: 3}"],
            "critic.tp",
            "whose actor.tp is 1. Leave it out",
        ),
        (
            ["critic={share_backbone: true, optimizer: {lr: 1}}"],
            "critic.optimizer",
            "set actor.optimizer",
        ),
        (
            ["critic.share_backbone=true", "placement={critic: 0, actor: rest}"],
            "placement.critic",
            "on the actor's ranks",
        ),
        (
            ["critic.share_backbone=true", "algorithm.critic_warmup_steps=1"],
            "critic_warmup_steps",
            "move the policy",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_key(
    overrides: list[str], key: str, said: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(*overrides, world=3)
    assert any(
        key in line and said in line for line in str(caught.value).splitlines()
    ), caught.value


def test_an_actor_may_be_its_own_critic() -> None:
    shares = load(
        "critic.share_backbone=true",
        "actor={tp: 2, lora: {rank: 4}, optimizer: {lr: 1.0e-4}}",
        world=2,
    )
    assert (
        shares.shares_backbone
        and not shares.uses_critic
        and smallest_world(shares) == 2
    )
    assert load().uses_critic and not load().shares_backbone


def test_other_commands_have_all_roles_everywhere() -> None:
    placed = "placement={rollout: 0, actor: rest}"
    load(placed, "data.validation=absent.jsonl", command="eval", world=3)
    with pytest.raises(
        InvalidConfig, match="placement.*the quickstart has all roles on all ranks"
    ):
        load(placed, command="quickstart", world=3)
