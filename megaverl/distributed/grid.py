"""The shape of a parallel grid and the place of a rank in it: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from megaverl.errors import GridError

# The fastest-varying dimension first: tensor-parallel ranks are neighbours, pipeline stages farthest apart.
DIMS = ("tp", "cp", "dp", "pp")
# Experts use the same ranks: expert-tensor, expert and expert-data ranks fill what tp, cp and dp fill.
EXPERT_DIMS = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True)
class Coords:
    """A rank's index along every dimension of a grid."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class GridShape:
    """Sizes of the dimensions: tensor, context, data, pipeline; expert and expert-tensor over the same ranks.

    `rank = tp + TP * (cp + CP * (dp + DP * pp))`, megatron-core's order "tp-cp-dp-pp".

    Attributes:
        vpp: virtual pipeline stages per pipeline rank (None: one).
        etp: tensor parallelism inside an expert (None: the same as `tp`).

    Raises:
        GridError: a size below 1, or experts that do not divide the ranks of a stage.
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
        stage = self.tp * self.cp * self.dp
        if stage % (self.expert_tp * self.ep):
            raise GridError(
                f"etp={self.expert_tp} x ep={self.ep} does not divide the {stage} ranks of a pipeline stage "
                f"(tp={self.tp} x cp={self.cp} x dp={self.dp}). Sizes of ep that fit: "
                f"{_divisors(stage // self.expert_tp) if stage % self.expert_tp == 0 else 'none with this etp'}."
            )

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
        """The grid whose data-parallel size fills `world_size`.

        Raises:
            GridError: `tp * cp * pp` does not divide the world; names the numbers and what would fit.
        """
        size = tp * cp * pp
        if size < 1 or world_size % size:
            raise GridError(
                f"{role}: tp={tp} x cp={cp} x pp={pp} = {size} does not divide the world of {world_size} ranks. "
                f"Products that fit: {_divisors(world_size)}; or start a multiple of {max(size, 1)} processes."
            )
        return cls(tp=tp, cp=cp, ep=ep, pp=pp, dp=world_size // size, vpp=vpp, etp=etp)

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
        """Sizes in the order of `dims` (`DIMS` or `EXPERT_DIMS`)."""
        named = {
            "tp": self.tp,
            "cp": self.cp,
            "dp": self.dp,
            "pp": self.pp,
            "etp": self.expert_tp,
            "ep": self.ep,
            "edp": self.expert_dp,
        }
        return tuple(named[dim] for dim in dims)

    def coords(self, rank: int) -> Coords:
        """Where `rank` (0 to world_size - 1) stands."""
        if not 0 <= rank < self.world_size:
            raise GridError(f"rank {rank} is outside the grid of {self.world_size} ranks.")
        dense = dict(zip(DIMS, _unravel(rank, self.sizes(DIMS)), strict=True))
        expert = dict(zip(EXPERT_DIMS, _unravel(rank, self.sizes(EXPERT_DIMS)), strict=True))
        expert.pop("pp")
        return Coords(**dense, **expert)

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank that stands there."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def __str__(self) -> str:
        extra = "".join(
            f" {name}{size}" for name, size in (("cp", self.cp), ("ep", self.ep), ("vpp", self.vpp or 1)) if size > 1
        )
        return f"tp{self.tp} pp{self.pp} dp{self.dp}{extra}"


def _unravel(rank: int, sizes: tuple[int, ...]) -> list[int]:
    return [rank // prod(sizes[:i]) % size for i, size in enumerate(sizes)]


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
