"""Placement of roles on ranks: the requested one (`Wanted`) and the resolved one (`ResolvedPlacement`). Pure.

See docs/placement.md. `placement_resolver` turns the former into the latter.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from megaverl.errors import ConfigError

# Roles in the order in which counts are assigned and the names of role groups are composed.
ROLES = ("actor", "critic", "reference", "reward", "rollout", "coordinator")
# Name in `--role` -> role. `train` is the actor with all roles that have no place of
# their own.
CLAIMS = {"train": "actor", **{role: role for role in ROLES}}
REST, ALL = "rest", "all"

_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")
# Limit of rank numbers; a larger one is a typo, and its range would exhaust the memory.
_MOST = 1 << 20
FORMS = (
    "ranks (8, [0, 1], '0-7', '0-3,8-11'), {nodes: NAMES or NUMBERS}, {num_ranks: N}, {num_nodes: N}, "
    "another role's name (its ranks), rest, or all"
)


@dataclass(frozen=True)
class Wanted:
    """Requested place of a role; exactly one of the fields is set.

    Attributes:
        ranks: ranks of the job.
        nodes: names or numbers of nodes, whose ranks are all taken.
        num_ranks: number of ranks, taken from those that no role names.
        num_nodes: number of whole nodes, taken likewise.
        role: role whose ranks are shared.
        word: "rest" (all ranks that no other role takes) or "all".
    """

    ranks: tuple[int, ...] | None = None
    nodes: tuple[str | int, ...] | None = None
    num_ranks: int | None = None
    num_nodes: int | None = None
    role: str | None = None
    word: str | None = None


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the numbers in "0-3,8", in the written order and with duplicates.

    Raises:
        ValueError: the text is malformed.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(
                f"found '{text}'; expected numbers and ranges such as '0-7' or '0-3,8'."
            )
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(
                f"found '{part.strip()}', a range that ends before it begins; write {last}-{first}."
            )
        if last >= _MOST:
            raise ValueError(f"found '{part.strip()}'; ranks go up to {_MOST - 1}.")
        numbers.extend(range(first, last + 1))
    return tuple(numbers)


def parse_wanted(value: Any) -> Wanted:
    """Parse one role's entry.

    Args:
        value: a YAML value; see `FORMS`.

    Raises:
        ValueError: the value has none of the accepted forms, which the message lists.
    """
    if isinstance(value, Wanted):
        return value
    if isinstance(value, Mapping):
        return _parse_mapping(value)
    if isinstance(value, str) and (word := value.strip()):
        if word in (REST, ALL):
            return Wanted(word=word)
        if word in ROLES:
            return Wanted(role=word)
        if not value[:1].isdigit():
            near = difflib.get_close_matches(
                value, [*ROLES, REST, ALL], n=1, cutoff=0.6
            )
            hint = (
                f" Did you mean `{near[0]}`?"
                if near
                else f" A node is named as {{nodes: {value}}}."
            )
            raise ValueError(f"found {value!r}; expected {FORMS}.{hint}")
    return Wanted(ranks=_numbers(value))


def parse_claims(text: str) -> tuple[str, ...]:
    """Return the roles that a node claims: "rollout", "reward,critic", "train" (the actor).

    Raises:
        ValueError: a role is unknown.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in names if part not in CLAIMS]
    if unknown or not names:
        raise ValueError(
            f"found {text!r}; expected one or more of {', '.join(CLAIMS)}, with commas between them."
        )
    return tuple(dict.fromkeys(CLAIMS[part] for part in names))


def _parse_mapping(value: Mapping[str, Any]) -> Wanted:
    if len(value) != 1 or not set(value) <= {
        "ranks",
        "nodes",
        "num_ranks",
        "num_nodes",
    }:
        raise ValueError(f"found {dict(value)!r}; expected {FORMS}.")
    ((key, inner),) = value.items()
    if key in ("num_ranks", "num_nodes"):
        if not isinstance(inner, int) or isinstance(inner, bool) or inner < 1:
            raise ValueError(
                f"found {key}: {inner!r}; expected an integer of at least 1."
            )
        return (
            Wanted(num_ranks=inner) if key == "num_ranks" else Wanted(num_nodes=inner)
        )
    if key == "ranks":
        return Wanted(ranks=_numbers(inner))
    return Wanted(nodes=_node_names(inner))


