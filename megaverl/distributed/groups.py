"""The process-group manager: grids over ranks, and every group made once.

Groups belong to the manager, not to megatron-core's global `parallel_state`: actor and critic may lie on
different grids over the same ranks, and groups over the same ranks are shared between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megaverl.distributed.grid import DIMS, EXPERT_DIMS, Coords, GridShape
from megaverl.distributed.worlds import default_group
from megaverl.errors import GridError
from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.hyper_comm_grid import HyperCommGrid  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402

# Field of ProcessGroupCollection -> dimensions of the dense grid that the group spans.
DENSE_GROUPS = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "dp_cp": ("cp", "dp"),
    "tp_dp_cp": ("tp", "cp", "dp"),
    "intra_dp_cp": ("cp", "dp"),
    "intra_dist_opt": DIMS,
}
# ... and of the expert grid over the same ranks.
EXPERT_GROUPS = {
    "expt_tp": ("etp",),
    "ep": ("ep",),
    "expt_dp": ("edp",),
    "tp_ep": ("etp", "ep"),
    "tp_ep_pp": ("etp", "ep", "pp"),
    "intra_expt_dp": ("edp",),
}


@dataclass(frozen=True)
class Grid:
    """This rank's view of one grid: its coordinates and its groups."""

    shape: GridShape
    rank: int
    coords: Coords
    pg_collection: ProcessGroupCollection
    world: dist.ProcessGroup

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self.pg_collection.tp

    @property
    def cp_group(self) -> dist.ProcessGroup:
        return self.pg_collection.cp

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self.pg_collection.pp

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return self.pg_collection.dp

    @property
    def is_first_stage(self) -> bool:
        return self.coords.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coords.pp == self.shape.pp - 1


class ProcessGroupManager:
    """Makes grids over the ranks of the default group, each distinct process group once.

    Args:
        timeout: the deadline of every collective on the groups made here; None: the default group's.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(dist.get_world_size())): default_group()}
        # megatron-core's sequence-parallel layers ask for this buffer even without the global state
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:
            parallel_state._set_global_memory_buffer()

    @property
    def num_groups(self) -> int:
        """Distinct groups this rank is a member of."""
        return sum(dist.get_rank() in ranks for ranks in self._groups)

    def group(self, enumeration: Iterable[Iterable[int]]) -> dist.ProcessGroup | None:
        """The group of `enumeration` that this rank is in, if any; those not there yet are made.

        Every rank of the world takes part, in the same order, for groups that it is not in as well: torch names
        a group by the number of those before it, so members that have counted differently would never meet.
        """
        mine = None
        for ranks in enumeration:
            key = tuple(sorted(ranks))
            if key not in self._groups:
                self._groups[key] = dist.new_group(list(key), timeout=self._timeout, group_desc=f"megaverl{key}")
            if dist.get_rank() in key:
                mine = self._groups[key]
        return mine

    def grid(self, shape: GridShape) -> Grid:
        """Lay `shape` over the ranks of the world; every rank takes part.

        Raises:
            GridError: the grid does not fill the world.
        """
        world, rank = dist.get_world_size(), dist.get_rank()
        if shape.world_size != world:
            raise GridError(
                f"grid {shape} has {shape.world_size} ranks, and the world {world}. "
                "GridShape.fit makes one that fills the world."
            )
        groups: dict[str, Any] = {}
        for fields, dims in ((DENSE_GROUPS, DIMS), (EXPERT_GROUPS, EXPERT_DIMS)):
            enumeration = HyperCommGrid(list(shape.sizes(dims)), list(dims))
            for field, spanned in fields.items():
                groups[field] = self.group(enumeration.get_rank_enum(list(spanned)))
        pipelines = [range(first, world, world // shape.pp) for first in range(world // shape.pp)]
        # Tied embeddings live on the first and last stage; only those ranks share a gradient group.
        groups["embd"] = self.group({stages[0], stages[-1]} for stages in pipelines)
        groups["pos_embd"] = self.group([stages[0]] for stages in pipelines)
        groups["inter_dist_opt"] = self.group([one] for one in range(world))
        return Grid(shape, rank, shape.coords(rank), ProcessGroupCollection(**groups), default_group())
