"""Which role has which ranks: pure arithmetic on a description of the job. See docs/placement.md."""

from megaverl.distributed.placement.problems import PlacementError, PlacementProblem
from megaverl.distributed.placement.resolve import problems_of, resolve, smallest_world
from megaverl.distributed.placement.resolved import Node, ResolvedPlacement, World, ranks_named, ranks_text
from megaverl.distributed.placement.wanted import ROLES, Wanted, parse_claims, parse_ranks, parse_wanted

__all__ = [
    "ROLES",
    "Node",
    "PlacementError",
    "PlacementProblem",
    "ResolvedPlacement",
    "Wanted",
    "World",
    "parse_claims",
    "parse_ranks",
    "parse_wanted",
    "problems_of",
    "ranks_named",
    "ranks_text",
    "resolve",
    "smallest_world",
]