def _parts(value: Any) -> list[Any]:
    return (
        list(value)
        if isinstance(value, Sequence) and not isinstance(value, str)
        else [value]
    )


def _numbers(value: Any) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in _parts(value):
        if isinstance(part, str):
            numbers.extend(parse_ranks(part))
        elif isinstance(part, int) and not isinstance(part, bool) and 0 <= part < _MOST:
            numbers.append(part)
        else:
            raise ValueError(f"found {value!r}; expected {FORMS}.")
    if not numbers:
        raise ValueError("found no ranks at all; leave the role out, or give it some.")
    return tuple(numbers)


def _node_names(value: Any) -> tuple[str | int, ...]:
    """Return node names unchanged, and node numbers; "0-3" is four numbers."""
    names: list[str | int] = []
    for part in _parts(value):
        if (
            isinstance(part, bool)
            or not isinstance(part, int | str)
            or part == ""
            or part == -1
        ):
            raise ValueError(
                f"found nodes: {value!r}; expected names or numbers of nodes."
            )
        if isinstance(part, str) and all(
            _RANGE.fullmatch(piece) for piece in part.split(",")
        ):
            names.extend(parse_ranks(part))
        else:
            names.append(part)
    if not names:
        raise ValueError("found no nodes at all; leave the role out, or give it some.")
    return tuple(names)


@dataclass(frozen=True)
class Node:
    """Machine of the job, or one of several torchrun agents on it.

    Attributes:
        name: name in the configuration.
        size: number of its ranks. Ranks are numbered node by node.
        claims: roles that its command line names.
        memory: bytes of memory of the smallest GPU of its ranks; 0 without GPUs.
    """

    name: str
    size: int
    claims: tuple[str, ...] = ()
    memory: float = 0.0


@dataclass(frozen=True)
class RoleGroup:
    """Ranks that share one default process group, and the roles on them.

    Attributes:
        name: names of the roles, with the number of the island if there are several: "actor+reference", "actor.1".
        ranks: ranks of the job, ascending. A rank's index is its rank in this group.
        roles: names of the roles.
    """

    name: str
    ranks: tuple[int, ...]
    roles: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


# Roles that may run ahead of training -> number of roles that process a sample before
# them. The critic may compute values for a step while the actor is still in the
# previous step, but its own update waits.
HANDS = {"rollout": 0, "reward": 1, "reference": 1}


