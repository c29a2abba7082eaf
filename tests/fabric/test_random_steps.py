"""Random placements run a step, on tables of rows instead of ranks: every role gets its samples, and nothing twice."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.config.placement import Sizes
from megaverl.fabric.rows import Rows, plan_moves, rows_of_grid
from megaverl.parallel.grid import GridShape
from megaverl.placement import PlacementError, ResolvedPlacement, parse_wanted, resolve
from tests.placement.test_placement import random_job


def rows_of_role(placement: ResolvedPlacement, role: str, grid: Sizes | None, rows: Sequence[int]) -> Rows:
    """Rows of every rank of a role: dealt over its islands, and in each over its data-parallel ranks."""
    worlds = [world for world in placement.worlds if role in world.roles]
    sizes = grid or Sizes()
    found: dict[int, Sequence[int]] = {}
    for number, world in enumerate(worlds):
        part = rows[number :: len(worlds)]
        shape = GridShape.fit(world.size, tp=sizes.tp, cp=sizes.cp, pp=sizes.pp)
        found |= rows_of_grid(world.ranks, shape, [part[d :: shape.dp] for d in range(shape.dp)])
    return found


def run_step(placement: ResolvedPlacement, grids: dict[str, Sizes | None], num_rows: int) -> int:
    """rollout -> reward, reference, critic -> actor; returns the rows that moved."""
    rows = list(range(num_rows))
    held = {rank: set(own) for rank, own in rows_of_role(placement, "rollout", grids["rollout"], rows).items()}
    moved = 0
    for role in [role for role in ("reward", "reference", "critic", "actor") if role in grids]:
        wanted = rows_of_role(placement, role, grids[role], rows)
        for move in plan_moves({rank: sorted(own) for rank, own in held.items()}, wanted, placement.node_of):
            assert held[move.source].issuperset(move.rows), "a rank sends what it has"
            assert held.setdefault(move.dest, set()).isdisjoint(move.rows), "and nobody gets a row twice"
            held[move.dest].update(move.rows)
            moved += len(move.rows)
        assert all(held.get(rank, set()).issuperset(own) for rank, own in wanted.items())
        assert {row for own in wanted.values() for row in own} == set(rows)
    return moved


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32))
def test_what_is_accepted_runs_a_step(start: int) -> None:
    moved = accepted = 0
    for seed in range(start, start + 100):
        said, size, grids, nodes, islands = random_job(seed)
        try:
            placement = resolve({r: parse_wanted(v) for r, v in said.items()}, size, grids, nodes, islands=islands)
        except PlacementError:
            continue
        accepted += 1
        moved += run_step(placement, grids, num_rows=16)
    assert accepted and moved
