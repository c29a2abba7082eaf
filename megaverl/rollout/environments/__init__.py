"""Environments: episodes with several turns, tools, and games of several agents.

Episodes advance turn by turn: all running episodes generate their next turns in one
request to the engine. An agent may hold several conversations in one episode, and write
in several of them at the same time.
"""

from megaverl.rollout.environments.environment import (
    ALONE,
    Codec,
    Environment,
    Game,
    Limits,
    Outcome,
    Start,
    agents_of,
    check_options,
    environment_names,
    find_environment,
    make_game,
    register_environment,
)
from megaverl.rollout.environments.episodes import (
    Begun,
    Generate,
    Request,
    Turns,
    View,
    Views,
    digest,
    play,
)
from megaverl.rollout.environments.faults import (
    FAILED,
    Attempt,
    FailedCall,
    FaultLimits,
    Faults,
)

__all__ = [
    "ALONE",
    "FAILED",
    "Attempt",
    "Begun",
    "Codec",
    "Environment",
    "FailedCall",
    "FaultLimits",
    "Faults",
    "Game",
    "Generate",
    "Limits",
    "Outcome",
    "Request",
    "Start",
    "Turns",
    "View",
    "Views",
    "agents_of",
    "check_options",
    "digest",
    "environment_names",
    "find_environment",
    "make_game",
    "play",
    "register_environment",
]
