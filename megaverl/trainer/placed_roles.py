"""What a rank has of a run's roles where they have ranks of their own, and who reports their updates."""

from __future__ import annotations

from typing import Any

from megaverl.config import Config
from megaverl.coordinator import Participant
from megaverl.distributed.placement import ResolvedPlacement
from megaverl.distributed.worlds import Fabric
from megaverl.trainer.build import Builder
from megaverl.trainer.scored_elsewhere import reward_of
from megaverl.trainer.step import Roles
from megaverl.workers.apart import Elsewhere, FilledByOthers

REWARD_MODEL = "reward_model"  # in a checkpoint, and to the coordinator


def roles_here(builder: Builder, fabric: Fabric, *, generates: bool) -> Roles:
    """This rank's part of every role; in the place of what is on other ranks, something that says so when it is used.

    Args:
        generates: False: stored rollouts take the engines' place.
    """
    config, has, placement = builder.config, fabric.has, fabric.placement

    def here(role: str, make: Any) -> Any:
        return make() if has(role) else Elsewhere(role)

    player = builder.player()
    heads = len(player.agents) if player else 1
    actor = here("actor", lambda: builder.actor(heads))
    model = actor.model if has("actor") else None
    implicit, learned = None, None
    if has("actor"):  # what the run trains besides is beside the actor
        implicit = builder.implicit_reward() if config.estimator_reads("implicit_rewards") else None
        learned = builder.learned_reward() if config.mixes_reward_model else None
    rollout: Any = Elsewhere("rollout")
    if generates and placement.colocated("actor", "rollout"):
        rollout = here("rollout", lambda: builder.rollout(model))
    elif generates and (fabric.rank in placement.islands[0] or has("rollout")):
        rollout = builder.rollout_apart(model)
    elif has("actor"):
        rollout = FilledByOthers("rollout")
    reference = here("reference", lambda: builder.reference(model)) if config.uses_reference else None
    if has("actor"):
        builder.teach(actor, reference)
    return Roles(
        actor=actor,
        critic=here("critic", lambda: builder.critic(heads)) if config.uses_critic else None,
        reference=reference,
        reward=reward_of(builder, fabric, learned),
        implicit=implicit,
        learned=learned,
        kl=builder.kl_controller(),
        player=player,
        rollout=rollout if generates else None,
    )


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
