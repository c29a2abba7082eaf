"""`placement`: which role has which ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from megaverl.config.errors import ConfigIssue, InvalidConfig
from megaverl.config.section import Positive, Section
from megaverl.distributed.placement import ROLES, Node, PlacementError, ResolvedPlacement, Wanted, parse_wanted
from megaverl.distributed.placement_resolver import resolve

if TYPE_CHECKING:
    from megaverl.config.schema import Config
    from megaverl.distributed.grid import GridSizes

Place = int | str | list[int | str] | dict[str, Any] | None
_DEVICES = "_devices"
CLAIMS = "MEGAVERL_ROLE"  # environment variable: what this node is, of `--role`


class PlacementConfig(Section):
    """`placement`: empty, all roles share all ranks.

    A place is ranks (8, [0, 1], "0-7", "0-3,8-11"), {nodes: names or numbers}, {num_ranks: N} or {num_nodes: N} of
    those that nobody names, another role's name (its ranks), `rest`, or `all`.
    """

    actor: Place = Field(default=None, description="Place of the actor. null: what the other roles leave.")
    critic: Place = Field(default=None, description="Place of the critic. null: the actor's.")
    reference: Place = Field(default=None, description="Place of the reference. null: the actor's.")
    reward: Place = Field(default=None, description="Place of the rewards. null: the rollout's.")
    rollout: Place = Field(default=None, description="Place of the engines. null: the actor's.")
    coordinator: Place = Field(default=None, description="The rank that decides. null: the actor's first.")
    actor_devices: list[int | str] | None = Field(default=None, description="Short for actor: its ranks.")
    critic_devices: list[int | str] | None = Field(default=None, description="Short for critic: its ranks.")
    reference_devices: list[int | str] | None = Field(default=None, description="Short for reference: its ranks.")
    reward_devices: list[int | str] | None = Field(default=None, description="Short for reward: its ranks.")
    rollout_devices: list[int | str] | None = Field(default=None, description="Short for rollout: its ranks.")
    actor_islands: Positive = Field(
        default=1,
        description="Worlds into which the actor's ranks are split; the coordinator joins their gradients.",
    )

    check_memory: bool = Field(
        default=True,
        description="Refuse a run that needs more memory than its GPUs have, as `megaverl plan` counts it.",
    )

    @property
    def is_given(self) -> bool:
        """Whether anything is said at all."""
        places = (name for name in type(self).model_fields if name not in ("actor_islands", "check_memory"))
        return self.actor_islands > 1 or any(getattr(self, name) is not None for name in places)

    def wanted(self) -> tuple[dict[str, Wanted], list[ConfigIssue]]:
        """Every role's entry, read; and what could not be."""
        wanted, mistakes = {}, []
        for role in ROLES:
            short = getattr(self, role + _DEVICES, None)
            value = getattr(self, role)
            key = f"placement.{role}"
            if short is not None:
                if value is not None:
                    mistakes.append(ConfigIssue(key + _DEVICES, f"is set, and so is {key}. Use one of them."))
                    continue
                key, value = key + _DEVICES, short
            if value is None:
                continue
            try:
                wanted[role] = parse_wanted(value)
            except ValueError as error:
                mistakes.append(ConfigIssue(key, str(error)))
        return wanted, mistakes


class Sizes(NamedTuple):
    """A grid's sizes, where there is no section that has them: an engine's."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None


def role_grids(config: Config, megatron_roles: Iterable[str]) -> dict[str, GridSizes | None]:
    """The grid of every role of a run, for `resolve`.

    Args:
        megatron_roles: those that the command builds (`config.grids.used_roles`).
    """
    grids: dict[str, GridSizes | None] = {role: getattr(config, role) for role in megatron_roles if role in ROLES}
    models = config.reward_model if config.scores_by_megatron else None
    return grids | {"rollout": Sizes(tp=config.rollout.tp), "reward": models, "coordinator": None}


def placement_mistakes(
    placement: PlacementConfig,
    grids: Mapping[str, GridSizes | None],
    size: int | None,
    nodes: Sequence[Node] | None = None,
) -> list[ConfigIssue]:
    """Everything that is wrong with a placement; where ranks, or nodes that it names, are not known, with its words."""
    wanted, mistakes = placement.wanted()
    names_nodes = any(place.nodes or place.num_nodes for place in wanted.values())
    if mistakes or size is None or (nodes is None and names_nodes):
        return mistakes
    try:
        resolve(wanted, size, grids, nodes, islands=placement.actor_islands)
    except PlacementError as error:
        return [ConfigIssue(_written_key(placement, problem.key), problem.message) for problem in error.problems]
    return []


def resolve_placement(
    placement: PlacementConfig,
    grids: Mapping[str, GridSizes | None],
    size: int,
    nodes: Sequence[Node] | None = None,
) -> ResolvedPlacement:
    """Who is where.

    Raises:
        InvalidConfig, PlacementError: with every mistake.
    """
    wanted, mistakes = placement.wanted()
    if mistakes:
        raise InvalidConfig(mistakes, "placement")
    return resolve(wanted, size, grids, nodes, islands=placement.actor_islands)


def _written_key(placement: PlacementConfig, key: str) -> str:
    """The key as the file has it: the short form where that was used."""
    role = key.rpartition(".")[2]
    return key + _DEVICES if getattr(placement, role + _DEVICES, None) is not None else key
