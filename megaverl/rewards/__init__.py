"""Rewards: built-in rules, functions of the user's own, and weighted sums of them."""

from megaverl.rewards.registry import (
    RewardFunction,
    RewardOutput,
    RewardSample,
    find_reward,
    load_modules,
    register_reward,
    reward_names,
)
from megaverl.rewards.reward import Component, Reward, build_reward

__all__ = [
    "Component",
    "Reward",
    "RewardFunction",
    "RewardOutput",
    "RewardSample",
    "build_reward",
    "find_reward",
    "load_modules",
    "register_reward",
    "reward_names",
]
