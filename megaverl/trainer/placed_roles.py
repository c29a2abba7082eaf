"""Who reports the updates of roles that have ranks of their own."""

from __future__ import annotations

from megaverl.config import Config
from megaverl.coordinator import Participant
from megaverl.distributed.placement import ResolvedPlacement
from megaverl.trainer.roles import REWARD_MODEL


def seats_of(config: Config, placement: ResolvedPlacement) -> tuple[list[str], list[Participant]]:
    """The roles that are trained, and who reports their updates: the first rank of each, and of each island."""
    alone = config.coordinator.islands_every > 1  # islands that take steps of their own decide by themselves
    roles = [
        "actor",
        *(["critic"] if config.uses_critic else []),
        *([REWARD_MODEL] if config.trains_reward_model else []),
    ]
    seats = [
        Participant(island_name(role, number) if alone else role, world.ranks[0], number)
        for role in roles
        for number, world in enumerate(world for world in placement.worlds if place_of(role) in world.roles)
    ]
    return roles, seats


def place_of(role: str) -> str:
    """The role whose ranks a trained one has: a reward model that the run trains is beside the actor."""
    return "actor" if role == REWARD_MODEL else role


def island_name(role: str, number: int) -> str:
    """What an island's part of a role is called, where it is not that of all."""
    return f"{role}.{number}" if number else role


def island_file(role: str, rank: int) -> str:
    return f"island_{role}_{rank}.safetensors"
