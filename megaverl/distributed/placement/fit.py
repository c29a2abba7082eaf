"""Whether a grid fills a number of ranks, and which would."""

from __future__ import annotations

from typing import Protocol


class GridSizes(Protocol):
    """Sizes of a role's grid; the data-parallel size is what is left. `GridConfig` and `GridShape` are such."""

    @property
    def tp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def etp(self) -> int | None: ...


def grid_problem(grid: GridSizes, num_ranks: int, ranks: str) -> str:
    """What is wrong with a grid on so many ranks; empty where it fits.

    `tp * cp * pp` divides the ranks, and `etp * ep` the ranks of a pipeline stage, as `GridShape` wants it.
    """
    size = grid.tp * grid.cp * grid.pp
    if size < 1 or num_ranks % size:
        return (
            f"tp={grid.tp} x cp={grid.cp} x pp={grid.pp} = {size} does not divide its {ranks}. Products that fit: "
            f"{_divisors(num_ranks)}; or give it a multiple of {max(size, 1)} ranks."
        )
    stage, expert = num_ranks // grid.pp, grid.etp or grid.tp
    if stage % (expert * grid.ep):
        fitting = _divisors(stage // expert) if stage % expert == 0 else f"none with etp={expert}"
        return (
            f"etp={expert} x ep={grid.ep} does not divide the {stage} ranks of a pipeline stage ({ranks} / "
            f"pp={grid.pp}). Sizes of ep that fit: {fitting}."
        )
    return ""


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