@dataclass(frozen=True)
class ResolvedPlacement:
    """Ranks of every role.

    Attributes:
        size: number of ranks of the job.
        ranks: role -> its ranks, ascending, in the order of `ROLES`. With islands the actor's ranks are those of all
            islands.
        role_groups: partition of all ranks, in the order of their first ranks.
        islands: the actor's ranks of each island. An island is a replica group of the actor, on slowly connected nodes.
        nodes: nodes of the job.
        notes: sentences about placements that follow from defaults.
    """

    size: int
    ranks: Mapping[str, tuple[int, ...]]
    role_groups: tuple[RoleGroup, ...]
    islands: tuple[tuple[int, ...], ...]
    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def _nodes_of_ranks(self) -> tuple[int, ...]:
        return tuple(
            number for number, node in enumerate(self.nodes) for _ in range(node.size)
        )

    def node_of(self, rank: int) -> int:
        """Return the number of the node of a rank. Ranks are numbered node by node."""
        return self._nodes_of_ranks[rank]

    def role_group_of(self, rank: int) -> RoleGroup:
        """Return the role group of a rank."""
        return next(
            role_group for role_group in self.role_groups if rank in role_group.ranks
        )

    def roles_of(self, rank: int) -> tuple[str, ...]:
        """Return the roles of a rank."""
        return tuple(role for role, ranks in self.ranks.items() if rank in ranks)

    def colocated(self, role: str, other: str) -> bool:
        """Return whether two roles have the same ranks."""
        return self.ranks[role] == self.ranks[other]

    def lag(self, rank: int, max_staleness: int, *, in_rounds: bool = False) -> int:
        """Return how many steps the role group of a rank may be ahead of training.

        Args:
            max_staleness: how many steps rollouts may be ahead. 0: they alternate with training.
            in_rounds: samples come from alternating rounds of generating and scoring (dynamic sampling), so engines and
                rewards begin a step together.
        """

        def own_lag(rank: int) -> int:
            roles = set(self.roles_of(rank)) - {"coordinator"}
            # The coordinator's work does not depend on rollouts.
            if not max_staleness or not roles or not roles <= {*HANDS, "critic"}:
                return 0
            if "critic" in roles:
                return 1
            hands = HANDS | ({"reward": 0} if in_rounds else {})
            # A role that handles samples later may be further ahead.
            return max(0, max_staleness - min(hands[role] for role in roles))

        makers = ("rollout", "reward")
        if not in_rounds or not {*makers} & set(self.roles_of(rank)):
            return own_lag(rank)
        # Engines and rewards of a round begin together, so the smaller of their lags
        # holds for both.
        return min(
            own_lag(maker)
            for maker in (rank, *(self.ranks[role][0] for role in makers))
        )

    @property
    def coordinator(self) -> int:
        """Rank of the coordinator."""
        return self.ranks["coordinator"][0]

    @property
    def num_with_device(self) -> int:
        """Number of leading ranks that have a compute device; all ranks on machines without GPUs.

        A coordinator after them may lack a GPU.
        """
        has_gpus = any(node.memory for node in self.nodes)
        return self.size - sum(
            node.size for node in self.nodes if has_gpus and not node.memory
        )

    @property
    def is_colocated(self) -> bool:
        """Return whether a single role group contains all ranks, as without a placement."""
        return len(self.role_groups) == 1

    def lines(self) -> list[str]:
        """Return a readable description: one line for each role, then the notes."""
        width = max(len(ranks_text(ranks)) for ranks in self.ranks.values())
        roles = [
            f"{role:<12} ranks {ranks_text(ranks):<{width}}  {self._where(ranks)}"
            for role, ranks in self.ranks.items()
        ]
        return [*roles, *self.notes]

    def _where(self, ranks: tuple[int, ...]) -> str:
        names = [
            self.nodes[number].name
            for number in dict.fromkeys(self.node_of(rank) for rank in ranks)
        ]
        shown = ", ".join(names[:4]) + (
            f" and {len(names) - 4} more" if len(names) > 4 else ""
        )
        return f"on {shown}"


def ranks_named(
    ranks: Iterable[int], singular: str = "", plural: str = "", noun: str = "rank"
) -> str:
    """Return "rank 3" or "ranks 0-3,8", followed by `singular` for a single rank or `plural` for more."""
    text = ranks_text(ranks)
    return f"{noun} {text}{singular}" if text.isdigit() else f"{noun}s {text}{plural}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return "0-3,8" for the ranks 0, 1, 2, 3, 8."""
    ordered = sorted(ranks)
    parts: list[list[int]] = []
    for rank in ordered:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][-1:] = [rank] if len(parts[-1]) > 1 else [parts[-1][-1], rank]
        else:
            parts.append([rank])
    return ",".join(
        f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts
    )


class PlacementProblem(NamedTuple):
    """Problem of a placement: its dotted configuration key, and a message that says what would be accepted."""

    key: str
    message: str


class PlacementError(ConfigError):
    """Error with all `problems` of a placement; its message lists them."""

    def __init__(self, problems: Sequence[PlacementProblem]) -> None:
        self.problems = tuple(problems)
        lines = [f"  - {problem.key}: {problem.message}" for problem in problems]
        super().__init__("\n".join(["the roles cannot be placed:", *lines]))
