"""Environments: episodes of several turns, tools, and games of several agents."""

from megaverl.rollout.environments.environment import ALONE, Codec, Environment, Game, Outcome, Start
from megaverl.rollout.environments.episodes import Limits, Request, Turns, View, Views, play
from megaverl.rollout.environments.registry import (
    agents_of,
    check_options,
    environment_names,
    find_environment,
    make_game,
    register_environment,
)

__all__ = [
    "ALONE",
    "Codec",
    "Environment",
    "Game",
    "Limits",
    "Outcome",
    "Request",
    "Start",
    "Turns",
    "View",
    "Views",
    "agents_of",
    "check_options",
    "environment_names",
    "find_environment",
    "make_game",
    "play",
    "register_environment",
]
