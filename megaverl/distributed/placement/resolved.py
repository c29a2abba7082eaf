"""A placement that holds: every role's ranks, and the worlds that they form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """A machine of the job, or one torchrun agent on it.

    Attributes:
        name: as in the configuration.
        size: ranks on it; ranks are counted node by node.
        claims: roles that its command line gave it.
        memory: bytes of the smallest GPU of its ranks; 0: it has none.
    """

    name: str
    size: int
    claims: tuple[str, ...] = ()
    memory: float = 0.0


@dataclass(frozen=True)
class World:
    """Ranks that share one default process group, and the roles on them.

    Attributes:
        name: of the roles, with the number of the island where there are several: "actor+reference", "actor.1".
        ranks: of the whole job, ascending; the place in it is the rank in this world.
    """

    name: str
    ranks: tuple[int, ...]
    roles: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class ResolvedPlacement:
    """Who is where.

    Attributes:
        size: ranks of the job.
        ranks: role -> its ranks, ascending; roles in the order of `ROLES`. With islands the actor's ranks are
            those of all islands.
        worlds: of disjoint ranks that together are all ranks, in the order of their first ranks.
        islands: the actor's ranks, island by island.
        nodes: of the job.
        notes: sentences on what nobody asked for in so many words.
    """

    size: int
    ranks: Mapping[str, tuple[int, ...]]
    worlds: tuple[World, ...]
    islands: tuple[tuple[int, ...], ...]
    nodes: tuple[Node, ...]
    _node_of: tuple[int, ...] = field(default=(), repr=False, compare=False)
    notes: tuple[str, ...] = ()

    def node_of(self, rank: int) -> int:
        """The number of the node that a rank is on."""
        return self._node_of[rank]

    def world_of(self, rank: int) -> World:
        """The world that a rank belongs to."""
        return next(world for world in self.worlds if rank in world.ranks)

    def roles_of(self, rank: int) -> tuple[str, ...]:
        """What a rank is."""
        return tuple(role for role, ranks in self.ranks.items() if rank in ranks)

    def colocated(self, role: str, other: str) -> bool:
        """Whether two roles have the same ranks."""
        return self.ranks[role] == self.ranks[other]

    @property
    def coordinator(self) -> int:
        """The rank that decides."""
        return self.ranks["coordinator"][0]

    @property
    def num_with_device(self) -> int:
        """Ranks 0 to this one have what the roles compute on; a coordinator behind them may do without a GPU."""
        has_gpus = any(node.memory for node in self.nodes)
        return self.size - sum(node.size for node in self.nodes if has_gpus and not node.memory)

    @property
    def is_colocated(self) -> bool:
        """Whether one world holds everything, as without a placement."""
        return len(self.worlds) == 1

    def lines(self) -> list[str]:
        """For people: one line for each role, and the notes."""
        width = max(len(ranks_text(ranks)) for ranks in self.ranks.values())
        roles = [
            f"{role:<12} ranks {ranks_text(ranks):<{width}}  {self._where(ranks)}" for role, ranks in self.ranks.items()
        ]
        return [*roles, *self.notes]

    def _where(self, ranks: tuple[int, ...]) -> str:
        names = [self.nodes[number].name for number in dict.fromkeys(self.node_of(rank) for rank in ranks)]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f"on {shown}"


def ranks_named(ranks: Iterable[int], one: str = "", several: str = "") -> str:
    """ "rank 3", "ranks 0-3,8"; with what follows of one, or of several."""
    text = ranks_text(ranks)
    return f"rank {text}{one}" if text.isdigit() else f"ranks {text}{several}"


def ranks_text(ranks: Iterable[int]) -> str:
    """ "0-3,8" for 0, 1, 2, 3, 8."""
    ordered = sorted(ranks)
    parts: list[list[int]] = []
    for rank in ordered:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][-1:] = [rank] if len(parts[-1]) > 1 else [parts[-1][-1], rank]
        else:
            parts.append([rank])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
