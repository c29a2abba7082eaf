"""Rewards: built-in rules, functions of the user, and their weighted sum, which checks what every function returns."""

from megaverl.rewards.binding import RowNames
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
    "RowNames",
    "build_reward",
    "find_reward",
    "load_modules",
    "register_reward",
    "reward_names",
]
