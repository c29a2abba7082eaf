"""Resolves a requested placement into the ranks of every role, or reports everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations

from megaverl.distributed.grid import GridSizes, grid_problem
from megaverl.distributed.placement import (
    ROLES,
    Node,
    PlacementError,
    PlacementProblem,
    ResolvedPlacement,
    RoleGroup,
    Wanted,
    ranks_named,
)

# Role -> role whose ranks it shares by default. The actor takes the remaining ranks.
DEFAULTS = {
    "critic": "actor",
    "reference": "actor",
    "rollout": "actor",
    "reward": "rollout",
    "coordinator": "actor",
}
# Roles that some node must claim if any node claims a role.
MUST_BE_CLAIMED = ("actor", "rollout")


def resolve(
    wanted: Mapping[str, Wanted],
    size: int,
    grids: Mapping[str, GridSizes | None],
    nodes: Sequence[Node] | None = None,
    *,
    islands: int = 1,
) -> ResolvedPlacement:
    """Assign ranks to every role. The result depends only on the arguments.

    Roles without an entry get defaults: critic, reference and rollout share the actor's
    ranks, the reward shares the rollout's, the coordinator is the actor's first rank,
    and the actor takes the remaining ranks. If nodes claim roles but none claims the
    actor, the actor shares the ranks of the nodes that claim the rollout.

    Args:
        wanted: role -> its requested place. The other roles follow the defaults or the nodes' claims.
        size: number of ranks of the job.
        grids: every used role -> its grid. None: a role without a grid, such as rule-based rewards. The coordinator has
            a grid if its ranks hold the global model, and one rank otherwise.
        nodes: nodes in the order of their ranks. None: a single node with all ranks.
        islands: number of role groups that the actor's ranks are split into, with all roles that share them.

    Raises:
        PlacementError: lists every problem.

    Example:
        placement = resolve({"rollout": Wanted(num_ranks=4)}, 8, {"actor": Sizes(tp=2), "rollout": Sizes(tp=4)})
        placement.ranks["actor"]  # (4, 5, 6, 7)
    """
    return _Resolving(
        dict(wanted), size, grids, tuple(nodes or (Node("node 0", size),)), islands
    ).run()


def problems_of(
    wanted: Mapping[str, Wanted],
    size: int,
    grids: Mapping[str, GridSizes | None],
    nodes: Sequence[Node] | None = None,
    *,
    islands: int = 1,
) -> tuple[PlacementProblem, ...]:
    """Return every problem that `resolve` would raise."""
    try:
        resolve(wanted, size, grids, nodes, islands=islands)
    except PlacementError as error:
        return error.problems
    return ()


def smallest_world(
    wanted: Mapping[str, Wanted],
    grids: Mapping[str, GridSizes | None],
    *,
    islands: int = 1,
    most: int = 4096,
) -> int | None:
    """Return the smallest job size on one node that satisfies a placement, or None up to `most` ranks."""
    # A placement that names ranks needs at least these.
    least = 1 + max(
        (rank for place in wanted.values() for rank in place.ranks or ()), default=0
    )
    fitting = (
        size
        for size in range(least, most + 1)
        if not problems_of(wanted, size, grids, islands=islands)
    )
    return next(fitting, None)


@dataclass
class _Resolving:
    """State of one `resolve` call: the ranks that are assigned so far, and the problems."""

    wanted: dict[str, Wanted]
    size: int
    grids: Mapping[str, GridSizes | None]
    nodes: tuple[Node, ...]
    islands: int
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    problems: list[PlacementProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.roles = [
            role
            for role in ROLES
            if role in self.grids or role in ("actor", "coordinator")
        ]
        # Nodes have consecutive ranks, in their order.
        ends = accumulate(node.size for node in self.nodes)
        self.node_ranks = [
            range(end - node.size, end)
            for node, end in zip(self.nodes, ends, strict=True)
        ]

    def run(self) -> ResolvedPlacement:
        self._check_nodes()
        # Wrong nodes would cause errors about everything else.
        self._raise_problems()
        self._take_claims()
        self._check_roles()
        for role in self.roles:
            if (
                role in self.wanted
                and (ranks := self._named_ranks(role, self.wanted[role])) is not None
            ):
                self.ranks[role] = ranks
        # In this order: named ranks, whole nodes, numbers of ranks, the rest, and
        # shared ranks.
        self._settle_counts(self.node_ranks, "num_nodes", "whole nodes")
        self._settle_counts(
            [range(rank, rank + 1) for rank in range(self.size)], "num_ranks", "ranks"
        )
        self._settle_rest()
        self._settle_shared()
        # Further checks need all ranks.
        self._raise_problems()
        self._check_coordinator()
        self._check_overlaps()
        self._check_islands()
        self._check_grids()
        self._check_unused()
        self._check_devices()
        self._raise_problems()
        return ResolvedPlacement(
            self.size,
            {role: self.ranks[role] for role in self.roles},
            tuple(self._role_groups()),
            self._islands_of(self.ranks["actor"]),
            self.nodes,
            tuple(self.notes),
        )

    def _refuse(self, role: str, message: str) -> None:
        self.problems.append(
            PlacementProblem(f"placement.{role}" if role else "placement", message)
        )

    def _raise_problems(self) -> None:
        if self.problems:
            raise PlacementError(self.problems)

    # --- nodes and roles ---------------------------------------------------------------------------------------------

    def _check_nodes(self) -> None:
        total = sum(node.size for node in self.nodes)
        if self.size < 1 or total != self.size:
            self._refuse(
                "",
                f"the nodes have {total} ranks together, and the job has {self.size}.",
            )
        names = [node.name for node in self.nodes]
        for name in sorted({name for name in names if names.count(name) > 1}):
            numbers = [
                str(number) for number, repeated in enumerate(names) if repeated == name
            ]
            self._refuse(
                "",
                f"nodes {', '.join(numbers)} are all called '{name}'; names must differ.",
            )

    def _take_claims(self) -> None:
        """Turn the nodes' claims into entries of the placement. A different entry of the configuration is a problem."""
        self.claimed: dict[str, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for role in node.claims:
                self.claimed.setdefault(role, []).append(number)
        for role, numbers in self.claimed.items():
            claimed_ranks = tuple(
                rank for number in numbers for rank in self.node_ranks[number]
            )
            claiming_nodes = self._nodes_named(numbers)
            has_model = self.grids.get("coordinator") is not None
            if role == "coordinator" and len(numbers) > 1 and not has_model:
                self._refuse(
                    role,
                    f"{claiming_nodes} all claim it (--role coordinator); one rank coordinates: start one of them.",
                )
                self.wanted.pop(role, None)
            elif (
                role in self.wanted
                and (wanted_ranks := self._named_quietly(role)) != claimed_ranks
            ):
                where = ranks_named(wanted_ranks) if wanted_ranks else "another place"
                claim = "claims" if len(numbers) == 1 else "claim"
                self._refuse(
                    role,
                    f"{claiming_nodes} ({ranks_named(claimed_ranks)}) {claim} it with --role, and the configuration "
                    f"gives it {where}. "
                    "Leave one of the two out.",
                )
            else:
                self.wanted[role] = Wanted(ranks=claimed_ranks)

    def _nodes_named(self, numbers: Sequence[int]) -> str:
        return (
            "node"
            + ("s " if len(numbers) > 1 else " ")
            + ", ".join(f"'{self.nodes[n].name}'" for n in numbers)
        )

    def _check_roles(self) -> None:
        for role in [role for role in self.wanted if role not in self.roles]:
            problem = "is placed" if role in ROLES else "is no role"
            self._refuse(
                role,
                f"{problem}, and the run has no such role; it has {', '.join(self.roles)}. Leave it out.",
            )
            del self.wanted[role]
        if "rollout" in self.claimed and "actor" not in self.wanted:
            self.wanted["actor"] = Wanted(role="rollout")
            self.notes.append(
                "actor shares the ranks of rollout: no node took it (--role train)"
            )
        for role in MUST_BE_CLAIMED if self.claimed else ():
            if role in self.roles and role not in self.wanted:
                name = "train" if role == "actor" else role
                self._refuse(
                    role,
                    f"no node took it. Start one with --role {name}, or place it here.",
                )
        if self.islands < 1:
            self._refuse("actor_islands", f"found {self.islands}; expected at least 1.")

    # --- assigning ranks ---------------------------------------------------------------------------------------------

    def _named_ranks(self, role: str, place: Wanted) -> tuple[int, ...] | None:
        """Return the ranks that an entry names, or None if it is wrong or names none."""
        before = len(self.problems)
        ranks = (
            list(range(self.size)) if place.word == "all" else list(place.ranks or ())
        )
        for name in place.nodes or ():
            named = [
                n
                for n, node in enumerate(self.nodes)
                if name == (n if isinstance(name, int) else node.name)
            ]
            if named:
                ranks += self.node_ranks[named[0]]
            else:
                known = ", ".join(
                    f"{n}: {node.name}" for n, node in enumerate(self.nodes[:16])
                )
                self._refuse(role, f"there is no node {name!r}; there are {known}.")
        if len(set(ranks)) < len(ranks):
            twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
            self._refuse(
                role, f"{ranks_named(twice, ' stands', ' stand')} there more than once."
            )
        if beyond := [rank for rank in ranks if rank >= self.size]:
            missing = ranks_named(beyond, " is not there", " are not there")
            self._refuse(
                role, f"{missing}: the job has {ranks_named(range(self.size))}."
            )
        return (
            None if len(self.problems) > before or not ranks else tuple(sorted(ranks))
        )

    def _named_quietly(self, role: str) -> tuple[int, ...] | None:
        before = len(self.problems)
        ranks = self._named_ranks(role, self.wanted[role])
        # Only the comparison with the nodes' claims wants these ranks. Problems are
        # reported later.
        del self.problems[before:]
        return ranks

    def _taken(self) -> set[int]:
        return {rank for ranks in self.ranks.values() for rank in ranks}

    def _settle_counts(self, units: Sequence[range], kind: str, noun: str) -> None:
        """Assign the first free ranks, or whole nodes, to roles that ask for a number of them."""
        for role in self.roles:
            count = getattr(self.wanted.get(role), kind, None)
            if count is None:
                continue
            taken = self._taken()
            free = [ranks for ranks in units if taken.isdisjoint(ranks)]
            if len(free) < count:
                self._refuse(
                    role,
                    f"asks for {count} {noun}, and {len(free)} are left of the job's {self.size} ranks.",
                )
            else:
                self.ranks[role] = tuple(
                    rank for ranks in free[:count] for rank in ranks
                )

    def _settle_rest(self) -> None:
        rest = [
            role
            for role in self.roles
            if role in self.wanted and self.wanted[role].word == "rest"
        ]
        # Without claims, the actor takes what is left.
        if "actor" not in self.wanted and not self.claimed:
            rest.insert(0, "actor")
        if len(rest) > 1:
            remark = (
                " (the actor does where it is not placed)"
                if "actor" not in self.wanted
                else ""
            )
            self._refuse(
                rest[1],
                f"takes the rest, and so does {rest[0]}{remark}. Give one of them ranks of its own.",
            )
        elif rest and self.problems:  # the remaining ranks are unknown
            self.ranks[rest[0]] = ()
        elif rest:
            self.ranks[rest[0]] = tuple(sorted(set(range(self.size)) - self._taken()))
            if not self.ranks[rest[0]]:
                self._refuse(
                    rest[0], "nothing is left for it: the other roles take all ranks."
                )

    def _settle_shared(self) -> None:
        """Assign ranks to roles that share another role's ranks, by their entry or by default."""
        for role in self.roles:
            # A role may share the ranks of one that shares again.
            chain = [role]
            while chain[-1] not in self.ranks:
                place = self.wanted.get(chain[-1])
                default_role = DEFAULTS.get(chain[-1]) if place is None else place.role
                if default_role is None:  # already reported above
                    break
                if default_role in chain:
                    self._refuse(
                        role,
                        f"{' -> '.join([*chain, default_role])}: these share each other's ranks; place one.",
                    )
                    break
                if default_role not in self.roles:
                    self._refuse(
                        role,
                        f"shares the ranks of {default_role}, and the run has no such role.",
                    )
                    break
                chain.append(default_role)
            # The chain ends at a role with ranks, which all of it get.
            else:
                shared = self.ranks[chain[-1]]
                self.ranks |= {
                    name: shared[:1] if name == "coordinator" else shared
                    for name in chain[:-1]
                }

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check_coordinator(self) -> None:
        ranks, grid = self.ranks["coordinator"], self.grids.get("coordinator")
        if grid is not None and len(ranks) != grid.tp * grid.pp:
            self._refuse(
                "coordinator",
                f"has the {ranks_named(ranks)}; with coordinator.tp={grid.tp} and coordinator.pp={grid.pp} its global "
                f"model is sharded over {grid.tp * grid.pp} ranks. Change one of them.",
            )
        if grid is None and len(ranks) != 1:
            self._refuse(
                "coordinator",
                f"has the {ranks_named(ranks)}; it is one rank, for example {ranks[0]}.",
            )

    def _sharing(self) -> dict[tuple[int, ...], list[str]]:
        """Return ranks -> the roles on them, without the coordinator, which may be on any rank."""
        sharing: dict[tuple[int, ...], list[str]] = {}
        for role in self.roles:
            if role != "coordinator":
                sharing.setdefault(self.ranks[role], []).append(role)
        return sharing

    def _check_overlaps(self) -> None:
        """Check that two roles share all of their ranks or none, because a process has one default process group."""
        for (b, others), (a, roles) in combinations(self._sharing().items(), 2):
            if both := set(a) & set(b):
                self._refuse(
                    next((role for role in roles if role in self.wanted), roles[0]),
                    f"{ranks_named(a)} of {', '.join(roles)} and {ranks_named(b)} of {', '.join(others)} have "
                    f"{ranks_named(both)} in common, but not all: two roles share all of their ranks or none.",
                )

    def _check_islands(self) -> None:
        count = len(self.ranks["actor"])
        shared = set(self.ranks["coordinator"]) & set(self.ranks["actor"])
        if self.islands > 1 and count % self.islands:
            fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            self._refuse(
                "actor_islands",
                f"found {self.islands}; the actor's {count} ranks can be split into {fitting}.",
            )
        if self.islands > 1 and shared:
            self._refuse(
                "coordinator",
                f"is the actor's rank {min(shared)}; with actor_islands={self.islands} it joins their "
                "gradients while they wait, and needs a rank that is none of the actor's.",
            )

    def _islands_of(self, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        island_size = len(ranks) // self.islands
        return tuple(
            ranks[i * island_size : (i + 1) * island_size] for i in range(self.islands)
        )

    def _check_grids(self) -> None:
        for role in self.roles:
            grid = self.grids.get(role)
            if grid is None or role == "coordinator":
                continue
            count, island = len(self.ranks[role]), ""
            if self.islands > 1 and self.ranks[role] == self.ranks["actor"]:
                if count % self.islands:
                    continue  # already reported by `_check_islands`
                count, island = count // self.islands, " of an island"
            if problem := grid_problem(grid, count, f"{count} ranks{island}"):
                self._refuse(role, problem)

    def _check_unused(self) -> None:
        unused = set(range(self.size)) - self._taken()
        silent = [
            n
            for n, ranks in enumerate(self.node_ranks)
            if unused.issuperset(ranks) and len(ranks)
        ]
        if self.claimed and silent:
            silent_nodes = self._nodes_named(silent)
            self._refuse(
                "",
                # Ranks of silent nodes are reported with their nodes.
                f"{silent_nodes} took no role. Start it with --role, or start the job without it.",
            )
            unused -= {rank for number in silent for rank in self.node_ranks[number]}
        if unused:
            self._refuse(
                "",
                f"{ranks_named(unused, ' has', ' have')} no role. Give them to one (`rest` takes what is left), or "
                f"start {self.size - len(unused)} ranks.",
            )

    def _check_devices(self) -> None:
        """Check that a node without a GPU has only the coordinator, and is the last node.

        Ranks with a device are then numbered without gaps.
        """
        for number, node in enumerate(self.nodes):
            if node.memory or not any(described.memory for described in self.nodes):
                continue
            roles = [
                role
                for role in self.roles
                if set(self.ranks[role]) & set(self.node_ranks[number])
            ]
            has_model = self.grids.get("coordinator") is not None
            if roles != ["coordinator"] or has_model or number + 1 < len(self.nodes):
                self._refuse(
                    "",
                    f"{self._nodes_named([number])} has no GPU that can be used, others have, and {', '.join(roles)} "
                    "is placed there. Only a coordinator needs none, on the last node. Look at its driver "
                    "(`megaverl doctor`), or place it otherwise.",
                )

    def _role_groups(self) -> Iterator[RoleGroup]:
        sharing = self._sharing()
        # The coordinator is on a rank of some role, or alone.
        if not any(self.ranks["coordinator"][0] in ranks for ranks in sharing):
            sharing[self.ranks["coordinator"]] = ["coordinator"]
        for ranks, roles in sorted(sharing.items()):
            name = "+".join(roles)
            if self.islands > 1 and "actor" in roles:
                for number, island in enumerate(self._islands_of(ranks)):
                    yield RoleGroup(f"{name}.{number}", island, tuple(roles))
            else:
                yield RoleGroup(name, ranks, tuple(roles))
