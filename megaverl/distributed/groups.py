"""Process groups of grids. Every distinct group is created once.

Groups belong to the manager instead of megatron-core's global `parallel_state`, because
actor and critic may use different grids over the same ranks. Grids share groups of the
same ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megaverl.distributed.grid import DIMS, EXPERT_DIMS, Coords, GridShape
from megaverl.distributed.job_context import default_group
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
# Field of ProcessGroupCollection -> dimensions of the expert grid, over the same ranks.
EXPERT_GROUPS = {
    "expt_tp": ("etp",),
    "ep": ("ep",),
    "expt_dp": ("edp",),
    "tp_ep": ("etp", "ep"),
    "tp_ep_pp": ("etp", "ep", "pp"),
    "intra_expt_dp": ("edp",),
}

# Dimension and field of the groups whose bytes are counted. The first name of a group
# counts, as grids of fewer dimensions use one group for several fields. Megatron
# reduces gradients over dp and cp together.
COUNTED_GROUPS = (
    ("tp", "tp"),
    ("cp", "cp"),
    ("pp", "pp"),
    ("pp", "embd"),
    ("ep", "ep"),
    ("tp", "expt_tp"),
    ("ep", "tp_ep"),
    ("dp", "dp"),
    ("dp", "dp_cp"),
    ("dp", "expt_dp"),
    ("dp", "intra_dist_opt"),
)


@dataclass(frozen=True)
class Grid:
    """This rank's view of one grid: its coordinates and its groups.

    Attributes:
        world: group of all ranks of the grid.
    """

    shape: GridShape
    rank: int
    coords: Coords
    pg_collection: ProcessGroupCollection
    world: dist.ProcessGroup

    @property
    def tp_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.pg_collection.tp
        return group

    @property
    def cp_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.pg_collection.cp
        return group

    @property
    def pp_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.pg_collection.pp
        return group

    @property
    def dimensions(self) -> dict[str, str]:
        """Return name of a group of this rank -> its dimension. Groups of one rank are left out."""
        dimensions: dict[str, str] = {}
        for dimension, field in COUNTED_GROUPS:
            group = getattr(self.pg_collection, field)
            if group is not None and group.size() > 1:
                dimensions.setdefault(group.group_name, dimension)
        return dimensions

    @property
    def is_first_stage(self) -> bool:
        return self.coords.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coords.pp == self.shape.pp - 1


class ProcessGroupManager:
    """Creates grids over the ranks of the default group, and each distinct process group once.

    Args:
        timeout: deadline of every collective in the groups created here. None: the default group's.

    Example:
        groups = ProcessGroupManager()
        grid = groups.grid(GridShape.fit(8, tp=2, pp=2, role="actor"))
        dist.all_reduce(tensor, group=grid.tp_group)
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {
            tuple(range(dist.get_world_size())): default_group()
        }
        # Megatron-core's sequence-parallel layers need this buffer even without the
        # global state.
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:
            parallel_state._set_global_memory_buffer()

    @property
    def num_groups(self) -> int:
        """Number of distinct groups that this rank is a member of."""
        return sum(dist.get_rank() in ranks for ranks in self._groups)

    def group(self, enumeration: Iterable[Iterable[int]]) -> dist.ProcessGroup | None:
        """Create the missing groups of `enumeration`, and return the one that contains this rank, or None.

        Every rank of the world must call this in the same order, also for groups that
        it is not in. torch names a group by the number of groups created before it, so
        ranks with different counts would never connect.
        """
        own_group = None
        for ranks in enumeration:
            key = tuple(sorted(ranks))
            if key not in self._groups:
                self._groups[key] = dist.new_group(
                    list(key), timeout=self._timeout, group_desc=f"megaverl{key}"
                )
            if dist.get_rank() in key:
                own_group = self._groups[key]
        return own_group

    def grid(self, shape: GridShape) -> Grid:
        """Create the groups of a grid over all ranks of the world. Collective over the world.

        Raises:
            GridError: the grid does not have as many ranks as the world.
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
        pipelines = [
            range(first, world, world // shape.pp) for first in range(world // shape.pp)
        ]
        # Tied embeddings live on the first and last stage; only those ranks share a
        # gradient group.
        groups["embd"] = self.group({stages[0], stages[-1]} for stages in pipelines)
        groups["pos_embd"] = self.group([stages[0]] for stages in pipelines)
        # Optimizer shards are not replicated over several instances, so each of these
        # groups has one rank.
        groups["inter_dist_opt"] = self.group([rank] for rank in range(world))
        return Grid(
            shape,
            rank,
            shape.coords(rank),
            ProcessGroupCollection(**groups),
            default_group(),
        )
