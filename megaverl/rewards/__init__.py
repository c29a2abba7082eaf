"""Rewards: built-in rules, functions of the user's own, and weighted sums of them."""

from megaverl.rewards.registry import RewardFunction, find_reward, load_modules, register_reward, reward_names
from megaverl.rewards.reward import Component, Reward, build_reward
from megaverl.rewards.sample import RewardOutput, RewardSample

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
