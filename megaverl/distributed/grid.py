"""Shape of a parallel grid, coordinates of ranks, and checks that a grid fits a number of ranks. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

from megaverl.errors import GridError

# Fastest-varying dimension first: tensor-parallel ranks are adjacent, pipeline stages
# farthest apart.
DIMS = ("tp", "cp", "dp", "pp")
# Dimensions of expert layers over the same ranks: etp x ep x edp equals tp x cp x dp.
EXPERT_DIMS = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True)
class Coords:
    """A rank's index in every dimension of a grid."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class GridShape:
    """Sizes of the dimensions: tensor, context, data, pipeline, and expert and expert-tensor over the same ranks.

    `rank = tp + TP * (cp + CP * (dp + DP * pp))`, megatron-core's order "tp-cp-dp-pp".

    Attributes:
        vpp: virtual pipeline stages per pipeline rank. None: one.
        etp: tensor parallelism inside an expert. None: the same as `tp`.

    Raises:
        GridError: a size is below 1, or the expert sizes do not divide the ranks of a stage.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int | None = None
    etp: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "ep", "pp", "dp", "vpp", "etp"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise GridError(f"{name}={size}: a parallel size is at least 1.")
        if problem := grid_problem(self, self.world_size, f"{self.world_size} ranks"):
            raise GridError(problem)

    @classmethod
    def fit(
        cls,
        world_size: int,
        *,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        pp: int = 1,
        vpp: int | None = None,
        etp: int | None = None,
        role: str = "grid",
    ) -> GridShape:
        """Return the grid of these sizes whose data-parallel size fills `world_size`.

        Raises:
            GridError: the sizes do not divide the world size; the message lists sizes that would fit.
        """
        # The data-parallel size fills what the other sizes leave, so it is not checked.
        sizes, ranks = Sizes(tp, cp, pp, ep, etp), f"{world_size} ranks"
        if problem := grid_problem(
            sizes, world_size, ranks, "the world of", "start a multiple of {} processes"
        ):
            raise GridError(f"{role}: {problem}")
        return cls(
            tp=tp,
            cp=cp,
            ep=ep,
            pp=pp,
            dp=world_size // (tp * cp * pp),
            vpp=vpp,
            etp=etp,
        )

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        return self.tp * self.cp * self.dp // (self.expert_tp * self.ep)

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def sizes(self, dims: tuple[str, ...] = DIMS) -> tuple[int, ...]:
        """Return the sizes in the order of `dims` (`DIMS` or `EXPERT_DIMS`)."""
        derived = {"etp": self.expert_tp, "edp": self.expert_dp}
        # Derived sizes of experts are properties, the others fields.
        return tuple(derived.get(dim) or getattr(self, dim) for dim in dims)

    def coords(self, rank: int) -> Coords:
        """Return the coordinates of `rank` (0 to world_size - 1).

        Raises:
            GridError: the rank is outside the grid.
        """
        if not 0 <= rank < self.world_size:
            raise GridError(
                f"rank {rank} is outside the grid of {self.world_size} ranks."
            )
        dense = dict(zip(DIMS, _unravel(rank, self.sizes(DIMS)), strict=True))
        expert = dict(
            zip(EXPERT_DIMS, _unravel(rank, self.sizes(EXPERT_DIMS)), strict=True)
        )
        # Pipeline stages are the same for dense and expert layers.
        expert.pop("pp")
        return Coords(**dense, **expert)

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the rank at these coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def groups_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return for each dimension the ranks that differ from `rank` only in it.

        Dimensions of size 1 are left out, and so are expert dimensions unless ep > 1.
        """
        every = [self.coords(number) for number in range(self.world_size)]
        groups: dict[str, tuple[int, ...]] = {}
        for dims in (DIMS, EXPERT_DIMS) if self.ep > 1 else (DIMS,):
            # Ranks of a group differ in one coordinate only.
            for dim in dims:
                other_dims = [name for name in dims if name != dim]
                place = [getattr(every[rank], name) for name in other_dims]
                alike = [
                    n
                    for n, coords in enumerate(every)
                    if [getattr(coords, name) for name in other_dims] == place
                ]
                if len(alike) > 1:
                    groups.setdefault(dim, tuple(alike))
        return groups

    def __str__(self) -> str:
        extra = "".join(
            f" {name}{size}"
            for name, size in (("cp", self.cp), ("ep", self.ep), ("vpp", self.vpp or 1))
            if size > 1
        )
        return f"tp{self.tp} pp{self.pp} dp{self.dp}{extra}"


class GridSizes(Protocol):
    """Sizes of a role's grid without the data-parallel size, which fills the remaining ranks.

    `GridConfig` and `GridShape` implement it.
    """

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


class Sizes(NamedTuple):
    """Sizes of a grid without a configuration section, such as an engine's."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None


def grid_problem(
    grid: GridSizes,
    num_ranks: int,
    ranks: str,
    whose: str = "its",
    fix: str = "give it a multiple of {} ranks",
) -> str:
    """Return the reason why a grid does not fit a number of ranks, or "".

    `tp * cp * pp` must divide the ranks, and `etp * ep` the ranks of a pipeline stage.

    Args:
        ranks: name of the ranks in the message, such as "8 ranks".
        whose: words before that name.
        fix: advice at the end of the message; `{}` is the product of the sizes.
    """
    size = grid.tp * grid.cp * grid.pp
    if size < 1 or num_ranks % size:
        return (
            f"tp={grid.tp} x cp={grid.cp} x pp={grid.pp} = {size} does not divide {whose} {ranks}. Products that fit: "
            f"{_divisors(num_ranks)}; or {fix.format(max(size, 1))}."
        )
    # Experts are spread over all ranks of a pipeline stage.
    stage, expert = num_ranks // grid.pp, grid.etp or grid.tp
    if stage % (expert * grid.ep):
        fitting = (
            _divisors(stage // expert)
            if stage % expert == 0
            else f"none with etp={expert}"
        )
        return (
            f"etp={expert} x ep={grid.ep} does not divide the {stage} ranks of a pipeline stage ({ranks} / "
            f"pp={grid.pp}). Sizes of ep that fit: {fitting}."
        )
    return ""


def _unravel(rank: int, sizes: tuple[int, ...]) -> list[int]:
    return [rank // prod(sizes[:i]) % size for i, size in enumerate(sizes)]


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
