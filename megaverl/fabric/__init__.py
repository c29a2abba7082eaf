"""Worlds of roles in one job, and what moves between them: see docs/placement.md."""

from megaverl.fabric.introductions import Facts, digests, introduce
from megaverl.fabric.move import Moving, move_batch, move_tensors
from megaverl.fabric.rows import Move, Rows, plan_moves, rows_of_engines, rows_of_grid
from megaverl.fabric.worlds import Fabric, job_store, join, join_some

__all__ = [
    "Fabric",
    "Facts",
    "Move",
    "Moving",
    "Rows",
    "digests",
    "introduce",
    "job_store",
    "join",
    "join_some",
    "move_batch",
    "move_tensors",
    "plan_moves",
    "rows_of_engines",
    "rows_of_grid",
]
