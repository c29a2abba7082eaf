"""Random placements run a step on tables of rows instead of ranks: every role gets its samples, and nothing twice."""

from __future__ import annotations

from collections.abc import Sequence

from megaverl.dataflow import DataFlow, Operator
from megaverl.dataflow.plan import CompiledFlow
from megaverl.distributed.grid import GridShape, Sizes
from megaverl.distributed.placement import (
    PlacementError,
    ResolvedPlacement,
    parse_wanted,
)
from megaverl.distributed.placement_resolver import resolve
from megaverl.sharding.rows import Rows, moves_of, plan_rows
from tests.distributed.test_placement import random_job
from tests.sharding.test_rows import rows_of_grid

NUM_ROWS = 8
TRAINED_BY = {"reward": "scores", "reference": "ref_log_probs", "critic": "values"}


def rows_of_role(
    placement: ResolvedPlacement, role: str, grid: Sizes | None, rows: Sequence[int]
) -> Rows:
    """Rows of every rank of a role: dealt over its islands, and in each over its data-parallel ranks."""
    role_groups = [
        role_group for role_group in placement.role_groups if role in role_group.roles
    ]
    sizes = grid or Sizes()
    found: dict[int, Sequence[int]] = {}
    for number, role_group in enumerate(role_groups):
        part = rows[number :: len(role_groups)]
        shape = GridShape.fit(role_group.size, tp=sizes.tp, cp=sizes.cp, pp=sizes.pp)
        found |= rows_of_grid(
            role_group.ranks, shape, [part[d :: shape.dp] for d in range(shape.dp)]
        )
    return found


def plan_of(placement: ResolvedPlacement, roles: Sequence[str]) -> CompiledFlow:
    """A step's operators on their ranks: rollout -> reward, reference, critic -> actor and critic -> rollout."""
    scorers = [role for role in TRAINED_BY if role in roles]
    flow = DataFlow([Operator("rollouts", list, (), role="rollout")])
    for role in scorers:
        flow.add_operator(Operator(TRAINED_BY[role], list, ("rollouts",), role=role))
    flow.add_operator(
        Operator(
            "experience",
            list,
            tuple(TRAINED_BY[role] for role in scorers),
            role="actor",
        )
    )
    if "critic" in roles:
        flow.add_operator(
            Operator("critic_update", list, ("experience",), (), role="critic")
        )
    flow.add_operator(Operator("updated", list, ("experience",), role="actor"))
    flow.add_operator(
        Operator("reshard", list, ("updated",), (), role=("actor", "rollout"))
    )
    return flow.compile(places=placement.ranks).plan


def run_step(placement: ResolvedPlacement, grids: dict[str, Sizes | None]) -> int:
    """Every rank runs its operators on what it has by then, one after the other; returns the rows that moved."""
    plan = plan_of(placement, list(grids))
    has: dict[int, set[str]] = {rank: set() for rank in range(placement.size)}
    for operator in plan.operators:
        for rank in plan.ranks[operator.name] or ():
            brought = {
                e.value
                for e in plan.transfers
                if rank in e.dest and operator.name in e.takers and has[e.source[0]]
            }
            assert {*operator.takes} <= has[rank] | brought, (
                f"rank {rank} lacks an input of {operator.name}"
            )
            has[rank] |= {*operator.takes, *operator.gives}
    received = [
        (edge.value, edge.maker, rank) for edge in plan.transfers for rank in edge.dest
    ]
    assert len(received) == len(set(received)), "nothing goes to a rank twice"
    return move_rows(placement, grids)


def move_rows(placement: ResolvedPlacement, grids: dict[str, Sizes | None]) -> int:
    """Each role's samples, by its data-parallel ranks; returns how many moved."""
    rows = list(range(NUM_ROWS))
    held = {
        rank: set(own)
        for rank, own in rows_of_role(
            placement, "rollout", grids["rollout"], rows
        ).items()
    }
    moved = 0
    for role in [
        role for role in ("reward", "reference", "critic", "actor") if role in grids
    ]:
        wanted = rows_of_role(placement, role, grids[role], rows)
        plans = plan_rows(
            {rank: sorted(own) for rank, own in held.items()}, wanted, placement.node_of
        )
        for move in [
            move
            for rank in wanted
            for move in moves_of(plans[rank])
            if move.dest == rank
        ]:
            assert held[move.source].issuperset(move.rows), "a rank sends what it has"
            assert held.setdefault(move.dest, set()).isdisjoint(move.rows), (
                "and nobody gets a row twice"
            )
            held[move.dest].update(move.rows)
            moved += len(move.rows)
        assert all(
            held.get(rank, set()).issuperset(own) for rank, own in wanted.items()
        )
        assert {row for own in wanted.values() for row in own} == set(rows)
    return moved


def test_ten_thousand_placements_run_a_step_or_are_refused_with_a_reason() -> None:
    moved = accepted = refused = 0
    for seed in range(10_000):
        said, size, grids, nodes, islands = random_job(seed)
        try:
            placement = resolve(
                {r: parse_wanted(v) for r, v in said.items()},
                size,
                grids,
                nodes,
                islands=islands,
            )
        except PlacementError as error:
            assert error.problems and all(
                problem.key and problem.message for problem in error.problems
            )
            refused += 1
            continue
        accepted += 1
        moved += run_step(placement, grids)
    assert min(accepted, refused) > 1_000 and moved > 10_000
